"""Fine-tuning learns what TRL's learns: −log π of the response's tokens, with its end, averaged over the batch."""

from pathlib import Path
from typing import Any

import pytest
from parity_helpers import (
    BATCH_SIZE,
    LEARNING_RATE,
    STEPS,
    TOLERANCE,
    build,
    demonstrations,
    losses,
    save_model,
    write_rows,
)

pytest.importorskip("trl", reason="TRL is not installed")
import trl_runs


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        ({"completion_only_loss": False}, {"data": {"learn": "all"}}),
        ({"max_length": 24}, {"data": {"max_length": 24}}),
    ],
    ids=["responses", "prompts too", "cut"],
)
def test_losses_are_those_of_trl(tmp_path: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    rows, model = demonstrations(), save_model(tmp_path / "model")
    expected = trl_runs.sft(str(model), rows, BATCH_SIZE, LEARNING_RATE, **theirs)
    training = build("sft", tmp_path / "run", model, write_rows(tmp_path / "rows.jsonl", rows), **ours)
    seen = losses(training, "loss/nll")
    assert len(seen) == STEPS and expected[0] - expected[-1] > 0.1
    assert seen == pytest.approx(expected, abs=TOLERANCE)
