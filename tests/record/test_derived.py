"""The derived token columns against Schulman's definitions, evaluated in exact arithmetic or on the torch side."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from cavesson.ops.kl import k1, k3
from cavesson.record.derived import DERIVED


def test_values_by_hand():
    # p = 1/2 and 1/4, q = 1/4 and 1/2; k3 = q/p − 1 − ln(q/p).
    tokens = {"logprob": np.log([0.5, 0.25]), "ref_logprob": np.log([0.25, 0.5]), "sampler_logprob": np.zeros(2)}
    tokens["teacher_logprob"] = np.log([0.125, 0.5])
    expected = {
        "kl_k1": [math.log(2), -math.log(2)],
        "kl_k3": [0.5 - 1 + math.log(2), 2 - 1 - math.log(2)],
        "prob": [0.5, 0.25],
        "ref_prob": [0.25, 0.5],
        "sampler_gap": [-math.log(2), -math.log(4)],
        "teacher_kl": [math.log(4), -math.log(2)],
    }
    assert {name: column.of(tokens).tolist() for name, column in DERIVED.items()} == {
        name: pytest.approx(values, rel=1e-12) for name, values in expected.items()
    }


@pytest.mark.parametrize(("name", "estimator"), [("kl_k1", k1), ("kl_k3", k3)])
def test_training_computes_the_same_estimates(name, estimator):
    logprob, ref_logprob = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens = {"logprob": logprob.numpy(), "ref_logprob": ref_logprob.numpy()}
    np.testing.assert_allclose(DERIVED[name].of(tokens), estimator(logprob, ref_logprob).numpy(), rtol=1e-12)


def test_k3_of_a_tiny_log_ratio_is_half_its_square():
    tokens = {"logprob": np.array([1e-6, -1e-6]), "ref_logprob": np.zeros(2)}
    assert DERIVED["kl_k3"].of(tokens) == pytest.approx([0.5e-12, 0.5e-12], rel=1e-3, abs=0)


def test_every_derived_column_is_documented_as_declared():
    text = (Path(__file__).parents[2] / "docs" / "record.md").read_text(encoding="utf-8")
    table = text.split("| derived column |")[1].split("\n\n")[0].splitlines()[2:]
    found = {re.findall(r"`(\w+)`", line)[0]: line.split("|")[2].strip() for line in table}
    assert found == {name: column.doc for name, column in DERIVED.items()}
