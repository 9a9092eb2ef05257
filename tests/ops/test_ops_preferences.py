import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cavesson.ops.preferences import bradley_terry, centring, dpo, hinge, ipo, orpo

numbers = st.floats(-1e4, 1e4, width=32)


def one(*values: float) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value], dtype=torch.float64) for value in values)


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("chosen", "rejected", "margin", "probability"),
    [
        (1.0, 1.0, 0.0, 0.5),
        (2.0, 0.5, 0.0, logistic(1.5)),
        (0.5, 2.0, 0.0, logistic(-1.5)),
        (2.0, 0.5, 1.0, logistic(0.5)),  # a margin asks for more
        (2.0, 0.5, -1.0, logistic(2.5)),
    ],
)
def test_bradley_terry_by_hand(chosen, rejected, margin, probability):
    assert bradley_terry(*one(chosen, rejected, margin)).item() == pytest.approx(-math.log(probability))


@settings(deadline=None)
@given(st.floats(-20, 20), st.floats(-20, 20))
def test_one_of_two_responses_is_preferred(a, b):
    either = (-bradley_terry(*one(a, b, 0.0))).exp() + (-bradley_terry(*one(b, a, 0.0))).exp()
    assert either.item() == pytest.approx(1)


def test_bradley_terry_pushes_by_the_probability_of_being_wrong():
    chosen, rejected, margin = one(0.3, 1.0, 0.5)
    chosen.requires_grad_()
    rejected.requires_grad_()
    bradley_terry(chosen, rejected, margin).backward()
    assert chosen.grad.item() == pytest.approx(-logistic(1.2))
    assert rejected.grad.item() == pytest.approx(logistic(1.2))


def test_centring_sees_the_sum_and_bradley_terry_the_difference():
    assert centring(*one(3.0, -1.0)).item() == 4
    assert centring(*one(2.0, -2.0)).item() == 0
    shifted = bradley_terry(*one(103.0, 99.0, 0.0)).item()
    assert shifted == pytest.approx(bradley_terry(*one(3.0, -1.0, 0.0)).item())


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.5])
def test_dpo_is_log_two_where_policy_and_reference_agree(label_smoothing):
    assert dpo(*one(0.0, 0.0), 0.1, label_smoothing).item() == pytest.approx(math.log(2))


def test_dpo_by_hand():
    # β·Δ = 0.5 · (1 − (−2)) = 1.5
    assert dpo(*one(1.0, -2.0), 0.5, 0.0).item() == pytest.approx(math.log(1 + math.exp(-1.5)))
    assert dpo(*one(-2.0, 1.0), 0.5, 0.0).item() == pytest.approx(math.log(1 + math.exp(1.5)))
    mixed = 0.9 * math.log(1 + math.exp(-1.5)) + 0.1 * math.log(1 + math.exp(1.5))
    assert dpo(*one(1.0, -2.0), 0.5, 0.1).item() == pytest.approx(mixed)


def test_label_smoothing_stops_where_the_labels_are_believed():
    # σ(β·Δ) = 1 − ε is all that a share ε of wrong labels can say.
    chosen, rejected = one(math.log(0.9 / 0.1) / 0.5, 0.0)
    chosen.requires_grad_()
    dpo(chosen, rejected, 0.5, 0.1).backward()
    assert chosen.grad.item() == pytest.approx(0, abs=1e-12)


def test_ipo_by_hand():
    # 1/(2β) = 5
    assert ipo(*one(3.0, -2.0), 0.1).item() == 0
    assert ipo(*one(3.0, 1.0), 0.1).item() == 9
    assert ipo(*one(3.0, -4.0), 0.1).item() == 4  # too far apart costs as well


def test_hinge_by_hand():
    assert hinge(*one(1.0, 0.0), 0.5).item() == 0.5
    assert hinge(*one(-1.0, 0.0), 0.5).item() == 1.5
    assert hinge(*one(2.0, 0.0), 0.5).item() == 0
    assert hinge(*one(9.0, 0.0), 0.5).item() == 0


@pytest.mark.parametrize("chosen", [0.0, -1e-8, -1e-3, -5.0, -200.0])
@pytest.mark.parametrize("rejected", [0.0, -1e-8, -1e-3, -5.0, -200.0])
def test_odds_of_certain_and_of_impossible_responses_are_finite(chosen: float, rejected: float):
    c, r = torch.tensor([chosen], requires_grad=True), torch.tensor([rejected], requires_grad=True)
    loss = orpo(c, r, 0.1)
    loss.backward()
    assert loss.item() >= 0
    assert all(torch.isfinite(value).all() for value in (loss, c.grad, r.grad))


@settings(deadline=None)
@given(numbers, numbers)
def test_nothing_overflows(chosen, rejected):
    c, r = torch.tensor([chosen]), torch.tensor([rejected])
    for loss in (bradley_terry(c, r, torch.zeros(1)), dpo(c, r, 0.1, 0.1), ipo(c, r, 0.1), hinge(c, r, 0.1)):
        assert loss.isfinite().all()
        assert loss.item() >= 0
