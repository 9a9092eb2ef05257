"""Parts of the reward that are normalised before they are summed."""

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from train_helpers import quiet, settings, tiny_run

import cavesson


def nan_std(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def expected(rows: list[dict[str, Any]]) -> list[float]:
    """The advantages of GDPO as TRL's "normalize_then_sum" computes them, one response at a time."""
    sums = []
    for row in rows:
        parts = dict(row["reward_parts"])
        total = 0.0
        for name, weight in dict(row["reward_weights"]).items():
            group = [dict(other["reward_parts"]).get(name) for other in rows if other["group"] == row["group"]]
            given = [score for score in group if score is not None]
            if name in parts:
                total += weight * (parts[name] - statistics.fmean(given)) / (nan_std(given) + 1e-4)
        sums.append(total)
    mean, spread = statistics.fmean(sums), statistics.stdev(sums)
    return [(total - mean) / (spread + 1e-4) for total in sums]


def test_each_part_is_normalised_before_the_sum(tmp_path: Path) -> None:
    changes = {"samples_per_prompt": 4, "batch_size": 12, "grpo__scale": "batch", "grpo__baseline": "batch"}
    tiny_run("grpo", tmp_path / "run", rewards="parts", shaping__parts="normalised", **changes).run(quiet)
    run = cavesson.open(tmp_path / "run")
    for step in (0, 1):
        rows = [row for row in run.rows().to_pylist() if row["step"] == step]
        tokens = {token["sample"]: token["advantage"] for token in run.tokens(step).to_pylist()}
        advantages = dict(zip((row["sample"] for row in rows), expected(rows), strict=True))
        assert any(len(row["reward_parts"]) == 1 for row in rows), "some response must lack a part"
        assert tokens == {sample: pytest.approx(advantages[sample], rel=2e-3, abs=1e-5) for sample in tokens}
        # The recorded reward is still the weighted sum, as the reward functions gave it.
        assert all(math.isclose(row["reward"], sum(dict(row["reward_parts"]).values())) for row in rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shaping__subtract_query": True}, 'subtract_query has no effect with parts "normalised"'),
        ({"samples_per_prompt": 1}, "compares the responses to a prompt: set samples_per_prompt"),
        ({"cleaning__discard": ["#"], "cleaning__discard_reward": -1.0}, "cleaning.discard_reward has no effect"),
    ],
)
def test_settings_that_contradict_it(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        settings(tmp_path, **{"samples_per_prompt": 2, "shaping__parts": "normalised", **changes})
