"""Rows that have ended give their places to waiting prompts; every response is what it is without any other."""

import sys
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sampling_helpers import PROMPTS, absolute_policy, prompts, sampled, sharp_policy, tokens
from torch.nn.functional import pad
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

sys.path.append(str(Path(__file__).parents[1] / "models"))
from small_models import small_model

from cavesson.data.prompts import padded_prompts
from cavesson.errors import UserError
from cavesson.models.load import prepare
from cavesson.models.parts import trunk
from cavesson.models.policy import Policy
from cavesson.rollout.engines import memory_check as room
from cavesson.rollout.engines.decoder import Decoder, new_cache
from cavesson.rollout.engines.decoding import choose_decoding, full_passes
from cavesson.rollout.engines.memory_check import cache_bytes, check_room, replaced_together, spare_columns
from cavesson.rollout.engines.responses import Responses
from cavesson.rollout.engines.sampler import Sampler
from cavesson.rollout.engines.settings import SamplingSettings

TEXTS = PROMPTS * 8
MANY_EOS = tuple(range(60, 100))


def passes_of(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], **chosen: object
) -> tuple[list[int], list[int], Responses]:
    """Return the prompts of each reading pass, the rows of each decoding step, and the responses."""
    read: list[int] = []
    decoded: list[int] = []

    def note(_module: object, _inputs: object, shapes: dict[str, torch.Tensor]) -> None:
        whole = shapes["input_ids"].shape == shapes["attention_mask"].shape
        (read if whole else decoded).append(len(shapes["input_ids"]))

    sampler, batch = Sampler(policy, tokenizer, SamplingSettings(**chosen), seed=0), prompts(tokenizer, texts)
    sampler.prepare(*batch["prompt_ids"].shape)
    assert sampler.decoding.replaces
    with trunk(policy.model).register_forward_pre_hook(note, with_kwargs=True):
        responses = sampler.sample(batch, 0, range(len(texts)))
    return read, decoded, responses


def assert_equal(seen: Responses, expected: Responses) -> None:
    assert tokens(seen) == tokens(expected)
    assert seen.finish_reasons == expected.finish_reasons
    torch.testing.assert_close(seen.sampler_logprob, expected.sampler_logprob, atol=1e-5, rtol=0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", [sharp_policy, absolute_policy])
@pytest.mark.parametrize(
    "chosen",
    [
        {"random_length": (1, 24)},
        {"max_new_tokens": 24, "eos_token_ids": MANY_EOS},
        {"max_new_tokens": 24, "eos_token_ids": MANY_EOS, "min_new_tokens": 5},
        {"max_new_tokens": 24, "eos_token_ids": MANY_EOS, "temperature": 0, "min_new_tokens": 2},
        {"max_new_tokens": 24, "stop": ("a", "e"), "temperature": 2.0},
        {"max_new_tokens": 24},
    ],
    ids=str,
)
def test_replacing_rows_changes_no_response(make, chosen, tokenizer):
    model = make().model
    assert choose_decoding(model, 46, full_passes(model, 46)).replaces
    _, whole = sampled(make(), tokenizer, TEXTS, **chosen)
    _, parts = sampled(make(), tokenizer, TEXTS, batch_size=8, **chosen)
    assert_equal(parts, whole)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("batch_size", [1, 2, 8, 39])
def test_places_are_rarely_empty(batch_size, tokenizer):
    """While prompts wait, fewer places are empty than would be filled together; the last rows end by themselves."""
    settings = {"random_length": (1, 24), "batch_size": batch_size}
    _, rows, responses = passes_of(sharp_policy(), tokenizer, TEXTS, **settings)
    lengths = [len(ids) for ids in tokens(responses)]
    decoded = sum(lengths) - len(lengths)  # the first token of each needs no step
    assert max(rows) == batch_size and sum(rows) >= decoded
    assert len(rows) <= decoded / (batch_size - replaced_together(batch_size) + 1) + max(lengths)
    in_parts = sum(max(lengths[first : first + batch_size]) - 1 for first in range(0, 40, batch_size))
    assert len(rows) < 0.8 * in_parts or batch_size in (1, 39)


def test_prompts_that_take_places_are_read_in_small_parts(tokenizer):
    """What is read is stored a second time, so its memory must be bounded; here, sixteen rows end together."""
    texts = [f"{n} bridges" for n in range(10, 50)]
    read, _, _ = passes_of(sharp_policy(), tokenizer, texts, max_new_tokens=5, batch_size=16)
    assert read == [16] + 12 * [2]


def short_policy() -> Policy:
    """A GPT-2 with no more positions than the longest sequence has tokens."""
    config = GPT2Config(vocab_size=258, n_embd=32, n_layer=2, n_head=2, n_positions=4 + 6, initializer_range=0.2)
    return Policy(prepare(GPT2LMHeadModel(config)))


@pytest.mark.parametrize(("batch_size", "expected"), [(4, 6 * [1]), (8, 5 * [1]), (16, [2, 1, 1, 1])])
def test_a_prompt_of_several_responses_is_read_once(batch_size, expected, tokenizer):
    """However few rows are replaced together; what the first rows have read is read again for others."""
    texts = [text for text in ("A", "The bridge", "My", "Every winter", "No") for _ in range(8)]
    read, _, responses = passes_of(sharp_policy(), tokenizer, texts, random_length=(1, 8), batch_size=batch_size)
    assert read == expected
    _, whole = sampled(sharp_policy(), tokenizer, texts, random_length=(1, 8))
    assert_equal(responses, whole)


@torch.no_grad()
def test_prompts_that_were_read_before_are_told_apart():
    """Two of them differ only in whether their first token is padding."""
    model = sharp_policy().model
    others = [[9, 7], [0, 5], [5], [0, 5], [8, 5]]
    batch = padded_prompts([[3, 4], [3], [6, 4], *others])
    ids, mask = batch["prompt_ids"], batch["prompt_mask"]
    assert torch.equal(ids[4], ids[5])
    decoder = Decoder(model, ids[:3], mask[:3], new_cache(model, "static", 12), spare=2)
    decoder.read()
    decoder.append(torch.tensor([2, 2, 2]))
    for rows, new in (([0, 1], [3, 4]), ([2], [5]), ([0, 1], [4, 5]), ([0, 2], [6, 4]), ([1, 0], [7, 6])):
        seen = decoder.replace(torch.tensor(rows), ids[new], mask[new])
        after = decoder.append(torch.tensor([2, 2, 2]))[rows]
        for at, prompt in enumerate([others[n - 3] for n in new]):
            alone = model(input_ids=torch.tensor([[*prompt, 2]]), use_cache=False).logits[0]
            torch.testing.assert_close(torch.stack([seen[at], after[at]]), alone[-2:], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_prompts_are_forgotten_before_others_are_read():
    """There is room for the keys and values of one group of prompts beside the batch."""
    model, batch = sharp_policy().model, padded_prompts([[3, 4], [6, 7], [8, 9]])
    ids, mask = batch["prompt_ids"], batch["prompt_mask"]
    decoder = Decoder(model, ids[:1], mask[:1], new_cache(model, "static", 12), spare=2)
    decoder.read()
    decoder.replace(torch.tensor([0]), ids[1:2], mask[1:2])
    assert decoder._last is not None
    before, alive = weakref.ref(decoder._last.cache), []
    with trunk(model).register_forward_pre_hook(lambda _, __: alive.append(before() is not None)):
        decoder.replace(torch.tensor([0]), ids[2:], mask[2:])
    assert alive == [False]


# The fourth row, of full length, has one more token to append when the cache is full.
@example(sharp_policy, [(4, 4), (1, 6), (1, 6), (4, 6), (1, 6), (1, 6), (1, 6)], 1, 1)
@settings(deadline=None)
@given(
    st.sampled_from([sharp_policy, short_policy]),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=12, max_size=30),
    st.integers(1, 3),
    st.integers(1, 2),
)
@torch.no_grad()
def test_logits_are_those_of_each_row_alone(make, lengths, spare, ended):
    """Whenever rows end and are replaced, and whenever the cache is full: prompts of up to 4 tokens, responses of 6."""
    model, numbers = make().model, torch.Generator().manual_seed(len(lengths))
    rows = [torch.randint(3, 250, (prompt + response,), generator=numbers) for prompt, response in lengths]
    batch = padded_prompts([row[:prompt].tolist() for row, (prompt, _) in zip(rows, lengths, strict=True)])
    ids, mask = pad(batch["prompt_ids"], (4 - batch["prompt_ids"].shape[1], 0)), batch["prompt_mask"]
    mask = pad(mask, (4 - mask.shape[1], 0))
    before = mask.clone()
    decoder = Decoder(model, ids[:3], mask[:3], new_cache(model, "static", 4 + 6 + spare), spare=spare)
    running, appended = [0, 1, 2], [0, 0, 0]
    check = partial(assert_alone, model, rows, lengths)
    check(decoder.read(), running, appended)
    for row in range(3, len(rows)):
        while len(places := [i for i in range(3) if appended[i] >= lengths[running[i]][1] - 1]) < ended:
            token = [rows[name][: lengths[name][0] + n + 1][-1] for name, n in zip(running, appended, strict=True)]
            appended = [count + 1 for count in appended]
            check(decoder.append(torch.stack(token)), running, appended)
        running[places[0]], appended[places[0]] = row, 0
        check(decoder.replace(torch.tensor(places[:1]), ids[[row]], mask[[row]]), [row], [0])
    assert torch.equal(mask, before)


def assert_alone(
    model: torch.nn.Module,
    rows: list[torch.Tensor],
    lengths: list[tuple[int, int]],
    logits: torch.Tensor,
    names: list[int],
    appended: list[int],
) -> None:
    for seen, name, count in zip(logits, names, appended, strict=True):
        if count < lengths[name][1]:
            alone = model(input_ids=rows[name][None, : lengths[name][0] + count], use_cache=False).logits[0, -1]
            torch.testing.assert_close(seen, alone, atol=1e-4, rtol=1e-4)


def test_a_cache_that_keeps_a_window_is_filled_anew_for_each_part(tokenizer):
    model = small_model("gemma2")
    assert not choose_decoding(model, 40, full_passes(model, 40)).replaces
    assert choose_decoding(small_model("qwen2"), 40, full_passes(small_model("qwen2"), 40)).replaces
    chosen = {"random_length": (1, 24), "eos_token_ids": (40,)}
    texts = [text[:8] for text in TEXTS[:10]]
    _, whole = sampled(Policy(model), tokenizer, texts, **chosen)
    _, parts = sampled(Policy(model), tokenizer, texts, batch_size=4, **chosen)
    assert_equal(parts, whole)


@pytest.mark.parametrize("waiting", [True, False])
@pytest.mark.parametrize("replaces", [True, False])
def test_processes_with_more_and_with_fewer_responses_make_the_same_passes(waiting, replaces):
    """With sharded weights, each pass needs all processes; the shares of a batch can differ by one response."""
    model, passes = sharp_policy().model, []
    with trunk(model).register_forward_pre_hook(lambda _, __: passes.append(1)):
        check_room(model, 3 if waiting else 2, 2, 9, 70, replaces)
    assert len(passes) == 2


def test_room_for_rows_that_begin_later_is_counted(monkeypatch):
    config = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=9)
    model = prepare(LlamaForCausalLM(config))
    per_token = 2 * 2 * 32 * 4  # keys and values of two layers, in float32
    assert spare_columns(79) == 10
    of_responses = 32 * 70 * room.BYTES_PER_TOKEN
    needed = of_responses + per_token * (16 * (79 + 10) + 2 * 9)
    assert cache_bytes(model, 16, 89) + cache_bytes(model, 2, 9) == needed - of_responses
    monkeypatch.setattr(room, "free_memory", lambda device: needed)
    check_room(model, 32, 16, 9, 70, replaces=True)
    monkeypatch.setattr(room, "free_memory", lambda device: needed - 1)
    with pytest.raises(UserError, match="sampling 16 responses"):
        check_room(model, 32, 16, 9, 70, replaces=True)
    check_room(model, 16, 16, 9, 70, replaces=True)
    check_room(model, 32, 16, 9, 70)
