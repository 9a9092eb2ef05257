import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cavesson.ops.groups import centred, group_means, group_stds, leave_one_out, varied

# Two prompts, five responses: (1, 2, 6) with mean 3, and (4, 4).
REWARDS, GROUP = torch.tensor([1.0, 4.0, 2.0, 6.0, 4.0]), torch.tensor([7, 2, 7, 7, 2])

rows = st.lists(st.tuples(st.integers(-100, 100), st.integers(-2, 2)), min_size=1, max_size=12)


def tensors(pairs: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards in eighths, and the groups of the responses."""
    return torch.tensor([r / 8 for r, _ in pairs], dtype=torch.float64), torch.tensor([g for _, g in pairs])


def others(pairs: list[tuple[int, int]], i: int) -> list[float]:
    return [r / 8 for j, (r, g) in enumerate(pairs) if g == pairs[i][1] and j != i]


def test_five_responses_by_hand():
    assert group_means(REWARDS, GROUP).tolist() == [3, 4, 3, 3, 4]
    assert centred(REWARDS, GROUP).tolist() == [-2, 0, -1, 3, 0]
    # 1 − (2 + 6)/2, 2 − (1 + 6)/2, 6 − (1 + 2)/2
    assert leave_one_out(REWARDS, GROUP).tolist() == [-3, 0, -1.5, 4.5, 0]
    spread = math.sqrt((2**2 + 1**2 + 3**2) / 2)
    assert group_stds(REWARDS, GROUP).tolist() == pytest.approx([spread, 0, spread, spread, 0])
    assert varied(REWARDS, GROUP).tolist() == [True, False, True, True, False]


@settings(deadline=None)
@given(rows)
def test_as_a_loop_over_responses_says(pairs):
    rewards, group = tensors(pairs)
    for i, (reward, _) in enumerate(pairs):
        mine, rest = reward / 8, others(pairs, i)
        assert group_means(rewards, group)[i].item() == pytest.approx(statistics.fmean([mine, *rest]), abs=1e-9)
        baseline = statistics.fmean(rest) if rest else mine
        assert leave_one_out(rewards, group)[i].item() == pytest.approx(mine - baseline, abs=1e-9)
        spread = statistics.stdev([mine, *rest]) if rest else 0.0
        assert group_stds(rewards, group)[i].item() == pytest.approx(spread, abs=1e-6)
        assert varied(rewards, group)[i].item() == (len({mine, *rest}) > 1)


@settings(deadline=None)
@given(rows)
def test_leave_one_out_is_g_over_g_minus_one_times_centred(pairs):
    rewards, group = tensors(pairs)
    size = torch.tensor([len(others(pairs, i)) + 1 for i in range(len(pairs))])
    several = size > 1
    factor = size[several] / (size[several] - 1)
    torch.testing.assert_close(leave_one_out(rewards, group)[several], factor * centred(rewards, group)[several])


@settings(deadline=None)
@given(rows, st.randoms())
def test_the_order_of_the_rows_only_orders_the_result(pairs, random):
    order = list(range(len(pairs)))
    random.shuffle(order)
    rewards, group = tensors(pairs)
    for function in (centred, leave_one_out, group_stds):
        torch.testing.assert_close(function(rewards[order], group[order]), function(rewards, group)[order])


@pytest.mark.parametrize("reward", [0.1, -1 / 3, 1e6 + 0.3, 0.0])
@pytest.mark.parametrize("size", [1, 3, 7, 16])
def test_equal_rewards_leave_exactly_nothing(reward, size):
    # In float32 the plain mean of seven times 0.1 is not 0.1, and ten millionths over a tiny spread are an advantage.
    rewards, group = torch.full((size,), reward), torch.full((size,), 3)
    for function in (centred, leave_one_out, group_stds):
        assert function(rewards, group).tolist() == [0.0] * size
    assert not varied(rewards, group).any()


def test_arguments_stay_as_they_are():
    rewards, group = REWARDS.clone(), GROUP.clone()
    for function in (group_means, centred, leave_one_out, group_stds, varied):
        function(rewards, group)
    assert torch.equal(rewards, REWARDS)
    assert torch.equal(group, GROUP)
