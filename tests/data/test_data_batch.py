import pytest
import torch
from batch_helpers import split

from cavesson.types import Batch, Rollouts


def batch() -> Batch:
    """Three rows with prompts of 1, 3 and 2 tokens and responses of 2, 0 and 1."""
    return Batch(
        {
            "prompt_ids": torch.tensor([[1, 1, 5], [6, 7, 8], [1, 9, 10]]),
            "prompt_mask": torch.tensor([[0, 0, 1], [1, 1, 1], [0, 1, 1]]),
            "response_ids": torch.tensor([[11, 12], [1, 1], [13, 1]]),
            "attended": torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]),
            "learned": torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]),
            "reward": torch.tensor([0.5, 1.5, 2.5]),
        }
    )


def test_taking_rows_cuts_padding_that_none_of_them_needs():
    taken = batch().take(torch.tensor([2, 0]))
    assert taken["prompt_ids"].tolist() == [[9, 10], [1, 5]]
    assert taken["prompt_mask"].tolist() == [[1, 1], [0, 1]]
    assert taken["response_ids"].tolist() == [[13, 1], [11, 12]]
    assert taken["reward"].tolist() == [2.5, 0.5]


def test_a_batch_of_empty_responses_keeps_two_columns():
    taken = batch().take(torch.tensor([1]))
    assert taken["response_ids"].shape == taken["learned"].shape == (1, 2)
    assert taken["prompt_ids"].tolist() == [[6, 7, 8]]


def test_prompts_alone_are_not_cut():
    prompts = Batch({"prompt_ids": torch.tensor([[1, 5], [6, 7]]), "prompt_mask": torch.tensor([[0, 1], [1, 1]])})
    assert prompts.take(torch.tensor([0]))["prompt_ids"].tolist() == [[1, 5]]


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_splitting_loses_no_row(size):
    parts = list(split(batch(), size))
    assert [len(part) for part in parts] == [min(size, 3 - start) for start in range(0, 3, size)]
    assert torch.cat([part["reward"] for part in parts]).tolist() == [0.5, 1.5, 2.5]


def test_a_part_without_rows_is_the_first_row():
    assert batch().part([])["reward"].tolist() == [0.5]
    assert batch().part([2, 0])["reward"].tolist() == [2.5, 0.5]


def test_new_columns_leave_the_batch_as_it_was():
    old = batch()
    new = old.with_columns(reward=torch.zeros(3), value=torch.ones(3))
    assert old["reward"].tolist() == [0.5, 1.5, 2.5]
    assert "value" not in old
    assert (new["reward"].tolist(), new["value"].tolist()) == ([0.0] * 3, [1.0] * 3)


def test_a_missing_column_is_named_with_those_there_are():
    with pytest.raises(KeyError, match=r"no column 'valeu'; there are \['attended'"):
        batch()["valeu"]


def test_joined_rollouts_keep_their_order_and_pad_prompts_on_the_left_and_responses_on_the_right():
    def part(first, prompts, responses):
        count = len(prompts)
        batch = Batch({"prompt_ids": torch.tensor(prompts), "response_ids": torch.tensor(responses)})
        numbers = list(range(first, first + count))
        return Rollouts(
            [f"p{n}" for n in numbers], numbers, numbers, [f"r{n}" for n in numbers], ["eos"] * count, batch
        )

    both = Rollouts.joined([part(0, [[1, 2], [3, 4]], [[5, 6, 7], [8, 9, 1]]), part(2, [[1, 2, 3]], [[4]])])
    assert both["prompt_ids"].tolist() == [[0, 1, 2], [0, 3, 4], [1, 2, 3]]
    assert both["response_ids"].tolist() == [[5, 6, 7], [8, 9, 1], [4, 0, 0]]
    assert (both.prompt, both.response, both.sample) == (["p0", "p1", "p2"], ["r0", "r1", "r2"], [0, 1, 2])
