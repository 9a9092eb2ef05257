"""What a turn has read is not read again in the next one, and every turn is what it is if all is read again."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_helpers import PROMPTS, absolute_policy, sharp_policy, tokens
from transformers import PreTrainedTokenizerBase

from cavesson.data.prompts import padded_prompts
from cavesson.errors import UserError
from cavesson.models.parts import trunk
from cavesson.models.policy import Policy
from cavesson.models.tiny import tiny_tokenizer
from cavesson.rollout.engines import memory_check as room
from cavesson.rollout.engines.decoder import Decoder, new_cache
from cavesson.rollout.engines.kept import read_row
from cavesson.rollout.engines.memory_check import cache_bytes, check_room
from cavesson.rollout.engines.responses import Turns
from cavesson.rollout.engines.sampler import Sampler
from cavesson.rollout.engines.settings import SamplingSettings
from cavesson.rollout.episodes import Episode, Played, play

MANY_EOS = tuple(range(60, 100))
PLAIN = {"max_new_tokens": 8, "eos_token_ids": (257,)}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer()


class Partner:
    """Answers the first turns of an episode with a few tokens each, those of the slow rows late."""

    def __init__(self, rounds: int = 3, slow: Sequence[int] = ()) -> None:
        self.rounds, self.slow, self.workers = rounds, slow, ThreadPoolExecutor(8)
        self.turns: dict[int, int] = {}

    def room(self, episode: Episode) -> int:
        return 30 - len(episode.ids)

    def answer(self, episode: Episode) -> "Future[bool]":
        return self.workers.submit(self._answer, episode)

    def _answer(self, episode: Episode) -> bool:
        if episode.row in self.slow:
            time.sleep(1.2)
        turn = self.turns[episode.row] = self.turns.get(episode.row, 0) + 1
        if turn == self.rounds + episode.row % 2 or len(episode.ids) > 24:
            return False
        said = [40 + episode.row, *range(50, 51 + (episode.row + turn) % 3)]
        episode.append(said, [1] * len(said))
        return True


def played(
    sampler: Sampler, tokenizer: PreTrainedTokenizerBase, partner: Partner, texts: Sequence[str] = PROMPTS
) -> tuple[list[Episode], Played]:
    ids = tokenizer(list(texts))["input_ids"]
    sampler.prepare(len(ids), max(map(len, ids)) + 30)
    episodes = [Episode(row, row, ids[row], "") for row in range(len(ids))]
    return episodes, play(sampler, episodes, 2, conversation=partner)


@contextmanager
def passes(policy: Policy) -> Iterator[list[tuple[int, int]]]:
    """Note the shape of each pass that reads more than a token."""
    found: list[tuple[int, int]] = []

    def note(_module: object, _inputs: object, given: dict[str, torch.Tensor]) -> None:
        if given["input_ids"].shape[1] > 1:
            found.append(tuple(given["input_ids"].shape))

    with trunk(policy.model).register_forward_pre_hook(note, with_kwargs=True):
        yield found


def assert_alike(seen: tuple[list[Episode], Played], expected: tuple[list[Episode], Played]) -> None:
    assert [one.ids for one in seen[0]] == [one.ids for one in expected[0]]
    assert [one.reason for one in seen[0]] == [one.reason for one in expected[0]]
    torch.testing.assert_close(seen[1].sampler_logprob, expected[1].sampler_logprob, atol=1e-4, rtol=0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", [sharp_policy, absolute_policy])
@pytest.mark.parametrize(
    "chosen",
    [
        PLAIN,
        {"random_length": (1, 9)},
        {"max_new_tokens": 9, "eos_token_ids": MANY_EOS},
        {"max_new_tokens": 9, "stop": ("a", "e"), "temperature": 2.0},
        {"max_new_tokens": 9, "temperature": 0, "min_new_tokens": 2, "eos_token_ids": (257,)},
        {"max_new_tokens": 9, "batch_size": 2},
        {"max_new_tokens": 9, "batch_size": 8},
    ],
    ids=str,
)
def test_turns_are_the_same_whether_all_is_read_again_or_not(make, chosen, tokenizer):
    again, kept = (Sampler(make(), tokenizer, SamplingSettings(**chosen), 3, has_turns=turns) for turns in (0, 1))
    texts = [*PROMPTS, "A", "The old bridge"]  # two that occur twice
    expected = played(again, tokenizer, Partner(), texts)
    assert sum(len(one.ids) for one in expected[0]) > 20
    assert_alike(played(kept, tokenizer, Partner(), texts), expected)
    assert not kept._kept


def test_a_row_whose_answer_is_slow_goes_on_with_what_it_has_read(tokenizer):
    settings = SamplingSettings(max_new_tokens=5)
    expected = played(Sampler(sharp_policy(), tokenizer, settings, 3), tokenizer, Partner())
    sampler = Sampler(sharp_policy(), tokenizer, settings, 3, has_turns=True)
    assert_alike(played(sampler, tokenizer, Partner(slow=[1, 2])), expected)


def test_later_turns_read_what_came_in_between_only(tokenizer):
    """The last token of a turn is not read before the next one; of an answer, the longest one has four tokens."""
    sampler = Sampler(sharp_policy(), tokenizer, SamplingSettings(**PLAIN), 3, has_turns=True)
    with passes(sampler.policy) as found:
        played(sampler, tokenizer, Partner(rounds=2))
        found.clear()  # the probes that precede the first turn
        played(sampler, tokenizer, Partner(rounds=2))
    prompt = max(map(len, tokenizer(list(PROMPTS))["input_ids"]))
    assert found[0] == (5, prompt)
    assert [rows for rows, _ in found] == [5, 5, 2]
    assert all(width <= 1 + 4 for _, width in found[1:])


def test_what_was_read_with_other_weights_is_read_again(tokenizer):
    """Weights change between the blocks only."""
    sampler = Sampler(sharp_policy(), tokenizer, SamplingSettings(**PLAIN), 3, has_turns=True)
    batch, turns = padded_prompts([[5, 6, 7, 8], [9, 10]]), Turns([0, 0], [4, 4])
    sampler.prepare(2, 20)
    with sampler.sampling():
        first = tokens(sampler.sample(batch, 0, range(2), turns=turns))
        assert {row: len(one.ids) for row, one in sampler._kept.items()} == {0: 7, 1: 5}
    assert not sampler._kept
    longer = padded_prompts([[5, 6, 7, 8, *first[0]], [9, 10, *first[1]]])
    with passes(sampler.policy) as found, sampler.sampling():
        sampler.sample(longer, 0, range(2), turns=Turns([4, 4], [4, 4]))
    assert found == [(2, 8)]


def test_a_prompt_that_does_not_continue_what_was_read_is_read_whole(tokenizer):
    sampler = Sampler(sharp_policy(), tokenizer, SamplingSettings(**PLAIN), 3, has_turns=True)
    other = padded_prompts([[5, 6, 9, 9, 9, 9, 9, 9, 9, 9], [11]])
    expected = sampler.sample(other, 0, range(2))
    with sampler.sampling():
        sampler.sample(padded_prompts([[5, 6, 7, 8], [9, 10]]), 0, range(2))
        seen = sampler.sample(other, 0, range(2))
    assert torch.equal(seen.response_ids, expected.response_ids)
    assert torch.equal(seen.sampler_logprob, expected.sampler_logprob)


@pytest.mark.parametrize(("batch_size", "most"), [(2, 2), (5, 5), (0, 5)])
def test_no_more_is_kept_than_is_sampled_at_once(tokenizer, batch_size, most):
    settings = SamplingSettings(**PLAIN, batch_size=batch_size)
    sampler = Sampler(sharp_policy(), tokenizer, settings, 3, has_turns=True)
    sampler.prepare(5, 60)
    with sampler.sampling():
        for rows in ([0, 1, 2, 3, 4], [0, 1], [2], [3, 4], [1], [0, 2]):
            sampler.sample(padded_prompts([[7 + row, 8] for row in rows]), 0, rows)
            assert len(sampler._kept) <= most
        assert sampler._kept


def test_room_for_what_is_kept_is_counted(monkeypatch):
    model = sharp_policy().model
    caches = 2 * cache_bytes(model, 16, 79)
    needed = 16 * 70 * room.BYTES_PER_TOKEN + caches
    monkeypatch.setattr(room, "free_memory", lambda device: needed - 1)
    check_room(model, 16, 16, 9, 70)
    with pytest.raises(UserError, match="sampling 16 responses"):
        check_room(model, 16, 16, 9, 70, has_turns=True)
    monkeypatch.setattr(room, "free_memory", lambda device: needed)
    check_room(model, 16, 16, 9, 70, has_turns=True)


@settings(deadline=None)
@given(
    st.sampled_from([sharp_policy, absolute_policy]),
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), min_size=1, max_size=5),
)
@torch.no_grad()
def test_logits_are_those_of_each_row_alone(make: Any, lengths: list[tuple[int, int]]) -> None:
    """Whatever part of each row is known, down to nothing."""
    model, numbers = make().model, torch.Generator().manual_seed(len(lengths))
    rows = [torch.randint(3, 250, (known + more,), generator=numbers).tolist() for known, more in lengths]
    known = []
    for row, (count, _) in zip(rows, lengths, strict=True):
        cache = new_cache(model, "static", 9)
        if count:
            Decoder(model, torch.tensor([row[:count]]), torch.ones(1, count, dtype=torch.long), cache).read()
        known.append(read_row(cache, 0, 0, row[:count]) if count else None)
    batch = padded_prompts(rows)
    decoder = Decoder(model, batch["prompt_ids"], batch["prompt_mask"], new_cache(model, "static", 14), read_rows=known)
    seen = torch.stack([decoder.read(), decoder.append(torch.full((len(rows),), 9))], dim=1)
    for row, logits in zip(rows, seen, strict=True):
        alone = model(input_ids=torch.tensor([[*row, 9]]), use_cache=False).logits[0, -2:]
        torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)
