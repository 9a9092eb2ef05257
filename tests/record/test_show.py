import io
import json
import re
import statistics
import time

import numpy as np
import pytest
from record_helpers import rollouts
from rich.cells import cell_len
from rich.console import Console

import cavesson.record
from cavesson.errors import UserError
from cavesson.importers import import_run
from cavesson.record import Recorder, write_run, write_vocabulary
from cavesson.record.read.show import headline, show


def shown(folder, *, width: int = 120, **options) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    show(folder, console, **options)
    return console.file.getvalue()


def table(text: str, title: str) -> list[dict[str, str]]:
    """The cells of one printed table, by column."""
    lines = text[text.index(f"\n{title}") + 1 :].split("\n")
    top = next(i for i, line in enumerate(lines) if line.startswith("┃"))
    names = [cell.strip() for cell in lines[top].strip("┃").split("┃")]
    rows = []
    for line in lines[top + 2 :]:
        if not line.startswith("│"):
            break
        rows.append(dict(zip(names, (cell.strip() for cell in line.strip("│").split("│")), strict=True)))
    return rows


@pytest.fixture
def run(folder):
    """Three steps; rewards 0 to 11 shuffled, KL per response (2 tokens) twice `delta`."""
    rewards = np.array([[3, 9, 0, 5], [11, 1, 7, 4], [8, 2, 10, 6]], np.float64)
    write_vocabulary(folder, ["<s>", "Ġno", "Ċ"], ["<s>", " no", "\n"])
    with Recorder(folder) as recorder:
        for step, reward in enumerate(rewards):
            rows, tokens = rollouts(4, 2, reward=reward, response=[f"answer {r:.0f}" for r in reward])
            tokens["token_id"] = np.array([[1, 2]] * 4)
            # The KL falls as the reward rises.
            tokens["logprob"] = np.full((4, 2), -1.0, np.float32)
            tokens["ref_logprob"] = (tokens["logprob"] - (11 - reward[:, None]) / 4).astype(np.float32)
            recorder.rollouts(step, rows, tokens)
            recorder.metrics(step, {"kl/coef": 0.1 * (step + 1)})
    return folder


def test_a_text_of_ten_million_characters_is_cut_and_says_by_how_many(folder):
    with Recorder(folder) as recorder:
        recorder.rollouts(0, *rollouts(1, response=["жж  " * 2_500_000]))
    began = time.perf_counter()
    text = shown(folder, step=0, sample=0)
    assert time.perf_counter() - began < 20  # all of it takes minutes
    assert text.count("ж") == 50_000
    assert "… and 9,900,000 characters more" in " ".join(text.split())


def test_the_extremes_are_the_extremes(run):
    text = shown(run, limit=3)
    assert [row["response"] for row in table(text, "best by reward")] == ["answer 11", "answer 10", "answer 9"]
    assert [row["response"] for row in table(text, "worst by reward")] == ["answer 0", "answer 1", "answer 2"]
    assert [row["kl_k1"] for row in table(text, "highest KL")] == ["5.5", "5", "4.5"]
    assert [row["kl_k1"] for row in table(text, "lowest KL")] == ["0", "0.5", "1"]
    best = table(text, "best by reward")[1]
    assert (best["step"], best["sample"], best["reward"]) == ("2", "2", "10")


def test_a_reward_that_is_not_a_number_is_no_extreme(folder):
    with Recorder(folder) as recorder:
        rows, tokens = rollouts(3, 2, reward=np.array([1.0, np.nan, 2.0]), response=["one", "none", "two"])
        recorder.rollouts(0, rows, tokens)
    text = shown(folder, limit=3)
    assert [row["response"] for row in table(text, "best by reward")] == ["two", "one"]
    assert [row["response"] for row in table(text, "worst by reward")] == ["one", "two"]


def test_one_step_has_its_own_extremes(run):
    best = table(shown(run, step=0, limit=9), "best by reward")
    assert [row["response"] for row in best] == ["answer 9", "answer 5", "answer 3", "answer 0"]


def test_the_step_table_has_means_and_spread(run):
    rows = table(shown(run), "steps")
    mean, spread = statistics.fmean([3, 9, 0, 5]), statistics.pstdev([3, 9, 0, 5])
    assert rows[0]["reward"] == f"{mean:.4g} ± {spread:.4g}"
    assert rows[0]["kl_k1"] == f"{(11 - mean) / 2:.4g}"
    assert [row["length"] for row in rows] == ["2"] * 3
    assert [row["kl/coef"] for row in rows] == ["0.1", "0.2", "0.3"]
    assert "entropy" not in rows[0] and "split" not in rows[0]


def test_splits_are_not_mixed(folder):
    with Recorder(folder) as recorder:
        recorder.rollouts(0, *rollouts(2, reward=[1.0, 1.0], split=["train"] * 2))
        recorder.rollouts(0, *rollouts(2, reward=[3.0, 3.0], split=["eval"] * 2, sample=[2, 3]))
    found = [(row["step"], row["split"], row["reward"]) for row in table(shown(folder), "steps")]
    assert found == [("0", "train", "1 ± 0"), ("0", "eval", "3 ± 0")]


@pytest.fixture
def both(folder):
    """Steps 0 and 1 are trained on, 0 and 2 evaluated; held-out responses have higher rewards and lower KLs."""
    with Recorder(folder) as recorder:
        for step, split, reward in (
            (0, "train", [1.0, 2.0]),
            (0, "eval", [30.0]),
            (1, None, [5.0, 3.0]),
            (2, "eval", [40.0]),
        ):
            size = len(reward)
            rows, tokens = rollouts(size, 2, reward=reward, split=[split] * size)
            rows |= {"response": [f"answer {one:.0f}" for one in reward]}
            rows |= {"sample": np.arange(size) + 8 * (split == "eval")}
            tokens["logprob"] = np.full((size, 2), -1.0, np.float32)
            tokens["ref_logprob"] = np.repeat(np.array(reward, np.float32)[:, None], 2, 1) - 1
            recorder.rollouts(step, rows, tokens)
    return folder


def test_lists_are_of_training_or_of_held_out_responses(both):
    trained, held_out = shown(both), shown(both, split="eval")
    for text, responses in ((trained, [5, 3, 2, 1]), (held_out, [40, 30])):
        wanted = [f"answer {one}" for one in responses]
        assert [row["response"] for row in table(text, "best by reward")] == wanted
        assert [row["response"] for row in table(text, "worst by reward")] == wanted[::-1]
        assert [row["response"] for row in table(text, "lowest KL")] == wanted
        assert [row["response"] for row in table(text, "highest KL")] == wanted[::-1]
    assert [row["step"] for row in table(held_out, "steps")] == ["0", "2"]
    assert [row["reward"] for row in table(held_out, "steps")] == ["30 ± 0", "40 ± 0"]
    assert [row["response"] for row in table(shown(both, step=0), "best by reward")] == ["answer 2", "answer 1"]
    assert [row["response"] for row in table(shown(both, step=0, split="eval"), "best by reward")] == ["answer 30"]


def test_every_evaluation_of_a_long_run_is_shown(folder):
    with Recorder(folder) as recorder:
        for step in range(60):
            recorder.rollouts(step, *rollouts(1, 1))
            if step % 15 == 7:
                recorder.rollouts(step, *rollouts(1, 1, split=["eval"], sample=[5]))
    assert [row["step"] for row in table(shown(folder, split="eval"), "steps")] == ["7", "22", "37", "52"]


def test_what_the_lists_leave_out_is_said(both, folder):
    assert "left out of the lists: 2 held-out responses; --held-out shows them" in shown(both)
    assert "left out of the lists: 4 training responses; without --held-out" in shown(both, split="eval")
    assert "left out of the lists: 1 held-out response" in shown(both, step=0)
    assert "left out" not in shown(both, step=1)


def test_the_header_counts_training_and_held_out_responses_apart(both):
    header = shown(both).split("\nsteps: means")[0]
    facts = dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in header.split("\n") if "  " in line.strip())
    assert facts["rollouts"] == "4" and facts["held-out rollouts"] == "2"
    page = re.sub(r"(<[^>]*>\s*)+", " ", cavesson.record.open(both)._repr_html_())
    assert " rollouts 4 held-out rollouts 2 " in page


def test_what_a_step_or_a_run_does_not_have_is_said(both, tmp_path):
    with pytest.raises(UserError, match=r"step 2 of .* has held-out responses only; add --held-out"):
        shown(both, step=2)
    with pytest.raises(UserError, match=r"step 1 of .* has training responses only; remove --held-out"):
        shown(both, step=1, split="eval")
    with pytest.raises(UserError, match="has no rollout of step 7; it has rollouts of 3 steps, 0 to 2"):
        shown(both, step=7, split="eval")
    with pytest.raises(UserError, match="by step and sample alone: remove --held-out"):
        shown(both, step=0, sample=8, split="eval")
    assert "answer 30" in shown(both, step=0, sample=8)
    write_run(tmp_path / "other", {"algorithm": "grpo"})
    with Recorder(tmp_path / "other") as recorder:
        recorder.rollouts(0, *rollouts(1, 1))
    with pytest.raises(UserError, match="has no held-out responses; remove --held-out"):
        shown(tmp_path / "other", split="eval")


def test_many_steps_are_thinned_evenly_with_the_first_and_the_last(folder):
    with Recorder(folder) as recorder:
        for step in range(0, 200, 2):
            recorder.rollouts(step, *rollouts(1, 1))
    steps = [int(row["step"]) for row in table(shown(folder), "steps")]
    assert len(steps) == 20
    assert (steps[0], steps[-1]) == (0, 198)
    assert set(np.diff(steps)) <= {10, 12}


def test_a_rollout_is_shown_token_by_token(run):
    text = shown(run, step=1, sample=2)
    assert "prompt 2" in text and "answer 7" in text
    tokens = table(text, "tokens")
    assert [row["token"] for row in tokens] == ["no", "↵"]
    assert [row["position"] for row in tokens] == ["0", "1"]
    # reward 7: Δ = (11 − 7) / 4
    assert [(row["logprob"], row["ref_logprob"], row["kl_k1"]) for row in tokens] == [("-1", "-2", "1")] * 2
    assert not {"value", "token_reward", "advantage"} & tokens[0].keys()


def test_what_was_measured_is_shown(folder):
    rows, tokens = rollouts(1, 2, finish_reason=["stop"], reward_parts=[{"format": 0.25, "answer": 2.0}])
    tokens |= {name: np.array([[0.5, 0.25]], np.float32) for name in ("value", "token_reward", "advantage")}
    with Recorder(folder) as recorder:
        recorder.rollouts(0, rows, tokens)
    text = shown(folder, step=0, sample=0)
    assert "finish_reason  stop" in text and "format 0.25, answer 2" in text
    row = table(text, "tokens")[1]
    assert [row[name] for name in ("value", "token_reward", "advantage")] == ["0.25"] * 3
    assert "KL" not in row and "ref_response" not in text


def test_text_is_printed_as_it_is(folder):
    hostile = "[bold red]x[/] [/nonsense] :smile: \\[a] \x1b[31m\a"
    rows, tokens = rollouts(1, 1, prompt=[hostile], response=[hostile + "\n第二行 🎉"])
    with Recorder(folder) as recorder:
        recorder.rollouts(0, rows, tokens)
    visible = "[bold red]x[/] [/nonsense] :smile: \\[a] ␛[31m␇"
    assert f"{visible}↵第二行 🎉" in shown(folder, width=200)
    detail = shown(folder, step=0, sample=0)
    assert detail.count(visible) == 2 and "第二行 🎉" in detail
    assert "\x1b" not in detail


@pytest.mark.parametrize("width", [40, 80])
def test_wide_characters_fit_narrow_terminals(folder, width):
    with Recorder(folder) as recorder:
        recorder.rollouts(0, *rollouts(1, 1, response=["鹤梦桃梅🎉" * 40]))
    assert max(cell_len(line) for line in shown(folder, width=width).split("\n")) <= width


def test_the_header_says_what_was_trained(run):
    header = shown(run).split("\nsteps: means")[0]
    assert [line.split(maxsplit=1)[1].strip() for line in header.split("\n")] == [
        "some/model",
        "ppo",
        "0 to 2, 3 recorded",
        "12",
    ]


def test_a_model_that_another_program_named_by_a_text_stops_nothing(tmp_path):
    write_run(tmp_path, {"algorithm": "ppo", "model": "some/model"})
    assert "ppo" in shown(tmp_path)


def test_a_run_without_rollouts_says_so(folder):
    assert "none recorded yet" in shown(folder)


def test_a_sample_needs_its_step(run):
    with pytest.raises(UserError, match="give the step too"):
        shown(run, sample=1)


NOISE = [0.0, 0.1, -0.1] * 4


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([0.3], "0.3"),
        ([0.3, 0.4], "0.3 → 0.4"),  # nothing shows by how much two steps differ by chance
        ([0.3 + 0.1 * i for i in range(12)], "0.3 → 1.4 (rose)"),
        ([0.3 - 0.1 * i for i in range(12)], "0.3 → -0.8 (fell)"),
        ([*NOISE[:-1], 0.2], "0 → 0.2 (no clear change)"),
    ],
)
def test_a_reward_rose_or_fell_only_if_chance_does_not_explain_it(tmp_path, rewards, said):
    write_run(tmp_path, {})
    with Recorder(tmp_path) as recorder:
        for step, reward in enumerate(rewards):
            recorder.metrics(step, {"reward/mean": reward})
    assert headline(tmp_path) == f"mean reward of a step {said}"


def test_settings_that_changed_on_resuming_are_shown(tmp_path):
    changed = {"attempt": 1, "start_step": 20, "settings": {"steps": [20, 24], "checkpoint.every": [10, 5]}}
    write_run(tmp_path, {"changes": [changed]})
    console = Console(record=True, width=120, file=io.StringIO())
    show(tmp_path, console)
    assert "changed  from step 20 on: steps 20 → 24, checkpoint.every 10 → 5" in console.export_text()


def test_tokens_that_were_not_learned_are_shown_as_such_and_padding_is_left_out(tmp_path):
    line = {"step": 0, "prompt": "p", "response": "r", "reward": 1.0, "logprob": [-0.5] * 6}
    line |= {"token": [" 7", " tool", " tool", " done", "<pad>", "<pad>"], "mask": [1, 0, 0, 1, 0, 0]}
    (tmp_path / "log.jsonl").write_text(json.dumps(line))
    import_run(tmp_path / "log.jsonl", tmp_path / "run")
    text = shown(tmp_path / "run", step=0, sample=0)
    tokens = [(row["token"], row[""]) for row in table(text, "tokens")]
    assert tokens == [("7", ""), ("tool", "not learned"), ("tool", "not learned"), ("done", "")]
    assert "2 padding tokens at the end are not shown" in text


def test_responses_without_a_reward_are_counted_and_in_no_list_by_reward(folder):
    with Recorder(folder) as recorder:
        for step, reward in enumerate([[1.0, 2.0, 3.0], [None, 4.0, None], [None] * 3]):
            rows, tokens = rollouts(3, 2)
            recorder.rollouts(step, rows | {"reward": reward}, tokens)
    text = shown(folder)
    steps = table(text, "steps: means over the rollouts")
    assert [(line["step"], line["unscored"], line["reward"]) for line in steps] == [
        ("0", "", "2 ± 0.8165"), ("1", "2", "4 ± 0"), ("2", "3", ""),
    ]  # fmt: skip
    assert [line["reward"] for line in table(text, "best by reward")] == ["4", "3", "2", "1"]
    assert [line["reward"] for line in table(text, "worst by reward")] == ["1", "2", "3", "4"]
    assert "nan" not in text.lower()


def test_a_record_without_rewards_has_no_column_of_them(folder):
    with Recorder(folder) as recorder:
        rows, tokens = rollouts(3, 2)
        recorder.rollouts(0, rows | {"reward": [None] * 3}, tokens)
    assert "unscored" not in shown(folder) and "best by reward" not in shown(folder)
