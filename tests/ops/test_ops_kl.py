import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cavesson.ops.kl import ESTIMATORS, absolute, adapted_coefficient, k1, k2, k3


def distributions() -> tuple[Tensor, Tensor]:
    """Log-probabilities of two distributions over seven tokens."""
    return torch.randn(7, dtype=torch.float64).log_softmax(0), torch.randn(7, dtype=torch.float64).log_softmax(0)


def exact_kl(log_p: Tensor, log_q: Tensor) -> float:
    p, q = log_p.exp().tolist(), log_q.exp().tolist()
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("estimator", [k1, k3])
def test_unbiased_estimators_average_to_the_exact_kl(estimator):
    log_p, log_q = distributions()
    expectation = float((log_p.exp() * estimator(log_p, log_q)).sum())
    assert expectation == pytest.approx(exact_kl(log_p, log_q), abs=1e-12)


def test_bias_of_k2_by_hand():
    # p = (½, ½), q = (¼, ¾): Δ = (ln 2, ln ⅔).
    log_p, log_q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    expectation = float((log_p.exp() * k2(log_p, log_q)).sum())
    assert expectation == pytest.approx(0.25 * (math.log(2) ** 2 + math.log(2 / 3) ** 2), abs=1e-6)  # 0.1612
    assert exact_kl(log_p, log_q) == pytest.approx(0.5 * (math.log(2) + math.log(2 / 3)), abs=1e-6)  # 0.1438


def test_k2_is_right_to_second_order():
    log_p, _ = distributions()
    log_q = (log_p + 1e-4 * torch.randn(7, dtype=torch.float64)).log_softmax(0)
    expectation = float((log_p.exp() * k2(log_p, log_q)).sum())
    assert expectation == pytest.approx(exact_kl(log_p, log_q), rel=1e-3)


def test_single_tokens_by_hand():
    logprob, reference = torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -1.5])
    assert k1(logprob, reference).tolist() == [1.0, -1.5]
    assert absolute(logprob, reference).tolist() == [1.0, 1.5]
    assert k2(logprob, reference).tolist() == [0.5, 1.125]
    expected = [math.exp(-1) - 1 + 1, math.exp(1.5) - 1 - 1.5]
    assert k3(logprob, reference).tolist() == pytest.approx(expected, rel=1e-6)


@given(st.floats(-30, 30, width=32))
def test_k3_is_never_negative(delta):
    assert k3(torch.tensor([delta]), torch.zeros(1)).item() >= 0


@pytest.mark.parametrize("delta", [1e-2, -1e-3, 1e-4])
def test_k3_keeps_its_precision_where_policies_are_close(delta):
    # ½Δ² − Δ³/6 + … in float32
    measured = k3(torch.tensor([delta]), torch.zeros(1)).item()
    assert measured == pytest.approx(delta**2 / 2 - delta**3 / 6, rel=5e-3, abs=0)


def test_names_are_those_of_trl():
    logprob, reference = torch.tensor([-1.0]), torch.tensor([-2.0])
    seen = {name: function(logprob, reference).item() for name, function in ESTIMATORS.items()}
    assert seen == pytest.approx({"k1": 1.0, "k2": 0.5, "abs": 1.0, "k3": math.exp(-1)}, rel=1e-6)
    assert ESTIMATORS["k1"](reference, logprob).item() == -1.0


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.1),  # on target
        (6.6, 0.1 * (1 + 0.1 * 256 / 10_000)),  # a tenth over it
        (7.2, 0.1 * (1 + 0.2 * 256 / 10_000)),  # where the clip begins
        (600.0, 0.1 * (1 + 0.2 * 256 / 10_000)),
        (5.4, 0.1 * (1 - 0.1 * 256 / 10_000)),
        (0.0, 0.1 * (1 - 0.2 * 256 / 10_000)),
        (-50.0, 0.1 * (1 - 0.2 * 256 / 10_000)),  # filtered sampling makes it negative
    ],
)
def test_adapted_coefficient(kl, expected):
    assert adapted_coefficient(0.1, kl, target=6.0, horizon=1e4, samples=256) == pytest.approx(expected, rel=1e-12)
