"""Masks of the loss that are wrong, in what the hooks of OpenRLHF and verl record, and who sampled the tokens."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.rules import RULES
from cavesson.importers.sampled import was_sampled
from cavesson.integrations import openrlhf, verl
from cavesson.integrations.drawn import Drawn
from cavesson.record import Recorder
from cavesson.record import open as open_run

PROMPT, CALL, RESULT, ANSWER = [1, 2], [3, 4, 5, 9], [6, 7, 8], [3, 5, 9]
"""Ids of an episode; 9 ends a turn."""
RIGHT = [1] * 4 + [0] * 3 + [1] * 3
ALL, ONLY_LAST = [1] * 10, [0] * 7 + [1] * 3
SAMPLER = [-0.5, -1.0, -3.0, -0.25, 0.0, 0.0, 0.0, -2.0, 0.0, -0.5]
"""One token of the answer was certain; engines return 0 for the result."""
POLICY = [-0.5, -1.0, -3.0, -0.25, -0.1, -7.0, -3.0, -2.0, 0.0, -0.5]
PART = [1] * 5 + [0] * 2 + [1] * 3
MASKS = [
    (RIGHT, set()),
    (ALL, {"inserted-tokens-learned"}),
    (ONLY_LAST, {"sampled-tokens-masked"}),
    (PART, {"inserted-tokens-learned"}),
    ([1] * 3 + [0] * 4 + [1] * 3, {"sampled-tokens-masked"}),
]


def test_a_certain_end_token_beside_a_result_was_sampled() -> None:
    sampler, policy = np.array(SAMPLER), np.array(POLICY)
    sampler[3], policy[3] = 0.0, -1e-4
    assert was_sampled(np.array(RIGHT, bool), sampler, policy).tolist() == [bool(one) for one in RIGHT]
    found = was_sampled(np.array(ALL, bool), sampler, policy)  # of a mask that learns the result, too
    assert found[3] and not found[4:7].any()


class Letters:
    eos_token_id = 9

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(96 + int(i)) for i in ids if i)


def experience(mask: list[int], size: int = 8) -> SimpleNamespace:
    """As OpenRLHF's: what belongs to a token is at the place before it; log-probabilities of actions are masked."""

    def actions(values: list[float]) -> torch.Tensor:
        return torch.tensor([[0.0] * (len(PROMPT) - 1) + values] * size)

    chosen = actions([float(value) for value in mask])
    return SimpleNamespace(
        sequences=torch.tensor([PROMPT + CALL + RESULT + ANSWER] * size),
        attention_mask=torch.ones(size, 12),
        action_mask=chosen,
        action_log_probs=actions(POLICY) * chosen,
        rollout_log_probs=actions(SAMPLER),
        prompts=["ab"] * size,
        labels=["x"] * size,
        rewards=torch.arange(size).double(),
        truncated=torch.zeros(size, dtype=torch.bool),
        info={},
    )


def batch(mask: list[int], size: int = 8) -> SimpleNamespace:
    chosen = torch.tensor([mask] * size)
    tensors = {
        "prompts": torch.tensor([PROMPT] * size),
        "responses": torch.tensor([CALL + RESULT + ANSWER] * size),
        "attention_mask": torch.ones(size, 12),
        "response_mask": chosen,
        "old_log_probs": torch.tensor([POLICY] * size),
        "rollout_log_probs": torch.tensor([SAMPLER] * size),
        "token_level_scores": torch.zeros(size, 10),
    }
    return SimpleNamespace(batch=tensors, non_tensor_batch={})


def with_openrlhf(folder: Any, mask: list[int]) -> None:
    for step in range(3):
        openrlhf.record(folder, step, [experience(mask)], Letters()).flush()
    openrlhf._RECORDERS.pop(folder).close()


def with_verl(folder: Any, mask: list[int]) -> None:
    with Recorder(folder) as recorder:
        for step in range(3):
            recorder.rollouts(step, *verl.rollouts_of(batch(mask), Letters()))


@pytest.mark.parametrize("record", [with_openrlhf, with_verl])
@pytest.mark.parametrize(("mask", "rules"), MASKS)
def test_a_wrong_mask_is_found(record: Callable[..., None], mask: list[int], rules: set[str], tmp_path: Any) -> None:
    record(tmp_path / "run", mask)
    run = open_run(tmp_path / "run")
    tokens = run.tokens(0, 0)
    assert tokens["token_id"].to_pylist() == CALL + RESULT + ANSWER
    assert tokens["learned"].to_pylist() == [bool(value) for value in mask]
    if record is with_openrlhf and mask == PART:
        rules = set()  # the policy finds the learned token probable, and of the others, OpenRLHF has no probabilities
    else:
        assert tokens["source"].to_pylist() == ["sampled" if value else None for value in RIGHT]
    found = {one.rule.name for one in diagnose(RunData(run), RULES).findings}
    assert found & {"inserted-tokens-learned", "sampled-tokens-masked"} == rules


def test_the_end_token_is_recorded(tmp_path):
    with_openrlhf(tmp_path / "run", RIGHT)
    assert open_run(tmp_path / "run").info["eos_token_ids"] == [9]


def test_without_log_probabilities_the_mask_says_what_was_sampled():
    learned = np.array([True, False, True])
    for sampler in (None, np.zeros(3), np.full(3, np.nan)):
        np.testing.assert_array_equal(was_sampled(learned, sampler, None), learned)


def test_a_policy_that_is_certain_of_its_tokens_has_sampled_them():
    """With top_p, say, most log-probabilities of the sampler are 0; those of the policy are not far from it."""
    sampler, policy = np.array([0.0, -0.5, 0.0, 0.0]), np.array([-0.3, -0.5, -2.0, np.nan])
    assert was_sampled(np.ones(4, bool), sampler, policy).all()


TURN = st.lists(st.integers(0, 2), max_size=4)


@given(st.lists(st.tuples(st.integers(0, 1), st.lists(st.tuples(TURN, TURN), min_size=1, max_size=4)), max_size=6))
def test_turns_are_found_again_in_the_responses_that_are_made_of_them(episodes):
    """With three tokens, many episodes begin alike; an engine returns each turn's ids for all tokens before it."""
    drawn, made = Drawn(), []
    for start, turns in episodes:
        whole, sampled = [start], list[bool]()
        for own, between in turns:
            drawn.add(whole, [*own, 3])  # an end token
            whole = [*whole, *own, 3, *between, 4]  # and a header
            sampled += [True] * (len(own) + 1) + [False] * (len(between) + 1)
        made.append((start, whole[1:], sampled))
    for start, ids, sampled in made:
        assert drawn.sampled([start], ids).tolist() == sampled
    assert drawn.sampled([7], [1, 2]) is None


def test_a_turn_that_was_cut_is_sampled_and_one_that_was_changed_is_not_known():
    drawn = Drawn()
    drawn.add([1], [2, 3, 4])
    assert drawn.sampled([1], [2, 3]).tolist() == [True, True]
    assert drawn.sampled([1], [2, 5, 4]) is None
    assert drawn.sampled([1], []).tolist() == []
