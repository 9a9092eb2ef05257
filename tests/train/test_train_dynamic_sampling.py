"""GRPO's dynamic sampling: what is sampled is on record, and what is trained on are groups whose rewards differ."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from train_helpers import PROMPTS, SIGNAL, farthest, tiny_run, weights

import cavesson
from cavesson.data.order import InMemory
from cavesson.errors import UserError
from cavesson.record import Run
from cavesson.types import Batch

PAIRED: dict[str, Any] = {"samples_per_prompt": 2, "batch_size": 6, "steps": 6, "optimizer__learning_rate": 1e-4}


class Watched:
    """A run, and what its model was trained on in each step."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        training = tiny_run("grpo", folder, **{**PAIRED, **changes})
        self.trainer = training.trainer
        self.batches: list[Batch] = []
        steps: list[list[Batch]] = []

        def watch(_module: Any, arguments: tuple[Batch], _scores: Any) -> None:
            if torch.is_grad_enabled():
                self.batches.append(arguments[0])

        def report(_step: int, _metrics: dict[str, float]) -> None:
            steps.append(list(self.batches))
            self.batches.clear()

        self.trainer.policy.register_forward_hook(watch)
        self.before = weights(self.trainer.policy)
        self.result = training.run(report)
        self.run: Run = cavesson.open(folder)
        self.trained = steps


def groups_of(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Two responses to a prompt stand beside each other."""
    pairs = [rows[i : i + 2] for i in range(0, len(rows), 2)]
    assert all(one["group"] == other["group"] for one, other in pairs)
    return pairs


def informative(rows: list[dict[str, Any]]) -> list[int]:
    return [row["sample"] for pair in groups_of(rows) if pair[0]["reward"] != pair[1]["reward"] for row in pair]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    folder = tmp_path_factory.mktemp("watched")
    return Watched(folder / "run", grpo__resample=2, rewards="rare", update__epochs=1, update__mini_batches=1)


def test_every_response_is_on_record(watched: Watched) -> None:
    sizes = []
    for step in range(6):
        rows = watched.run.rows(steps=[step]).to_pylist()
        assert [row["sample"] for row in rows] == list(range(len(rows)))
        assert len(rows) in (6, 12, 18)
        tokens = Counter(watched.run.tokens(step)["sample"].to_pylist())
        assert [tokens[row["sample"]] for row in rows] == [row["length"] for row in rows]
        metrics = watched.result.metrics[step]
        assert metrics["reward/mean"] == pytest.approx(sum(row["reward"] for row in rows) / len(rows))
        sizes.append(len(rows))
    assert len(set(sizes)) > 1  # now and then a batch was enough


def test_sampling_ends_as_soon_as_there_is_enough(watched: Watched) -> None:
    for step in range(6):
        rows = watched.run.rows(steps=[step]).to_pylist()
        if len(rows) > 6:
            assert len(informative(rows[:-6])) < 6
        if len(rows) < 18:
            assert len(informative(rows)) >= 6


def test_the_first_informative_responses_are_trained_on_and_no_others(watched: Watched) -> None:
    counts = []
    for step, batches in enumerate(watched.trained):
        rows = watched.run.rows(steps=[step]).to_pylist()
        expected = informative(rows)[:6] or list(range(6))
        (batch,) = batches
        seen = [ids[: int(n)] for ids, n in zip(batch["response_ids"].tolist(), batch["learned"].sum(1), strict=True)]
        recorded = [watched.run.rollout(step, sample).tokens["token_id"].to_pylist() for sample in expected]
        assert seen == recorded
        counts.append(len(expected))
    assert counts.count(6) >= 3


def test_prompts_of_all_batches_follow_one_another(watched: Watched) -> None:
    groups = [pair[0]["group"] for step in range(6) for pair in groups_of(watched.run.rows(steps=[step]).to_pylist())]
    assert groups == InMemory(range(len(PROMPTS)), seed=0).take(0, len(groups))
    assert watched.trainer.batches.prompts_used == len(groups)


def test_advantages_come_from_the_whole_group(watched: Watched) -> None:
    for step in range(6):
        rows = watched.run.rows(steps=[step]).to_pylist()
        tokens = watched.run.tokens(step)
        for one, other in groups_of(rows):
            half = (one["reward"] - other["reward"]) / 2
            # With two of them the deviation, divided by n − 1, is √2 times the distance from the mean.
            expected = half / (2**0.5 * abs(half) + 1e-4) if half else 0.0
            for row, sign in ((one, 1), (other, -1)):
                seen = tokens.filter(tokens["sample"].to_numpy() == row["sample"])["advantage"].to_pylist()
                assert seen == pytest.approx([sign * expected] * row["length"], abs=1e-5, rel=SIGNAL)


def test_without_resampling_a_step_takes_its_batch_as_it_is(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "run", rewards="rare", update__epochs=1, update__mini_batches=1, steps=3)
    for step, (batch,) in enumerate(watched.trained):
        assert len(batch) == watched.run.rows(steps=[step]).num_rows == 6


def test_where_no_group_says_anything_nothing_is_learned(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "run", grpo__resample=2, rewards="same", kl__coef=0.0, steps=2, update__max_ratio=None)
    for step in range(2):
        assert watched.run.rows(steps=[step]).num_rows == 18
        assert watched.result.metrics[step]["group/zero_std"] == 1.0
        assert watched.result.metrics[step]["optim/grad_norm"] == 0.0
    assert farthest(watched.before, weights(watched.result.policy)) == 0.0


def test_fewer_informative_responses_than_mini_batches(tmp_path: Path) -> None:
    changes = {"grpo__resample": 1, "rewards": "rare", "update__epochs": 1, "update__mini_batches": 6, "steps": 8}
    watched = Watched(tmp_path / "run", **changes)
    sizes = [len(informative(watched.run.rows(steps=[step]).to_pylist())) for step in range(8)]
    assert {2, 4} & set(sizes)
    for size, metrics in zip(sizes, watched.result.metrics, strict=True):
        assert metrics["optim/mini_batches"] == (min(size, 6) or 6)


def test_the_horizon_of_an_adapted_coefficient_allows_for_all_that_may_be_sampled(tmp_path: Path) -> None:
    # 18 responses change the coefficient by at most 0.2 · 18 / horizon.
    changes = {"rewards": "rare", "kl__target": 0.1, "grpo__resample": 2}
    with pytest.raises(UserError, match=r"3\.6 is too short for the 18 responses.*set it above 3\.6"):
        tiny_run("grpo", tmp_path / "a", **PAIRED, **changes, kl__horizon=3.6)
    tiny_run("grpo", tmp_path / "b", **PAIRED, **changes, kl__horizon=3.7)
