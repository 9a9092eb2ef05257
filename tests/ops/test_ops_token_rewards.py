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


def test_rewards_of_turns_keep_their_places_and_the_last_token_gets_the_rest() -> None:
    mask = torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0]])
    turns = torch.tensor([[0.5, 0.0, 0.0, -1.0, 0.0]], dtype=torch.float64)
    kl = torch.tensor([[1.0, 9.0, 2.0, 3.0, 9.0]])
    rewards = token_rewards(torch.tensor([2.0], dtype=torch.float64), kl, mask, 0.1, turns)
    # 2 is 0.5 − 1 and a rest of 2.5, and the penalties are 0.1, 0.2 and 0.3.
    torch.testing.assert_close(rewards, torch.tensor([[0.4, 0.0, -0.2, 1.2, 0.0]]))
