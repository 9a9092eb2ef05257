"""Scores of a file, against the reward model's logits for one text at a time."""

import json
import shutil
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from scipy.stats import t
from transformers import AutoTokenizer, LlamaForSequenceClassification

from cavesson.config import load
from cavesson.errors import UserError
from cavesson.ops.intervals import mean_interval, share_interval
from cavesson.record import write_run
from cavesson.tools.score import estimate, score, shown
from cavesson.tools.settings import ScoreSettings

ROWS = [
    {"prompt": "What is 2+2? ", "response": "4", "level": 1},
    {
        "prompt": "A much longer question than that one, is it not? ",
        "response": "It is, and so is its answer.",
        "level": 2,
    },
    {"prompt": "What is 2+2? ", "response": "five", "level": 3},
    {"prompt": "Why", "response": "", "level": 4},
]


def settings(*flags: Any) -> ScoreSettings:
    return load(ScoreSettings, None, ["--device", "cpu", *map(str, flags)])


def write(folder: Path, rows: list[dict[str, Any]] = ROWS) -> str:
    file = folder / "in.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(file)


def judged(models: Path, *texts: str) -> list[float]:
    """The reward model's logit for each text alone."""
    model = LlamaForSequenceClassification.from_pretrained(models / "judge").eval()
    tokenizer = AutoTokenizer.from_pretrained(models / "judge")
    with torch.no_grad():
        return [model(torch.tensor([tokenizer(text)["input_ids"]])).logits.item() for text in texts]


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_every_row_gets_its_own_score_and_keeps_its_columns(tmp_path, models):
    summary = score(write(tmp_path), settings("--rewards", models / "judge", "--out", tmp_path / "out.jsonl"))
    expected = judged(models, *(row["prompt"] + row["response"] for row in ROWS))
    found = lines(tmp_path / "out.jsonl")
    assert [{name: row[name] for name in ROWS[0]} for row in found] == ROWS
    assert [row["reward"] for row in found] == pytest.approx(expected, abs=1e-5)
    assert [row["reward_parts"] for row in found] == [{"judge": pytest.approx(value, abs=1e-5)} for value in expected]
    # Two of the four responses answer the same prompt: three independent means.
    means = [fmean(expected[::2]), expected[1], expected[3]]
    interval = summary.rewards["judge"]
    assert (summary.prompts, summary.responses) == (3, 4)
    assert interval.mean == pytest.approx(fmean(expected), abs=1e-5)
    assert interval.high - interval.mean == pytest.approx(t.ppf(0.975, 2) * stdev(means) / 3**0.5, abs=1e-5)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"chat": True}, "learned from conversations: prompts are read as they stand, so they must be what its chat"),
        ({}, "learned from plain text, and prompts are read as they stand"),
    ],
)
def test_what_a_reward_model_of_a_run_learned_from_is_said(tmp_path, models, capsys, data, said):
    run = tmp_path / "run"
    shutil.copytree(models / "judge", run / "model")
    write_run(run, {"algorithm": "reward-model", "config": {"data": data}})
    score(write(tmp_path), settings("--rewards", run))
    assert f"{run} {said}" in capsys.readouterr().err
    score(write(tmp_path), settings("--rewards", models / "judge"))
    assert "learned from" not in capsys.readouterr().err


def test_lmflow_s_candidates_become_lmflow_s_scored_candidates(tmp_path, models):
    instances = [{"input": "One? ", "output": ["a", "a longer one"]}, {"input": "Two? ", "output": ["b"]}]
    source, out = tmp_path / "in.json", tmp_path / "out.json"
    source.write_text(json.dumps({"type": "text_to_textlist", "instances": instances}))
    summary = score(str(source), settings("--rewards", models / "judge", "--out", out))
    expected = judged(models, "One? a", "One? a longer one", "Two? b")
    written = json.loads(out.read_text())
    assert written["type"] == "text_to_scored_textlist"
    assert [instance["input"] for instance in written["instances"]] == ["One? ", "Two? "]
    scored = [one for instance in written["instances"] for one in instance["output"]]
    assert [one["text"] for one in scored] == ["a", "a longer one", "b"]
    assert [one["score"] for one in scored] == pytest.approx(expected, abs=1e-5)
    assert (summary.prompts, summary.responses) == (2, 3)
    # What was written can be scored again.
    assert score(str(out), settings("--rewards", "lowercase")).rewards["lowercase"].mean == pytest.approx(
        (1 + 10 / 12 + 1) / 3
    )


def test_other_columns_reach_the_reward_and_shares_get_the_interval_of_a_share(tmp_path):
    rows = [{"q": str(n), "a": str(n % 3), "truth": "#### 0"} for n in range(10)]
    columns = '{prompt = "q", response = "a", ground_truth = "truth"}'
    use = "cavesson.rollout.rewards.exact_match:exact_match"
    summary = score(write(tmp_path, rows), settings("--rewards", use, "--columns", columns))
    right = [n % 3 == 0 for n in range(10)]
    assert summary.rewards["exact_match"] == share_interval(right, range(10))


@pytest.mark.parametrize("wrong", [0, 1])
def test_the_interval_of_an_accuracy_stays_within_its_bounds(wrong):
    """Four responses to each of six prompts, all or all but one of them right."""
    right, groups = [0.0] * wrong + [1.0] * (24 - wrong), [n // 4 for n in range(24)]
    accuracy = estimate(right, groups)
    assert accuracy == share_interval(right, groups)
    assert 0.4 < accuracy.low < accuracy.mean <= accuracy.high <= 1
    assert "1.000 (1.000 to 1.000)" not in shown(accuracy)


def test_rewards_of_1_and_minus_1_are_a_share_as_well():
    right, groups = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0], [0, 0, 1, 1, 2, 2]
    share, reward = estimate(right, groups), estimate([2 * one - 1 for one in right], groups)
    bounds = (share.mean, share.low, share.high)
    assert (reward.mean, reward.low, reward.high) == pytest.approx([2 * bound - 1 for bound in bounds])


def test_rewards_without_bounds_get_student_s_interval():
    assert estimate([3.0, -1.0, 2.0], range(3)) == mean_interval([3.0, -1.0, 2.0], range(3))
    assert shown(estimate([1.7] * 4, range(4))) == "1.700 (no interval: a single prompt, or all are alike)"


def test_several_rewards_are_weighted_and_listed(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "def parts(prompts, responses, level, **columns):\n"
        '    return {"level": level, "shout": [len(r) for r in responses]}\n'
    )
    rewards = f'["lowercase", {{use = "{file}:parts", name = "own", weight = 0.5}}]'
    summary = score(write(tmp_path), settings("--rewards", rewards))
    assert list(summary.rewards) == ["reward", "lowercase", "own/level", "own/shout"]
    lower = [0, 19 / 28, 1, 0]
    lengths = [len(row["response"]) for row in ROWS]
    total = [a + 0.5 * level + 0.5 * length for a, level, length in zip(lower, (1, 2, 3, 4), lengths, strict=True)]
    assert summary.rewards["reward"].mean == pytest.approx(fmean(total))
    assert summary.rewards["own/level"].mean == 2.5
    assert "4 responses to 3 prompts" in str(summary) and "own/shout" in str(summary)


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".json"])
def test_files_of_every_kind(tmp_path, suffix):
    file = tmp_path / f"in{suffix}"
    if suffix == ".csv":
        file.write_text("prompt,response\na,bc\nb,BC\n")
    elif suffix == ".json":
        file.write_text('[{"prompt": "a", "response": "bc"}, {"prompt": "b", "response": "BC"}]')
    else:
        pq.write_table(pa.table({"prompt": ["a", "b"], "response": ["bc", "BC"]}), file)
    score(str(file), settings("--rewards", "lowercase", "--out", tmp_path / "out.jsonl"))
    assert [row["reward"] for row in lines(tmp_path / "out.jsonl")] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("row", "flags", "part"),
    [
        ({"prompt": "a"}, ("--rewards", "lowercase"), "line 1 has no columns 'prompt' and 'response'"),
        ({"prompt": 1, "response": "a"}, ("--rewards", "lowercase"), "'prompt' is 1, expected a text"),
        ({"prompt": "a", "response": [1]}, ("--rewards", "lowercase"), "'response' is [1]"),
        ({"prompt": "a", "response": "b", "reward": 1}, ("--rewards", "lowercase"), "rename the column 'reward'"),
        ({"prompt": "a", "response": "b", "prompts": 1}, ("--rewards", "lowercase"), "rename the column 'prompts'"),
        ({"prompt": "a", "response": "b"}, (), "no reward is given: add --rewards"),
        ({"prompt": "a", "response": "b"}, ("--rewards", "nowhere"), "cannot load a reward model from 'nowhere'"),
        ({"prompt": "a", "response": "b"}, ("--rewards", "lowercase", "--out", "a.csv"), "must end in"),
    ],
)
def test_mistakes_are_explained(tmp_path, row, flags, part):
    with pytest.raises(UserError) as error:
        score(write(tmp_path, [row]), settings(*flags))
    assert part in str(error.value)


def test_what_is_there_is_not_written_over(tmp_path):
    (tmp_path / "out.jsonl").touch()
    with pytest.raises(UserError, match="exists already"):
        score(write(tmp_path), settings("--rewards", "lowercase", "--out", tmp_path / "out.jsonl"))
