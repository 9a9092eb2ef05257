"""The import hook of `conftest` is at work: a wrong shape is an error in tests, not a broadcast."""

import jaxtyping
import pytest
import torch

from cavesson.ops.advantages import gae
from cavesson.ops.kl import k1
from cavesson.ops.token_rewards import token_rewards


def test_tensors_that_would_broadcast_are_refused():
    with pytest.raises(jaxtyping.TypeCheckError):
        gae(torch.zeros(2, 3), torch.zeros(2, 1), torch.ones(2, 3), 1.0, 1.0)
    with pytest.raises(jaxtyping.TypeCheckError):
        token_rewards(torch.zeros(2, 1), torch.zeros(2, 3), torch.ones(2, 3), 0.1)


def test_integers_are_no_log_probabilities():
    with pytest.raises(jaxtyping.TypeCheckError):
        k1(torch.zeros(3, dtype=torch.int64), torch.zeros(3))
