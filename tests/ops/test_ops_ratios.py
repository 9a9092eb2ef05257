import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cavesson.ops.losses import clipped_ratio
from cavesson.ops.ratios import (
    log_ratio,
    masked_importance,
    mean_log_ratio,
    response_sum,
    response_token_ratio,
    sequence_ratio,
    sequence_token_ratio,
    token_ratio,
    truncated_importance,
)
from cavesson.ops.token_rewards import penalised, soft_overlong

# A response of two tokens that became 2 and 8 times as likely, one of one token, and an empty one; padding is NaN.
NAN = math.nan
MASK = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
OLD = torch.tensor([[-3.0, -4.0], [-1.0, NAN], [NAN, NAN]])
NEW = OLD + torch.tensor([[math.log(2), math.log(8)], [math.log(0.5), 0.0], [0.0, 0.0]])


def test_ratios_by_hand():
    assert token_ratio(NEW, OLD)[MASK > 0].tolist() == pytest.approx([2, 8, 0.5])
    assert log_ratio(NEW, OLD, MASK).tolist() == pytest.approx([math.log(16), math.log(0.5), 0])
    assert mean_log_ratio(NEW, OLD, MASK).tolist() == pytest.approx([math.log(4), math.log(0.5), 0])
    assert sequence_ratio(NEW, OLD, MASK).tolist() == pytest.approx([4, 0.5, 1])  # 4² = 2 · 8
    assert sequence_token_ratio(NEW, OLD, MASK)[MASK > 0].tolist() == pytest.approx([4, 4, 0.5])
    assert response_sum(torch.tensor([[1.0, 2.0], [3.0, NAN], [NAN, NAN]]), MASK).tolist() == [3, 3, 0]


def test_ratios_are_one_where_nothing_has_moved():
    old, mask = -torch.rand(3, 5), torch.ones(3, 5)
    assert token_ratio(old, old).eq(1).all()
    assert sequence_ratio(old, old, mask).eq(1).all()
    assert sequence_token_ratio(old, old, mask).eq(1).all()


def test_gspo_token_has_the_gradient_of_gspo():
    old, mask = -torch.rand(4, 5), (torch.arange(5) < torch.tensor([[5], [1], [3], [2]])).float()
    logprob = (old + 0.3 * torch.randn(4, 5)).requires_grad_()
    advantage = torch.randn(4)
    (sequence_ratio(logprob, old, mask) * advantage).sum().backward()
    expected, logprob.grad = logprob.grad.clone(), None
    per_token = sequence_token_ratio(logprob, old, mask) * advantage[:, None] * mask
    (per_token.sum(1) / mask.sum(1)).sum().backward()
    torch.testing.assert_close(logprob.grad, expected)
    # s·Â/|y| on every token
    by_hand = sequence_ratio(logprob, old, mask) * advantage / mask.sum(1)
    torch.testing.assert_close(expected, by_hand[:, None] * mask)


def test_the_ratio_of_a_response_at_every_token_has_its_value_and_gradient():
    mask = (torch.arange(5) < torch.tensor([5, 3, 1])[:, None]).float()
    old = -torch.rand(3, 5)
    logprob = (old + 0.3 * torch.randn(3, 5)).requires_grad_()
    ratio = log_ratio(logprob, old, mask).exp()
    ratio.sum().backward()
    expected, logprob.grad = logprob.grad.clone(), None
    per_token = response_token_ratio(logprob, old, mask)
    torch.testing.assert_close(per_token, ratio.detach()[:, None].expand(3, 5))
    ((per_token * mask).sum(1) / mask.sum(1)).sum().backward()
    torch.testing.assert_close(logprob.grad, expected)


def test_the_ratio_of_a_response_stays_finite():
    logprob, old, mask = torch.zeros(1, 4), torch.full((1, 4), -50.0), torch.ones(1, 4)
    assert response_token_ratio(logprob, old, mask).tolist() == [[pytest.approx(math.exp(80), rel=1e-5)] * 4]
    assert log_ratio(logprob, old, mask).item() == 200  # e^200 is beyond float32


def test_a_token_of_gspo_token_moves_nothing_but_itself():
    logprob = NEW[:1].clone().requires_grad_()
    sequence_token_ratio(logprob, OLD[:1], MASK[:1])[0, 0].backward()
    assert logprob.grad.tolist() == [[pytest.approx(4.0), 0.0]]


def test_importance_by_hand():
    ratio = torch.tensor([[1.0, 7.0, 0.5]], requires_grad=True)
    truncated, masked = truncated_importance(ratio, 2.0), masked_importance(ratio, 2.0)
    assert truncated.tolist() == [[1.0, 2.0, 0.5]]
    assert masked.tolist() == [[1.0, 0.0, 0.5]]
    assert not truncated.requires_grad
    assert not masked.requires_grad


@settings(deadline=None)
@given(st.floats(-50, 50, width=32), st.sampled_from([0.5, 1.0, 2.0, 8.0]))
def test_importance_is_positive_and_never_over_the_cap(log, cap):
    ratio = torch.tensor([[log]]).exp()
    assert 0 < truncated_importance(ratio, cap).item() <= cap
    assert 0 <= masked_importance(ratio, cap).item() <= cap


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.25, 2.0, -2.5),  # inside 1 + 0.28, though over 1 + 0.1
        (1.5, 2.0, -2.56),  # good and likelier already: held at 1.28
        (1.5, -2.0, 3.0),  # bad and likelier: not held
        (0.85, 2.0, -1.7),  # good and less likely: not held
        (0.85, -2.0, 1.8),  # bad and less likely already: held at 0.9
        (0.95, -2.0, 1.9),
    ],
)
def test_the_two_sides_clip_on_their_own(ratio, advantage, expected):
    loss = clipped_ratio(torch.tensor([[ratio]]), torch.tensor([[advantage]]), 0.1, 0.28)
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_the_penalty_of_a_response_is_that_of_its_tokens():
    spent = torch.tensor([[1.0, 2.0], [4.0, NAN], [NAN, NAN]])
    assert penalised(torch.tensor([10.0, 20.0, 30.0]), spent, MASK, 0.5).tolist() == [8.5, 18, 30]


def test_soft_overlong_by_hand():
    # Limit 20, buffer 8: nothing up to 12 tokens, then an eighth per token.
    lengths = torch.tensor([0.0, 11.0, 12.0, 13.0, 16.0, 20.0, 25.0])
    assert soft_overlong(lengths, 20, 8).tolist() == [0, 0, 0, -0.125, -0.5, -1, -1]
