import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cavesson.ops.masked import weighted_mean, weighted_var, whiten

X = torch.tensor([[1.0, 2.0, 100.0], [6.0, float("nan"), 100.0]])
MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])


def test_mean_and_variance_by_hand():
    assert weighted_mean(X, MASK).item() == pytest.approx(3.0)
    # ((1 − 3)² + (2 − 3)² + (6 − 3)²) / 3
    assert weighted_var(X, MASK).item() == pytest.approx(14 / 3)


def test_weights_need_not_be_one():
    x, weight = torch.tensor([2.0, 5.0]), torch.tensor([3.0, 1.0])
    assert weighted_mean(x, weight).item() == pytest.approx((3 * 2 + 5) / 4)
    assert weighted_var(x, weight).item() == pytest.approx((3 * 0.75**2 + 2.25**2) / 4)


def test_the_total_may_be_that_of_a_larger_batch():
    parts = [weighted_mean(X[row], MASK[row], total=3.0) for row in range(2)]
    assert torch.stack(parts).sum().item() == pytest.approx(weighted_mean(X, MASK).item())


def test_nothing_to_average_is_zero():
    assert weighted_mean(X, torch.zeros_like(X)).item() == 0.0


def test_padding_gets_no_gradient():
    x = torch.tensor([1.0, float("nan"), 3.0], requires_grad=True)
    weighted_mean(x, torch.tensor([1.0, 0.0, 1.0])).backward()
    assert x.grad.tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_makes_unit_variance(shift_mean):
    mask = (torch.rand(20, 30) < 0.6).float()
    x = torch.where(mask > 0, 5 + 3 * torch.randn(20, 30), float("nan"))
    whitened = whiten(x, mask, shift_mean=shift_mean)
    inside = whitened[mask > 0]
    assert inside.var(correction=0).item() == pytest.approx(1.0, abs=1e-4)
    expected_mean = 0.0 if shift_mean else x[mask > 0].mean().item()
    assert inside.mean().item() == pytest.approx(expected_mean, abs=1e-4)
    assert whitened[mask == 0].abs().sum().item() == 0.0


def test_whitening_by_hand():
    # Mean 3, standard deviation √(14/3).
    expected = [(v - 3) / (14 / 3) ** 0.5 for v in (1, 2, 6)]
    assert whiten(X, MASK)[MASK > 0].tolist() == pytest.approx(expected, rel=1e-5)
    kept = [v + 3 for v in expected]
    assert whiten(X, MASK, shift_mean=False)[MASK > 0].tolist() == pytest.approx(kept, rel=1e-5)


@given(st.floats(-1e6, 1e6, width=32))
def test_one_token_whitens_to_zero_or_to_itself(value):
    x, mask = torch.tensor([[value, 7.0]]), torch.tensor([[1.0, 0.0]])
    assert whiten(x, mask).tolist() == [[0.0, 0.0]]
    assert whiten(x, mask, shift_mean=False).tolist() == [[value, 0.0]]
