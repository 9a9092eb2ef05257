"""Responses that no reward judges: a step with them does what the same step without them does."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from several_helpers import command, together
from train_helpers import ONLINE, farthest, quiet, timeless, tiny_flags, tiny_run, weights

import cavesson
from cavesson.train.batches import Batches
from cavesson.train.metrics import Clock
from cavesson.train.resuming import settings_of
from cavesson.train.run import Training
from cavesson.types import Rollouts


class Without(Batches):
    """Batches without the responses that no reward judges."""

    def take(self, step: int, number: int, clock: Clock) -> Rollouts:
        return super().take(step, number, clock).scored()


def without(training: Training) -> Training:
    trainer: Any = training.trainer
    trainer.batches = Without(**{one.name: getattr(trainer.batches, one.name) for one in fields(Batches)})
    return training


CASES: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name} for name in ONLINE},
    "grpo, of the step, constant": {
        "algorithm": "grpo", "grpo__scale": "batch", "grpo__baseline": "batch", "grpo__normalise": "constant",
        "update__epochs": 1, "update__mini_batches": 1, "update__micro_batch_size": 2,
    },
    "grpo, single pass": {"algorithm": "grpo", "update__epochs": 1, "update__mini_batches": 1},
    "raft, local": {"algorithm": "raft", "raft__selection": "local", "samples_per_prompt": 2},
    "ppo, whitened rewards": {"algorithm": "ppo", "ppo__whiten_rewards": True, "update__micro_batch_size": 1},
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_same_as_without_them(tmp_path: Path, case: str) -> None:
    changes = {"rewards": "some", "batch_size": 12, "checkpoint__every": 0, **CASES[case]}
    name = changes.pop("algorithm")
    whole = tiny_run(name, tmp_path / "whole", **changes).run(quiet)
    less = without(tiny_run(name, tmp_path / "less", **changes)).run(quiet)
    assert farthest(weights(whole.policy), weights(less.policy)) == 0
    shares = [metrics.pop("reward/unscored") for metrics in whole.metrics]
    assert all(0 < share < 1 for share in shares)
    assert not any(metrics.pop("reward/unscored") for metrics in less.metrics)
    assert [timeless(one) for one in whole.metrics] == [timeless(one) for one in less.metrics]
    run = cavesson.open(tmp_path / "whole")
    rows = [row for row in run.rows().to_pylist() if row["step"] == 0]
    expected = [None if sum(map(ord, row["response"])) % 3 == 0 else len(row["response"]) / 3 for row in rows]
    assert [row["reward"] for row in rows] == expected
    assert expected.count(None) / len(rows) == pytest.approx(shares[0])
    for row, reward in zip(rows, expected, strict=True):
        judged = reward is not None
        assert dict(row["reward_parts"] or []) == ({"some": reward} if judged else {})
        assert dict(row["reward_weights"] or []) == ({"some": 1.0} if judged else {})
        assert dict(row["reward_reasons"] or []) == ({"some": f"{len(row['response'])} letters"} if judged else {})
        assert (row["shaped_reward"] is None) == (not judged)
        tokens = run.rollout(row["step"], row["sample"]).tokens
        assert (tokens["advantage"][0].as_py() is not None) == judged if len(tokens) else True


def test_a_step_without_any_reward_changes_no_weight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = tiny_run("grpo", tmp_path / "run", rewards="none")
    before = weights(training.trainer.learner.model)
    result = training.run(quiet)
    assert farthest(before, weights(result.policy)) == 0
    assert [metrics["reward/unscored"] for metrics in result.metrics] == [1.0, 1.0]
    assert capsys.readouterr().err.count("no reward judged any response") == 2
    assert set(cavesson.open(tmp_path / "run").rows()["reward"].to_pylist()) == {None}


def test_a_run_goes_on_inside_a_step_with_them(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"rewards": "some", "batch_size": 12, "checkpoint__updates": 1, "steps": 1}
    whole = tiny_run("ppo", tmp_path / "whole", **changes).run(quiet)
    training = tiny_run("ppo", tmp_path / "run", **changes)
    training.trainer.signals.asked = 15  # as if SIGTERM had come
    with pytest.raises(cavesson.errors.StoppedError):
        training.run(quiet)
    again = Training(settings_of(tmp_path / "run", "ppo", []), resume=True)
    assert again.trainer.unfinished is not None  # type: ignore[attr-defined]
    result = again.run(quiet)
    assert farthest(weights(whole.policy), weights(result.policy)) == 0
    first, second = (
        cavesson.open(tmp_path / name).rows().drop_columns("attempt").to_pylist() for name in ("whole", "run")
    )
    assert first == second


def test_held_out_responses_that_are_not_judged_do_not_count(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"rewards": "some", "data__validation": 0.67, "evaluation__every": 1}
    result = tiny_run("grpo", tmp_path / "run", **changes).run(quiet)
    rows = cavesson.open(tmp_path / "run").rows().to_pylist()
    rewards = [row["reward"] for row in rows if row["split"] == "eval" and row["step"] == 0]
    judged = [reward for reward in rewards if reward is not None]
    metrics = result.metrics[0]
    assert metrics.get("evaluation/unscored", 0.0) == pytest.approx(1 - len(judged) / len(rewards))
    assert metrics.get("evaluation/reward") == (pytest.approx(sum(judged) / len(judged)) if judged else None)


@pytest.mark.slow
def test_a_process_may_have_no_response_that_is_judged(tmp_path: Path) -> None:
    flags = tiny_flags("grpo", tmp_path / "run", rewards="in_first")
    done = together(tmp_path, 2, command, "grpo", *flags)
    assert [one.code for one in done] == [0, 0], [one.err for one in done]
    rewards = {row["rank"]: [] for row in cavesson.open(tmp_path / "run").rows().to_pylist()}
    for row in cavesson.open(tmp_path / "run").rows().to_pylist():
        rewards[row["rank"]].append(row["reward"])
    assert None not in rewards[0] and set(rewards[1]) == {None}
    steps = cavesson.open(tmp_path / "run").steps().to_pylist()
    assert [step["reward/unscored"] for step in steps] == [0.5, 0.5]
    assert torch.isfinite(torch.tensor([step["loss/total"] for step in steps])).all()
