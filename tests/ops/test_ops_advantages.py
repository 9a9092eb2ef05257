import pytest
import torch
from torch import Tensor

from cavesson.ops.advantages import gae

LENGTHS = (5, 3, 1, 0)


def rollouts() -> tuple[Tensor, Tensor, Tensor]:
    """Four rows of up to five tokens: full, partly padded, one token, empty."""
    mask = (torch.arange(5) < torch.tensor(LENGTHS)[:, None]).float()
    return torch.randn(4, 5) * mask, torch.randn(4, 5) * mask, mask


def slow_gae(
    rewards: list[float], values: list[float], gamma: float, lam: float, next_value: float = 0.0
) -> list[float]:
    """Σ_l (γλ)^l · δ_{t+l}, written out (arXiv:1506.02438, eq. 16)."""
    values = [*values, next_value]
    length = len(rewards)
    deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(length)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, length)) for t in range(length)]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_equals_the_double_loop(gamma, lam):
    rewards, values, mask = rollouts()
    advantage = gae(rewards, values, mask, gamma, lam)
    for row, length in enumerate(LENGTHS):
        expected = slow_gae(rewards[row, :length].tolist(), values[row, :length].tolist(), gamma, lam)
        assert advantage[row, :length].tolist() == pytest.approx(expected, abs=1e-5)
        assert advantage[row, length:].tolist() == [0.0] * (5 - length)


@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_the_value_after_a_cut_equals_that_of_the_double_loop(lam):
    rewards, values, mask = rollouts()
    after = torch.tensor([3.0, 0.0, -2.0, 5.0])  # the second row has ended, the last one has no token
    advantage = gae(rewards, values, mask, 0.9, lam, after)
    for row, length in enumerate(LENGTHS):
        expected = slow_gae(rewards[row, :length].tolist(), values[row, :length].tolist(), 0.9, lam, after[row].item())
        assert advantage[row].tolist() == pytest.approx([*expected, *[0.0] * (5 - length)], abs=1e-5)


@pytest.mark.parametrize("cut", [1, 3])
def test_a_response_cut_before_a_token_whose_advantage_is_0_has_the_advantages_of_the_whole(cut):
    """If a critic predicts the rest exactly, nothing is lost by cutting it off."""
    rewards, values, mask = torch.randn(2, 5), torch.randn(2, 5), torch.ones(2, 5)
    for t in reversed(range(cut, 5)):
        values[:, t] = rewards[:, t] + 0.9 * (values[:, t + 1] if t < 4 else 0.0)
    whole = gae(rewards, values, mask, 0.9, 0.95)
    part = gae(rewards[:, :cut], values[:, :cut], mask[:, :cut], 0.9, 0.95, values[:, cut])
    torch.testing.assert_close(part, whole[:, :cut])


def test_by_hand():
    # δ_1 = 1 − 3 = −2, δ_0 = 2 + ½·3 − 1 = 2.5, and Â_0 = δ_0 + ½·½·δ_1.
    advantage = gae(torch.tensor([[2.0, 1.0]]), torch.tensor([[1.0, 3.0]]), torch.ones(1, 2), 0.5, 0.5)
    assert advantage.tolist() == [[2.0, -2.0]]


def test_undiscounted_advantage_plus_value_is_the_monte_carlo_return():
    rewards, values, mask = rollouts()
    returns = gae(rewards, values, mask, 1.0, 1.0) + values
    rest = rewards.flip(1).cumsum(1).flip(1)  # the sum of what is still to come
    torch.testing.assert_close(returns * mask, rest * mask, atol=1e-5, rtol=0)


def test_lambda_zero_is_the_td_error():
    rewards, values, mask = rollouts()
    following = torch.cat([values[:, 1:], torch.zeros(4, 1)], dim=1)
    torch.testing.assert_close(gae(rewards, values, mask, 0.9, 0.0), (rewards + 0.9 * following - values) * mask)


@pytest.mark.parametrize("rubbish", [1e6, float("inf"), float("nan")])
def test_padding_changes_nothing_whatever_it_holds(rubbish):
    rewards, values, mask = rollouts()
    expected = gae(rewards, values, mask, 0.9, 0.95)
    padded = [torch.where(mask > 0, x, rubbish) for x in (rewards, values)]
    assert torch.equal(gae(*padded, mask, 0.9, 0.95), expected)
    wider = [torch.nn.functional.pad(x, (0, 3)) for x in (rewards, values, mask)]
    assert torch.equal(gae(*wider, 0.9, 0.95)[:, :5], expected)


def test_arguments_are_not_written():
    arguments = rollouts()
    copies = [x.clone() for x in arguments]
    gae(*arguments, 0.9, 0.95)
    assert all(torch.equal(x, copy) for x, copy in zip(arguments, copies, strict=True))
