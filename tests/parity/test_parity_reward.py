"""The reward model learns what TRL's learns: −log σ(r_chosen − r_rejected), averaged over the pairs.

Ours reads responses without an end token, as it will read those of other models; TRL's gets the same tokens.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from parity_helpers import (
    BATCH_SIZE,
    LEARNING_RATE,
    STEPS,
    TOLERANCE,
    build,
    losses,
    pairs,
    save_classifier,
    write_rows,
)

from cavesson.models.tiny import tiny_tokenizer

pytest.importorskip("trl", reason="TRL is not installed")
import trl_runs


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [({}, {}), ({"center_rewards_coefficient": 0.1}, {"reward_model": {"centring_coef": 0.1}})],
    ids=["plain", "centred"],
)
def test_losses_are_those_of_trl(tmp_path: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    rows, model = pairs(), save_classifier(tmp_path / "model")
    expected = trl_runs.reward(str(model), tokens(rows), BATCH_SIZE, LEARNING_RATE, **theirs)
    training = build("reward-model", tmp_path / "run", model, write_rows(tmp_path / "rows.jsonl", rows), **ours)
    seen = losses(training, "loss/total")
    assert len(seen) == STEPS and max(expected) - min(expected) > 0.01
    assert seen == pytest.approx(expected, abs=TOLERANCE)


def tokens(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What TRL is given: prompt and response as one text, in tokens."""
    tokenizer = tiny_tokenizer()
    ids = {side: tokenizer([row["prompt"] + row[side] for row in rows])["input_ids"] for side in ("chosen", "rejected")}
    margins = [{"margin": row["margin"]} if "margin" in row else {} for row in rows]
    both = zip(ids["chosen"], ids["rejected"], margins, strict=True)
    return [{"chosen_ids": chosen, "rejected_ids": rejected, **margin} for chosen, rejected, margin in both]


def test_margins_are_those_of_trl(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{**row, "margin": i / 10} for i, row in enumerate(pairs())]
    model = save_classifier(tmp_path / "model")
    expected = trl_runs.reward(str(model), tokens(rows), BATCH_SIZE, LEARNING_RATE)
    training = build("reward-model", tmp_path / "run", model, write_rows(tmp_path / "rows.jsonl", rows))
    assert losses(training, "loss/total") == pytest.approx(expected, abs=TOLERANCE)
