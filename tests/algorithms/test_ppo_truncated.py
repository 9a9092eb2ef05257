"""PPO with `bootstrap_truncated`: the critic's value of what would follow stands for the score of a cut response."""

import pytest
import torch
from torch import Tensor

from cavesson.algorithms.ppo import PPO, PPORun
from cavesson.config import check
from cavesson.errors import UserError
from cavesson.processes import Processes
from cavesson.types import Batch


def credited(**more: Tensor) -> Batch:
    """Two responses of two tokens, of which the second is cut; β is ½ and the penalty 2 per token."""
    ones = torch.ones(2, 2)
    columns = {
        "learned": ones,
        "attended": ones,
        "value": torch.tensor([[1.0, 3.0], [1.0, 3.0]]),
        "kl_penalty": 2 * ones,
        "shaped_reward": torch.tensor([10.0, 10.0], dtype=torch.float64),
        "ended": torch.tensor([1.0, 0.0]),
        "next_value": torch.tensor([0.0, 8.0]),
        **more,
    }
    ppo = PPO(gamma=0.5, lam=1.0, whiten_advantages=False, bootstrap_truncated=True)
    return ppo.credit(Batch(columns), 0.5, Processes("cpu"))


def test_by_hand() -> None:
    found = credited()
    # Each token costs 1. The first response gets 10 at its end; the second gets γ·8 after its end instead.
    assert found["token_reward"].tolist() == [[-1.0, 9.0], [-1.0, -1.0]]
    assert found["return"].tolist() == [[-1 + 9 / 2, 9.0], [-1 + 3 / 2, -1 + 8 / 2]]
    assert found["shaped_reward"].tolist() == [10.0, 0.0]


def test_rewards_of_turns_before_the_cut_stay() -> None:
    turns = torch.tensor([[4.0, 0.0], [4.0, 0.0]], dtype=torch.float64)
    found = credited(turn_reward=turns)
    assert found["token_reward"].tolist() == [[3.0, 5.0], [3.0, -1.0]]
    assert found["shaped_reward"].tolist() == [10.0, 4.0]


def test_a_critic_that_repeats_itself_is_a_fixed_point() -> None:
    """Where responses are cut, a constant value stays a critic's target without a penalty: it does not add up."""
    values = torch.full((1, 3), 2.0)
    columns = {
        "learned": torch.ones(1, 3), "value": values, "kl_penalty": torch.zeros(1, 3),
        "shaped_reward": torch.tensor([7.0]), "ended": torch.zeros(1), "next_value": torch.tensor([2.0]),
    }  # fmt: skip
    found = PPO(bootstrap_truncated=True).credit(Batch(columns), 0.1, Processes("cpu"))
    torch.testing.assert_close(found["return"], values)


def test_a_penalty_for_a_missing_end_would_have_no_effect() -> None:
    changes = {"ppo": {"bootstrap_truncated": True}, "shaping": {"missing_eos_penalty": 1.0}}
    with pytest.raises(UserError, match=r"missing_eos_penalty has no effect with ppo\.bootstrap_truncated") as caught:
        check(PPORun, {"run": "runs/x", **changes}, "the test")
    assert "\n" not in str(caught.value).strip()
