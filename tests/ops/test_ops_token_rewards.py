import torch

from cavesson.ops.token_rewards import token_rewards


def test_by_hand():
    kl = torch.tensor([[1.0, 2.0, -3.0], [0.5, 4.0, 9.0], [7.0, 7.0, 7.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    rewards = token_rewards(torch.tensor([10.0, 20.0, 30.0]), kl, mask, 0.5)
    # −½·KL everywhere, the score on the last token, nothing at all in the empty row.
    assert rewards.tolist() == [[-0.5, -1.0, 11.5], [19.75, 0.0, 0.0], [0.0, 0.0, 0.0]]


def test_without_a_coefficient_only_the_score_remains():
    rewards = token_rewards(torch.tensor([3.0]), torch.full((1, 3), 5.0), torch.tensor([[1.0, 1.0, 0.0]]), 0.0)
    assert rewards.tolist() == [[0.0, 3.0, 0.0]]


def test_padding_may_hold_anything():
    kl = torch.tensor([[1.0, float("nan"), float("inf")]])
    rewards = token_rewards(torch.tensor([2.0]), kl, torch.tensor([[1.0, 0.0, 0.0]]), 1.0)
    assert rewards.tolist() == [[1.0, 0.0, 0.0]]
