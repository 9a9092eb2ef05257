"""The critic's value after a response is the value that one more token would have."""

import pytest
import torch
from models_helpers import batch, policy_of, scramble
from torch import Tensor

from cavesson.models.passes import Ways, use
from cavesson.models.policy import Policy, after_responses
from cavesson.models.settings import ValueSettings

PROMPTS, RESPONSES = [[20, 21, 22, 23], [30], [30]], [[60, 61, 62, 5], [70, 71], []]


def expected(policy: Policy) -> Tensor:
    """The values of one more token: each is computed from the state after the tokens before it."""
    longer = batch(PROMPTS, [[*response, 9] for response in RESPONSES])
    values = policy(longer).value
    return torch.stack([values[row, len(response)] for row, response in enumerate(RESPONSES)])


@pytest.mark.parametrize("way", ["padded", "packed", "shared prompts"])
@pytest.mark.parametrize("kind", ["trunk", "separate"])
def test_the_value_after_a_response_is_that_of_its_next_token(kind: str, way: str) -> None:
    policy = policy_of(value=ValueSettings(kind=kind))
    scramble(policy)
    if way == "packed":
        assert list(use(policy, Ways(packed=True, compile=None))) == []
    policy.shares_prompts = way == "shared prompts"
    after = policy.next_value(after_responses(batch(PROMPTS, RESPONSES)))
    assert len(set(after.tolist())) == 3
    torch.testing.assert_close(after, expected(policy), rtol=1e-4, atol=1e-5)
    wider = policy.next_value(after_responses(batch(PROMPTS, RESPONSES, extra=(2, 3), rubbish=7)))
    torch.testing.assert_close(wider, after, rtol=1e-4, atol=1e-5)
