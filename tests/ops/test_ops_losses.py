import math

import pytest
import torch

from cavesson.ops.losses import clipped_ratio, clipped_value, weighted_likelihood
from cavesson.ops.ratios import token_ratio


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.1, 2.0, -2.2),  # inside the clip
        (1.5, 2.0, -2.4),  # good and likelier already: held at 1.2
        (1.5, -2.0, 3.0),  # bad and likelier: not held
        (0.5, 2.0, -1.0),  # good and less likely: not held
        (0.5, -2.0, 1.6),  # bad and less likely already: held at 0.8
        (0.9, -2.0, 1.8),
        (3.0, 0.0, 0.0),
    ],
)
def test_policy_loss_by_hand(ratio, advantage, expected):
    old = torch.tensor([[-1.0]])
    loss = clipped_ratio(token_ratio(old + math.log(ratio), old), torch.tensor([[advantage]]), 0.2, 0.2)
    assert loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_policy_gradient_at_ratio_one_is_the_policy_gradient():
    old = torch.randn(3, 4)
    advantage = torch.randn(3, 4)
    logprob = old.clone().requires_grad_()
    clipped_ratio(token_ratio(logprob, old), advantage, 0.2, 0.2).sum().backward()
    torch.testing.assert_close(logprob.grad, -advantage)  # ∇ of −Â · log π


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [(1.5, 2.0, 0.0), (0.5, -2.0, 0.0), (1.5, -2.0, 1.5 * 2.0), (0.5, 2.0, -0.5 * 2.0), (1.1, 2.0, -1.1 * 2.0)],
)
def test_policy_gradient_vanishes_only_where_the_clip_holds(ratio, advantage, expected):
    old = torch.tensor([[-1.0]])
    logprob = (old + math.log(ratio)).requires_grad_()
    clipped_ratio(token_ratio(logprob, old), torch.tensor([[advantage]]), 0.2, 0.2).sum().backward()
    assert logprob.grad.item() == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
    ("value", "old", "returns", "expected"),
    [
        (1.1, 1.0, 2.0, 0.5 * 0.9**2),  # inside the clip
        (1.5, 1.0, 2.0, 0.5 * 0.8**2),  # moved too far towards the return: priced at 1.2
        (0.5, 1.0, 2.0, 0.5 * 1.5**2),  # moved away: the plain error at 0.5 is larger than that at 0.8
        (0.5, 1.0, 0.0, 0.5 * 0.8**2),  # too far down, towards the return
        (1.5, 1.0, 0.0, 0.5 * 1.5**2),
    ],
)
def test_value_loss_by_hand(value, old, returns, expected):
    loss = clipped_value(*(torch.tensor([[x]]) for x in (value, old, returns)), 0.2)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_value_gradient_vanishes_only_where_the_clip_holds():
    value = torch.tensor([[1.1, 1.5, 0.5]], requires_grad=True)
    clipped_value(value, torch.ones(1, 3), torch.full((1, 3), 2.0), 0.2).sum().backward()
    assert value.grad.flatten().tolist() == pytest.approx([1.1 - 2.0, 0.0, 0.5 - 2.0], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (2.0, -2.0, 4.0),  # bad and likelier, up to the limit of 3
        (5.0, -2.0, 6.0),  # above it
        (5.0, 2.0, -2.4),  # good: held at 1.2 as before
        (0.5, -2.0, 1.6),
    ],
)
def test_dual_clip_bounds_the_loss_of_bad_tokens(ratio, advantage, expected):
    given = torch.tensor([[ratio]], requires_grad=True)
    loss = clipped_ratio(given, torch.tensor([[advantage]]), 0.2, 0.2, dual=3.0)
    assert loss.item() == pytest.approx(expected)
    loss.backward()
    assert given.grad.item() == (2.0 if ratio == 2.0 else 0.0)


@pytest.mark.parametrize(("ratio", "weight"), [(0.1, 0.1), (1.0, 1.0), (1.9, 1.9), (40.0, 2.0)])
@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_a_weighted_likelihood_keeps_every_gradient(ratio, weight, advantage):
    logprob = torch.tensor([[-0.7]], requires_grad=True)
    loss = weighted_likelihood(logprob, torch.tensor([[ratio]]), torch.tensor([[advantage]]), high=1.0)
    loss.backward()
    assert loss.item() == pytest.approx(weight * advantage * 0.7)
    assert logprob.grad.item() == pytest.approx(-weight * advantage)
