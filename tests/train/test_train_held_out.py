"""Held-out prompts: sampled, scored and recorded during training, without any effect on it."""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from several_helpers import together
from train_helpers import (
    LOGPROB,
    ONLINE,
    PROMPTS,
    build,
    everything,
    finish,
    quiet,
    settings,
    tiny_run,
    uneven,
)
from transformers import PreTrainedModel

import cavesson
from cavesson.doctor import diagnose
from cavesson.doctor.data import RunData
from cavesson.doctor.rules import RULES
from cavesson.errors import TerminatedError, UserError
from cavesson.exporters.rl_logging_board import export
from cavesson.models.tiny import tiny_model
from cavesson.record import Run
from cavesson.record.maintain.compaction import compact
from cavesson.train.run import Training

TRAINED, HELD_OUT = PROMPTS[:4], ("It was a very long and quiet night, and", "My", "The train")
"""Prompts that are trained on, and others, one of which is longer than all of them."""
EVERY = {"data__validation": 3 / 7, "evaluation__every": 2, "steps": 5}
EVALUATED = [0, 2, 4, 5]
"""Steps of evaluations: before the first step, every second one, and after the last of five."""


def evaluated(folder: Path, **changes: Any) -> Run:
    """A finished run with held-out prompts, which are the last of those it was given."""
    inputs = {"prompts": [*TRAINED, *HELD_OUT]}
    finish(folder, inputs, **EVERY, checkpoint__every=1, checkpoint__keep=9, **changes)
    return cavesson.open(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return evaluated(tmp_path_factory.mktemp("held-out") / "run")


def held_out(run: Run) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = run.rows().to_pylist(maps_as_pydicts="strict")
    return [row for row in rows if row["split"] == "eval"]


def test_each_evaluation_answers_every_held_out_prompt_once(run: Run) -> None:
    rows = held_out(run)
    assert [row["step"] for row in rows] == [step for step in EVALUATED for _ in HELD_OUT]
    assert [row["prompt"] for row in rows] == list(HELD_OUT) * len(EVALUATED)
    assert all(row["policy_version"] == row["step"] for row in rows)
    assert [row["reward"] for row in rows] == uneven([], [row["response"] for row in rows])
    assert all(row["shaped_reward"] is None and row["kl_coef"] is None for row in rows)
    trained = [row for row in run.rows().to_pylist() if row["split"] == "train"]
    assert {row["prompt"] for row in trained} == set(TRAINED)
    assert len(trained) == 5 * 6
    # No group and no sample is shared with what was trained on.
    assert {row["group"] for row in trained}.isdisjoint(row["group"] for row in rows)
    assert [row["sample"] for row in rows] == [6, 7, 8] * len(EVALUATED)
    counts = {name: run.info["prompts"][name] for name in ("count", "dropped", "held_out")}
    assert counts == {"count": 4, "dropped": [], "held_out": 3}


def test_the_metrics_are_means_over_the_recorded_responses(run: Run) -> None:
    rows, metrics = held_out(run), {row["step"]: row for row in run.steps().to_pylist()}
    for step in range(6):
        mine = [row for row in rows if row["step"] == step]
        if step not in EVALUATED:
            assert not mine and metrics[step]["evaluation/reward"] is None
            continue
        tokens = [run.tokens(step, row["sample"]) for row in mine]
        kl = [math.fsum(t["logprob"].to_numpy() - t["ref_logprob"].to_numpy()) for t in tokens]
        lengths = [t.num_rows for t in tokens]
        rewards, gaps = [r["reward"] for r in mine], [r["reward"] - r["ref_reward"] for r in mine]
        for name, values in {"reward": rewards, "length": lengths, "gap": gaps, "kl": kl}.items():
            near = {"abs": max(lengths) * LOGPROB} if name == "kl" else {"abs": 1e-12}
            mean = sum(values) / 3
            error = math.sqrt(sum((value - mean) ** 2 for value in values) / 2 / 3)
            assert metrics[step][f"evaluation/{name}"] == pytest.approx(mean, **near), name
            assert metrics[step][f"evaluation/{name}_se"] == pytest.approx(error, **near), name
    assert metrics[0]["evaluation/kl"] == 0
    assert metrics[5]["evaluation/kl"] != 0
    # After the last step there is nothing but the evaluation.
    assert metrics[5]["reward/mean"] is None and metrics[4]["reward/mean"] is not None


def test_the_reference_is_the_response_before_training(run: Run) -> None:
    rows = held_out(run)
    first = rows[: len(HELD_OUT)]
    assert [row["ref_response"] for row in first] == [row["response"] for row in first]
    assert [row["ref_reward"] for row in first] == [row["reward"] for row in first]
    for row, before in zip(rows, first * len(EVALUATED), strict=True):
        assert (row["ref_response"], row["ref_reward"]) == (before["response"], before["reward"])
    assert any(row["response"] != row["ref_response"] for row in rows)


def test_every_evaluation_draws_the_same_numbers_which_training_does_not_draw(tmp_path: Path) -> None:
    """Weights that hardly change, and the same prompts trained on: row i of both would get the same response."""
    prompts = PROMPTS[:3]
    changes: dict[str, Any] = {**EVERY, "data__validation": 0.5, "data__shuffle": False, "batch_size": 3}
    changes |= {"optimizer__learning_rate": 1e-12, "sampling__random_length": (6, 6)}
    training = build(tmp_path / "run", {"prompts": [*prompts, *prompts]}, **changes)
    assert training.collector.sampler.settings.batch_size == 3  # more are never sampled at the same time
    training.run(quiet)
    rows = cavesson.open(tmp_path / "run").rows().to_pylist()
    answers = [row for row in rows if row["split"] == "eval"]
    trained = [row for row in rows if row["split"] == "train"]
    assert [row["response"] for row in answers] == [row["ref_response"] for row in answers]
    assert all(one["prompt"] == two["prompt"] for one, two in zip(trained, answers, strict=False))
    assert {row["response"] for row in trained}.isdisjoint(row["response"] for row in answers)


def weights_of(run: Run, step: int) -> PreTrainedModel:
    """The model before a step, or after the last."""
    model = tiny_model()
    if step:
        file = Path(run.folder) / "checkpoints" / f"step-{step:08d}" / "weights.safetensors"
        kept = {name.removeprefix("model."): weight for name, weight in load_file(file).items()}
        own = model.state_dict()
        assert own.keys() & kept.keys()
        model.load_state_dict({**own, **{name: kept[name] for name in own if name in kept}})
    return model.eval()


@pytest.mark.parametrize("step", EVALUATED)
def test_it_is_the_policy_of_that_step_that_answers(run: Run, step: int) -> None:
    model, others = weights_of(run, step), [weights_of(run, other) for other in range(6) if other != step]
    for row in (row for row in held_out(run) if row["step"] == step):
        tokens = run.tokens(step, row["sample"])
        ids, length = row["prompt_ids"] + tokens["token_id"].to_pylist(), tokens.num_rows

        def logprobs(model: PreTrainedModel, ids: Sequence[int] = ids, length: int = length) -> Any:
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            return logits[:-1].gather(1, torch.tensor(ids[1:])[:, None])[-length:, 0].numpy()

        for name in ("logprob", "sampler_logprob"):
            assert np.abs(tokens[name].to_numpy() - logprobs(model)).max() < 2 * LOGPROB, name
        assert all(np.abs(tokens["logprob"].to_numpy() - logprobs(other)).max() > 10 * LOGPROB for other in others)


def trained_part(result: Mapping[str, Any]) -> dict[str, Any]:
    """What `everything` says of a run, but for its evaluations."""
    rows = [row for row in result["rows"] if row["split"] == "train"]
    samples = {(row["step"], row["sample"]) for row in rows}
    metrics = [
        {name: value for name, value in row.items() if not name.startswith("evaluation/")} for row in result["metrics"]
    ]
    return {
        "rows": rows,
        "tokens": [t for step in result["tokens"] for t in step if (t["step"], t["sample"]) in samples],
        "metrics": [row for row in metrics if row["reward/mean"] is not None],
        "weights": {name: data for name, data in result["files"].items() if "weights" in name or "model" in name},
    }


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ONLINE},
    "grpo, resampled": ("grpo", {"grpo__resample": 2, "samples_per_prompt": 2, "rewards": "rare", "steps": 3}),
    "ppo with adapters": ("ppo", {"model__lora__rank": 2}),
    "a minimum length": ("rloo", {"sampling__min_new_tokens": 1, "sampling__batch_size": 2}),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "ppo" else pytest.mark.slow) for n in CASES])
def test_an_evaluation_changes_nothing_of_the_training(name: str, tmp_path: Path) -> None:
    algorithm, changes = CASES[name]
    file = tmp_path / "held-out.txt"
    file.write_text("".join(f"{prompt}\n" for prompt in HELD_OUT))
    changes = {"rewards": "noisy", "steps": 3, **changes}
    asked = {"data__validation_path": str(file), "evaluation__every": 1}
    for folder, more in (("off", {}), ("on", asked)):
        tiny_run(algorithm, tmp_path / folder, **changes, **more).run(quiet)
    off, on = (everything(tmp_path / folder) for folder in ("off", "on"))
    assert sum(row["split"] == "eval" for row in on["rows"]) == 4 * len(HELD_OUT)
    assert trained_part(on) == trained_part(off)
    assert len(trained_part(on)["metrics"]) == 3


class Killed(TerminatedError):
    """The process ends here."""


def die(step: int, metrics: dict[str, float]) -> None:
    if step == 3:
        raise Killed


@pytest.mark.slow
def test_the_evaluation_at_the_end_of_a_shorter_run_is_not_left_in_a_longer_one(run: Run, tmp_path: Path) -> None:
    inputs, changes = {"prompts": [*TRAINED, *HELD_OUT]}, {**EVERY, "checkpoint__every": 1, "checkpoint__keep": 9}
    finish(tmp_path / "run", inputs, **{**changes, "steps": 3})
    assert {row["step"] for row in held_out(cavesson.open(tmp_path / "run"))} == {0, 2, 3}
    again = settings(tmp_path / "run", **changes)
    Training(again, prompts=inputs["prompts"], rewards=uneven, resume=True).run(quiet)
    assert everything(tmp_path / "run") == everything(Path(run.folder))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"update__micro_batch_size": 1}, {"sampling__batch_size": 1}], ids=str)
def test_how_the_responses_are_divided_changes_nothing(run: Run, tmp_path: Path, changes: dict[str, Any]) -> None:
    other = evaluated(tmp_path / "run", **changes)
    for name in ("step", "sample", "prompt", "response", "reward", "ref_response"):
        assert [row[name] for row in held_out(other)] == [row[name] for row in held_out(run)]
    for one, two in zip(run.steps().to_pylist(), other.steps().to_pylist(), strict=True):
        for name in (n for n in one if n.startswith("evaluation/") and one[n] is not None):
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name


def interrupted(folder: Path) -> None:
    """The run of `run`, which ends after its fourth step and is resumed."""
    inputs = {"prompts": [*TRAINED, *HELD_OUT]}
    changes = {**EVERY, "checkpoint__every": 1, "checkpoint__keep": 9}
    with pytest.raises(Killed):
        build(folder / "run", inputs, **changes).run(die)
    again = settings(folder / "run", **changes)
    resumed = Training(again, prompts=inputs["prompts"], rewards=uneven, resume=True)
    assert resumed.trainer.next_step == 3
    resumed.run(quiet)


def test_a_resumed_run_evaluates_like_one_that_was_not_interrupted(run: Run, tmp_path: Path) -> None:
    interrupted(tmp_path)
    assert everything(tmp_path / "run") == everything(Path(run.folder))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("then", "now", "steps"), [(2, 1, [0, 2, 3, 4, 5]), (1, 4, [0, 1, 2, 4, 5]), (2, 0, [0, 2, 5])]
)
def test_how_often_to_evaluate_may_change_when_a_run_is_resumed(
    run: Run, tmp_path: Path, then: int, now: int, steps: list[int]
) -> None:
    """It resumes at step 3; evaluations at steps that both runs have, and the training, are those of `run`."""
    inputs, changes = {"prompts": [*TRAINED, *HELD_OUT]}, {**EVERY, "checkpoint__every": 1, "checkpoint__keep": 9}
    with pytest.raises(Killed):
        build(tmp_path / "run", inputs, **{**changes, "evaluation__every": then}).run(die)
    again = settings(tmp_path / "run", **{**changes, "evaluation__every": now})
    resumed = Training(again, prompts=inputs["prompts"], rewards=uneven, resume=True)
    assert resumed.trainer.next_step == 3
    resumed.run(quiet)
    other = cavesson.open(tmp_path / "run")
    assert [row["step"] for row in held_out(other)] == [step for step in steps for _ in HELD_OUT]

    def answers(run: Run) -> dict[tuple[int, int], Any]:
        names = ("response", "reward", "ref_response", "ref_reward")
        return {(row["step"], row["sample"]): [row[name] for name in names] for row in held_out(run)}

    ours, theirs = answers(other), answers(run)
    common = ours.keys() & theirs.keys()
    assert len(common) == 3 * len(set(steps) & set(EVALUATED)) and all(ours[key] == theirs[key] for key in common)
    assert trained_part(everything(tmp_path / "run")) == trained_part(everything(Path(run.folder)))
    assert other.info["changes"][0]["settings"] == {"evaluation.every": [then, now]}


@pytest.mark.slow
def test_other_held_out_prompts_are_refused_when_a_run_is_resumed(tmp_path: Path) -> None:
    inputs, changes = {"prompts": [*TRAINED, *HELD_OUT]}, {**EVERY, "checkpoint__every": 1}
    with pytest.raises(Killed):
        build(tmp_path / "run", inputs, **changes).run(die)
    again = settings(tmp_path / "run", **changes)
    for others in (["Who", *HELD_OUT[1:]], [*HELD_OUT[1:], HELD_OUT[0]]):
        with pytest.raises(UserError, match=r"run was started with other held-out prompts .* in prompts=, .*; restore"):
            Training(again, prompts=[*TRAINED, *others], rewards=uneven, resume=True)
    with pytest.raises(UserError, match=r"run was started with other prompts; resume it with the data as it was"):
        Training(again, prompts=["Who", *TRAINED[1:], *HELD_OUT], rewards=uneven, resume=True)
    Training(again, prompts=inputs["prompts"], rewards=uneven, resume=True).run(quiet)
    info = cavesson.open(tmp_path / "run").info["prompts"]
    assert info["held_out_fingerprint"] not in (None, info["fingerprint"])


def test_a_changed_file_of_held_out_prompts_is_named(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("prompts.txt", "held-out.txt")}
    files["prompts.txt"].write_text("".join(f"{prompt}\n" for prompt in TRAINED))
    files["held-out.txt"].write_text("".join(f"{prompt}\n" for prompt in HELD_OUT))
    places = {"data__path": str(files["prompts.txt"]), "data__validation_path": str(files["held-out.txt"])}
    asked = settings(tmp_path / "run", **places, steps=5, checkpoint__every=1)
    with pytest.raises(Killed):
        Training(asked, rewards=uneven).run(die)
    files["held-out.txt"].write_text("My\n")
    with pytest.raises(UserError) as raised:
        Training(asked, rewards=uneven, resume=True)
    assert str(raised.value) == (
        f"{tmp_path}/run was started with other held-out prompts than those in {files['held-out.txt']}, and "
        "evaluations on different prompts cannot be compared; restore the prompts, or start a new run with another "
        "--run"
    )


@pytest.mark.slow
def test_two_interrupted_processes_evaluate_like_one(run: Run, tmp_path: Path) -> None:
    ended = together(tmp_path, 2, interrupted, tmp_path)
    assert [done.code for done in ended] == [0, 0], [done.err[-2000:] for done in ended]
    other = cavesson.open(tmp_path / "run")
    assert {row["rank"] for row in held_out(other)} == {0, 1}
    for name in ("step", "sample", "group", "prompt", "response", "reward", "ref_response", "ref_reward"):
        assert [row[name] for row in held_out(other)] == [row[name] for row in held_out(run)]
    for one, two in zip(run.steps().to_pylist(), other.steps().to_pylist(), strict=True):
        for name in (n for n in one if n.startswith("evaluation/") and one[n] is not None):
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name


def too_few(folder: Path) -> None:
    with pytest.raises(UserError, match="1 held-out prompt cannot be shared by 2 processes; hold out more with"):
        build(folder / "run", data__validation=1 / 6)


@pytest.mark.slow
def test_fewer_held_out_prompts_than_processes_are_refused(tmp_path: Path) -> None:
    ended = together(tmp_path, 2, too_few, tmp_path)
    assert [done.code for done in ended] == [0, 0], [done.err[-2000:] for done in ended]


def test_what_contradicts_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="prompts= come without a source of held-out prompts"):
        build(tmp_path / "run", data__validation_path="other.txt")
    with pytest.raises(UserError, match=r"prompts=: data.validation = 0.01 of its 6 rows leaves one part empty"):
        build(tmp_path / "run", data__validation=0.01)
    rows = [{"prompt": prompt, "ground_truth": "x"} for prompt in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "other.txt").write_text("It\n")
    places = {"data__path": str(tmp_path / "prompts.jsonl"), "data__validation_path": str(tmp_path / "other.txt")}
    with pytest.raises(UserError, match=r"held-out rows of \S+other.txt have no column 'ground_truth', .*; add it"):
        build(tmp_path / "run", {"prompts": None}, **places)
    with pytest.raises(UserError, match=r"held-out rows of \S+other.txt: every prompt is over 1 tokens"):
        (tmp_path / "short.txt").write_text("a\n")
        places |= {"data__path": str(tmp_path / "short.txt"), "data__max_prompt_tokens": 1}
        (tmp_path / "other.txt").write_text("It was long ago\n")
        build(tmp_path / "run", {"prompts": None}, **places)


def test_too_long_held_out_prompts_are_named(tmp_path: Path) -> None:
    notes = build(
        tmp_path / "run", {"prompts": [*TRAINED, *HELD_OUT]}, **EVERY, data__max_prompt_tokens=25
    ).trainer.notes()
    said = "1 of 3 held-out prompts are longer than data.max_prompt_tokens and were dropped: rows 1"
    assert said in notes


@pytest.mark.slow
def test_the_doctor_and_the_summary_of_raft_do_not_take_it_for_training(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "held-out.txt"
    file.write_text("".join(f"{prompt}\n" for prompt in HELD_OUT))
    asked = {"data__validation_path": str(file), "evaluation__every": 1}
    said = []
    for folder, more in (("off", {}), ("on", asked)):
        tiny_run("raft", tmp_path / folder, steps=4, **more).run()
        said.append(capsys.readouterr().out.split("RAFT")[1].split("result")[0])
        run = cavesson.open(tmp_path / folder)
        found = diagnose(RunData(run), RULES)
        said[-1] += str([(one.rule.name, one.reading) for one in found.findings])
        assert len(RunData(run).rows) == 4 * 6
    assert said[0] == said[1]


def test_merging_and_exporting_keep_it_apart(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.folder, tmp_path / "run")
    assert compact(tmp_path / "run") > 0
    merged = cavesson.open(tmp_path / "run")
    assert merged.rows().to_pylist() == run.rows().to_pylist()
    assert merged.steps().to_pylist() == run.steps().to_pylist()
    assert [merged.tokens(step).to_pylist() for step in range(6)] == [run.tokens(step).to_pylist() for step in range(6)]
    export(tmp_path / "run", tmp_path / "lines")
    written = {
        folder: [json.loads(line) for line in (tmp_path / "lines" / folder / "rank-0000.jsonl").open()]
        for folder in (".", "held-out")
    }
    assert len(written["."]) == 5 * 6 and not any("ref_reward" in line for line in written["."])
    answers = [
        {name: row[name] for name in ("step", "response", "ref_response", "ref_reward")} for row in held_out(run)
    ]
    assert [{name: line[name] for name in answers[0]} for line in written["held-out"]] == answers
