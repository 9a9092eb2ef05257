"""DPO learns what TRL's learns: one loss per pair of summed log-ratios, averaged over the pairs."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_helpers import BATCH_SIZE, LEARNING_RATE, STEPS, TOLERANCE, build, losses, pairs, save_model, write_rows

from cavesson.ops.preferences import orpo

pytest.importorskip("trl", reason="TRL is not installed")
import trl_runs


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        ({"beta": 0.5}, {"beta": 0.5}),
        ({"loss_type": ["ipo"]}, {"loss_type": "ipo", "length_normalised": True}),
        ({"loss_type": ["hinge"]}, {"loss_type": "hinge"}),
        ({"loss_type": ["sigmoid_norm"], "beta": 2.0}, {"length_normalised": True, "beta": 2.0}),
    ],
    ids=["sigmoid", "beta", "ipo", "hinge", "sigmoid_norm"],
)
def test_losses_are_those_of_trl(tmp_path: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    rows, model = pairs(), save_model(tmp_path / "model")
    expected = trl_runs.dpo(str(model), rows, BATCH_SIZE, LEARNING_RATE, **theirs)
    training = build("dpo", tmp_path / "run", model, write_rows(tmp_path / "rows.jsonl", rows), dpo=ours)
    seen = losses(training, "loss/total")
    assert len(seen) == STEPS and max(expected) - min(expected) > 1e-3
    assert seen == pytest.approx(expected, abs=TOLERANCE)
    if not theirs:
        assert expected[0] == pytest.approx(math.log(2), abs=1e-6)


def test_simpo_is_that_of_trl(tmp_path: Path) -> None:
    rows, model = pairs(), save_model(tmp_path / "model")
    given = {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.3, "cpo_alpha": 0.0}
    expected = trl_runs.cpo(str(model), rows, BATCH_SIZE, LEARNING_RATE, **given)
    ours = {"reference_free": True, "length_normalised": True, "beta": 2.0, "margin": 1.3}
    training = build("dpo", tmp_path / "run", model, write_rows(tmp_path / "rows.jsonl", rows), dpo=ours)
    assert losses(training, "loss/total") == pytest.approx(expected, abs=TOLERANCE)


def test_odds_ratios_are_those_of_trl() -> None:
    chosen, rejected = torch.tensor([-0.01, -0.7, -3.0, -0.2]), torch.tensor([-2.0, -0.5, -3.0, -0.001])
    expected = trl_runs.odds_ratio_losses(chosen, rejected, beta=0.3)
    torch.testing.assert_close(orpo(chosen, rejected, 0.3) + chosen, expected)
