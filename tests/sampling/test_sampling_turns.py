"""The turns of an episode draw what one long response would draw, whatever is sampled beside them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling_helpers import PROMPTS, prompts, sharp_policy
from transformers import PreTrainedTokenizerBase

from cavesson.data.prompts import padded_prompts
from cavesson.models.tiny import tiny_tokenizer
from cavesson.randomness import token_uniforms
from cavesson.rollout.engines.responses import Responses, Turns
from cavesson.rollout.engines.sampler import Sampler
from cavesson.rollout.engines.settings import SamplingSettings

LENGTH = 12


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def sampler(tokenizer: PreTrainedTokenizerBase) -> Sampler:
    return Sampler(sharp_policy(), tokenizer, SamplingSettings(max_new_tokens=LENGTH), seed=3)


@pytest.fixture(scope="module")
def whole(sampler: Sampler, tokenizer: PreTrainedTokenizerBase) -> Responses:
    found = sampler.sample(prompts(tokenizer), 4, range(5))
    assert found.mask.sum(1).tolist().count(LENGTH) >= 3  # long enough to be split
    return found


def tokens(responses: Responses) -> list[list[int]]:
    lengths = responses.mask.sum(1).long().tolist()
    return [ids[:length] for ids, length in zip(responses.response_ids.tolist(), lengths, strict=True)]


@given(
    places=st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, LENGTH - 1)), min_size=1, max_size=4, unique_by=lambda x: x[0]
    )
)
def test_a_response_in_two_turns_is_the_response_in_one(
    sampler: Sampler, tokenizer: PreTrainedTokenizerBase, whole: Responses, places: list[tuple[int, int]]
) -> None:
    """Each row stops after its own number of tokens and goes on as a second turn, in another order and company."""
    expected = tokens(whole)
    places = [(row, min(at, max(1, len(expected[row]) - 1))) for row, at in places if len(expected[row]) > 1]
    if not places:
        return
    ids = tokenizer(list(PROMPTS))["input_ids"]
    first = sampler.sample(
        padded_prompts([ids[row] for row, _ in places]),
        4,
        [row for row, _ in places],
        turns=Turns([0] * len(places), [at for _, at in places]),
    )
    assert tokens(first) == [expected[row][:at] for row, at in places]
    second = sampler.sample(
        padded_prompts([ids[row] + expected[row][:at] for row, at in places]),
        4,
        [row for row, _ in places],
        turns=Turns([at for _, at in places], [LENGTH - at for _, at in places]),
    )
    assert tokens(second) == [expected[row][at:] for row, at in places]
    for place, (row, at) in enumerate(places):
        rest = len(expected[row]) - at
        torch.testing.assert_close(
            second.sampler_logprob[place, :rest], whole.sampler_logprob[row, at : at + rest], atol=1e-4, rtol=0
        )
        assert second.finish_reasons[place] == whole.finish_reasons[row]


def test_without_turns_these_are_the_first_ones(sampler: Sampler, tokenizer: PreTrainedTokenizerBase) -> None:
    batch = prompts(tokenizer)
    plain = sampler.sample(batch, 1, range(5))
    first = sampler.sample(batch, 1, range(5), turns=Turns([0] * 5, [100] * 5))
    assert torch.equal(plain.response_ids, first.response_ids)
    assert torch.equal(plain.sampler_logprob, first.sampler_logprob)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), min_size=1, max_size=5), st.integers(1, 9))
def test_the_numbers_of_a_later_turn_are_those_of_its_positions(rows: list[tuple[int, int]], length: int) -> None:
    found = token_uniforms(7, 2, [row for row, _ in rows], length, [start for _, start in rows])
    for numbers, (row, start) in zip(found, rows, strict=True):
        assert numbers.tolist() == token_uniforms(7, 2, [row], start + length)[0, start:].tolist()
