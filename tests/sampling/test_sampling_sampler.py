import copy

import numpy as np
import pytest
import torch
from sampling_helpers import PROMPTS, absolute_policy, prompts, sampled, sharp_policy, tokens
from scipy.stats import chisquare

from cavesson.models.load import prepare
from cavesson.models.parts import trunk
from cavesson.models.policy import Policy, build_policy
from cavesson.models.settings import LoraSettings, ModelSettings, ReferenceSettings
from cavesson.models.tiny import tiny_model
from cavesson.rollout.engines.responses import Growing, StopTexts, eos_token_ids
from cavesson.rollout.engines.sampler import Sampler
from cavesson.rollout.engines.settings import SamplingSettings

# Forty bytes that end a response make responses of different lengths.
MANY_EOS = tuple(range(60, 100))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"top_p": 0.9}, {"random_length": (1, 12)}])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_batch_composition_changes_nothing(tokenizer, settings, batch_size):
    settings = {"eos_token_ids": MANY_EOS, **settings}
    _, whole = sampled(sharp_policy(), tokenizer, **settings)
    _, parts = sampled(sharp_policy(), tokenizer, batch_size=batch_size, **settings)
    assert torch.equal(parts.response_ids, whole.response_ids)
    assert torch.equal(parts.mask, whole.mask)
    assert parts.finish_reasons == whole.finish_reasons
    torch.testing.assert_close(parts.sampler_logprob, whole.sampler_logprob, atol=1e-5, rtol=0)
    assert len({len(ids) for ids in tokens(whole)}) > 1


@pytest.mark.parametrize("make", [sharp_policy, absolute_policy])
def test_prompt_padding_changes_nothing(tokenizer, make):
    policy = make()
    _, together = sampled(policy, tokenizer)
    for row, text in enumerate(PROMPTS):
        _, alone = sampled(policy, tokenizer, [text], first_row=row)
        assert tokens(alone) == tokens(together)[row : row + 1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make", [sharp_policy, absolute_policy])
def test_rows_that_have_ended_leave_the_batch(tokenizer, make):
    policy, passes = make(), []
    texts = PROMPTS * 4
    with trunk(policy.model).register_forward_pre_hook(
        lambda _, __, given: passes.append(given["input_ids"].shape), with_kwargs=True
    ):
        _, together = sampled(policy, tokenizer, texts, eos_token_ids=MANY_EOS, max_new_tokens=24)
    rows = [count for count, width in passes if width == 1][-max(map(len, tokens(together))) + 1 :]
    lengths = np.array([len(ids) for ids in tokens(together)])
    assert rows[0] == 20 and rows == sorted(rows, reverse=True)
    for t, count in enumerate(rows, 1):
        growing = int((lengths > t).sum())
        assert growing <= count <= growing / 0.75 + 1
    for row, text in enumerate(texts):
        _, alone = sampled(policy, tokenizer, [text], first_row=row, eos_token_ids=MANY_EOS, max_new_tokens=24)
        assert tokens(alone) == tokens(together)[row : row + 1]
        mine = together.sampler_logprob[row, : lengths[row]]
        torch.testing.assert_close(alone.sampler_logprob[0, : lengths[row]], mine, atol=1e-5, rtol=0)


def test_rows_steps_and_seeds_have_their_own_draws(tokenizer):
    same = ["The old bridge"] * 4
    policy = sharp_policy()
    _, whole = sampled(policy, tokenizer, same)
    assert len({tuple(ids) for ids in tokens(whole)}) == 4
    _, again = sampled(policy, tokenizer, same[:2], first_row=2)
    assert tokens(again) == tokens(whole)[2:]
    for other in ({"step": 1}, {"seed": 1}, {"first_row": 4}):
        assert not {tuple(ids) for ids in tokens(sampled(policy, tokenizer, same, **other)[1])} & {
            tuple(ids) for ids in tokens(whole)
        }


def test_first_tokens_have_the_model_s_frequencies(tokenizer):
    # A right implementation fails at one seed in 10,000; this seed stays.
    n = 2000
    policy = sharp_policy()
    _, responses = sampled(policy, tokenizer, ["The old bridge"] * n, max_new_tokens=1)
    logits = policy.model(input_ids=torch.tensor([tokenizer("The old bridge")["input_ids"]])).logits[0, -1]
    expected = n * logits.double().softmax(-1).detach().numpy()
    counts = np.bincount(responses.response_ids[:, 0].numpy(), minlength=len(expected))
    rare = expected < 10  # the test's own approximation needs cells of some size
    assert 0 < rare.sum() < len(expected) - 10
    pooled = [(*x[~rare], x[rare].sum()) for x in (counts, expected)]
    assert chisquare(*pooled).pvalue > 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_and_scorer_agree(tokenizer, temperature):
    policy = sharp_policy(temperature)
    batch, responses = sampled(policy, tokenizer, temperature=temperature, eos_token_ids=MANY_EOS)
    torch.testing.assert_close(responses.sampler_logprob, policy(batch).logprob.detach(), atol=1e-4, rtol=0)
    assert responses.sampler_logprob[responses.mask == 0].abs().sum() == 0


def test_adapters_are_active_in_sampling(tokenizer):
    settings = ModelSettings(lora=LoraSettings(rank=4))
    policy = build_policy(prepare(tiny_model()), settings, None, ReferenceSettings(), 1.0)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    batch, responses = sampled(policy, tokenizer)
    torch.testing.assert_close(responses.sampler_logprob, policy(batch).logprob.detach(), atol=1e-4, rtol=0)
    assert (responses.sampler_logprob - policy.reference_logprob(batch)).abs().max() > 0.1


def test_every_end_token_ends(tokenizer):
    _, responses = sampled(sharp_policy(), tokenizer, PROMPTS * 8, eos_token_ids=MANY_EOS, max_new_tokens=20)
    ends = set()
    for ids, reason in zip(tokens(responses), responses.finish_reasons, strict=True):
        assert not set(ids[:-1]) & set(MANY_EOS)
        assert (ids[-1] in MANY_EOS) == (reason == "eos")  # the end token belongs to the response
        assert len(ids) == 20 or reason == "eos"
        ends |= {ids[-1]} & set(MANY_EOS)
    assert len(ends) > 3


def test_padding_follows_the_response(tokenizer):
    _, responses = sampled(sharp_policy(), tokenizer, eos_token_ids=MANY_EOS)
    lengths = [len(ids) for ids in tokens(responses)]
    assert responses.response_ids.shape[1] == max(lengths) > min(lengths)
    for row, length in enumerate(lengths):
        assert responses.mask[row].tolist() == [1.0] * length + [0.0] * (max(lengths) - length)
        assert (responses.response_ids[row, length:] == 0).all()


def test_a_pad_token_needs_no_embedding(tokenizer):
    """Padding is masked, so a pad token that was added to the tokenizer only changes no draw."""
    _, expected = sampled(sharp_policy(), tokenizer)
    added = copy.deepcopy(tokenizer)
    added.add_special_tokens({"pad_token": "[PAD]"})
    assert added.pad_token_id == 258  # the model has the embeddings 0 to 257
    _, responses = sampled(sharp_policy(), added)
    assert tokens(responses) == tokens(expected)
    assert responses.sampler_logprob.equal(expected.sampler_logprob)


def test_end_tokens_of_model_and_tokenizer_are_joined(tokenizer):
    policy = sharp_policy()
    assert eos_token_ids(policy, tokenizer, SamplingSettings()) == [0]
    policy.model.generation_config.eos_token_id = [7, 5]
    assert eos_token_ids(policy, tokenizer, SamplingSettings()) == [0, 5, 7]
    policy.model.generation_config.eos_token_id = None
    assert eos_token_ids(policy, tokenizer, SamplingSettings()) == [0]
    assert eos_token_ids(policy, tokenizer, SamplingSettings(eos_token_ids=(9,))) == [9]


def test_a_stop_text_cuts_text_and_tensors(tokenizer):
    # Half of all bytes are not ASCII, so ten letters end most responses within sixty tokens.
    stops = tuple("etaoinshrd")
    policy = sharp_policy()
    batch, responses = sampled(policy, tokenizer, PROMPTS * 3, stop=stops, max_new_tokens=60)
    _, unstopped = sampled(policy, tokenizer, PROMPTS * 3, max_new_tokens=60)
    for row, reason in enumerate(responses.finish_reasons):
        ids, longer = tokens(responses)[row], tokens(unstopped)[row]
        assert ids == longer[: len(ids)]  # the stop text changes no draw before it
        assert not set(tokenizer.decode(ids, skip_special_tokens=True)) & set(stops)
        if reason == "stop":
            assert tokenizer.decode(longer[len(ids) : len(ids) + 1]) in stops
    assert "stop" in responses.finish_reasons
    scored = policy(batch).logprob.detach()
    torch.testing.assert_close(responses.sampler_logprob, scored, atol=1e-4, rtol=0)


def test_a_stop_text_at_once_leaves_an_empty_response(tokenizer):
    everything = tuple(sorted({chr(c) for c in range(1, 128)} | {"�"}))
    batch, responses = sampled(sharp_policy(), tokenizer, stop=everything, eos_token_ids=(0,))
    empty = [ids for ids, reason in zip(tokens(responses), responses.finish_reasons, strict=True) if reason == "stop"]
    assert empty
    assert not any(empty)
    assert torch.isfinite(sharp_policy()(batch).logprob).all()


def test_random_lengths_stay_within_their_limits(tokenizer):
    n = 60
    policy = sharp_policy()
    _, responses = sampled(policy, tokenizer, ["A"] * n, random_length=(2, 5), eos_token_ids=(0,))
    lengths = {len(ids) for ids, r in zip(tokens(responses), responses.finish_reasons, strict=True) if r == "length"}
    # Each end is missed by all of sixty draws with a probability of (3/4)^60 = 3e-8.
    assert lengths == {2, 3, 4, 5}
    _, other_rows = sampled(policy, tokenizer, ["A"] * 5, first_row=20, random_length=(2, 5), eos_token_ids=(0,))
    assert tokens(other_rows) == tokens(responses)[20:25]


def test_a_minimum_length_holds_and_shows_in_the_sampler_s_logprob(tokenizer):
    policy = sharp_policy()
    _, free = sampled(policy, tokenizer, PROMPTS * 4, eos_token_ids=MANY_EOS)
    assert min(len(ids) for ids in tokens(free)) < 6
    batch, held = sampled(policy, tokenizer, PROMPTS * 4, eos_token_ids=MANY_EOS, min_new_tokens=6)
    assert min(len(ids) for ids in tokens(held)) >= 6
    assert any(len(ids) == 7 for ids in tokens(held))  # an end token after exactly six others
    gap = held.sampler_logprob - policy(batch).logprob.detach()
    # Without the end tokens the others are likelier; afterwards the two agree.
    assert (gap[:, :6] > 1e-3).all()
    assert (gap[:, 6:] * held.mask[:, 6:]).abs().max() < 1e-4


@pytest.mark.parametrize("make", [sharp_policy, absolute_policy])
def test_temperature_zero_is_the_greedy_search_of_transformers(tokenizer, make):
    policy = make()
    batch = prompts(tokenizer)
    expected = policy.model.generate(
        input_ids=batch["prompt_ids"], attention_mask=batch["prompt_mask"], do_sample=False, max_new_tokens=10
    )[:, batch["prompt_ids"].shape[1] :]
    _, responses = sampled(policy, tokenizer, temperature=0.0, max_new_tokens=10)
    for seen, wanted in zip(tokens(responses), expected.tolist(), strict=True):
        assert seen == wanted[: len(seen)]
        assert len(seen) == 10 or seen[-1] == 0


def test_a_minimum_length_needs_no_end_token(tokenizer, monkeypatch):
    monkeypatch.setattr("cavesson.rollout.engines.sampler.eos_token_ids", lambda *_: [])
    _, responses = sampled(sharp_policy(), tokenizer, min_new_tokens=3)
    assert set(responses.finish_reasons) == {"length"}


def test_a_minimum_length_holds_at_temperature_zero(tokenizer):
    policy = sharp_policy()
    _, free = sampled(policy, tokenizer, temperature=0.0)
    ends = tuple({ids[0] for ids in tokens(free)})
    _, held = sampled(policy, tokenizer, temperature=0.0, eos_token_ids=ends, min_new_tokens=3)
    assert min(len(ids) for ids in tokens(held)) >= 3


def test_sampling_leaves_global_generators_alone(tokenizer):
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    sampled(sharp_policy(), tokenizer)
    assert torch.equal(torch.rand(3), expected)


def test_half_precision_samples_what_it_scores(tokenizer):
    policy = Policy(prepare(tiny_model(dtype=torch.bfloat16)))
    batch, responses = sampled(policy, tokenizer)
    assert responses.sampler_logprob.dtype == torch.float32
    # Hidden states are rounded to 1/256 of their size, and the logits of this model are small.
    torch.testing.assert_close(responses.sampler_logprob, policy(batch).logprob.detach(), atol=0.05, rtol=0)


def test_prompts_are_not_written(tokenizer):
    batch = prompts(tokenizer)
    copies = {name: column.clone() for name, column in batch.columns.items()}
    Sampler(sharp_policy(), tokenizer, SamplingSettings(max_new_tokens=2), 0).sample(batch, 0, range(len(batch)))
    assert all(torch.equal(batch[name], copy) for name, copy in copies.items())


@pytest.mark.parametrize("longest", [0, 1, 2, 3])
def test_responses_have_two_columns_at_least(tokenizer, longest):
    """Processes that share weights make the same passes, also where the responses of one are a single token."""
    growing = Growing(2, np.array([4, 4]), [0], StopTexts(tokenizer, []))
    growing.ids = [[5] * longest, []]
    found = growing.responses(torch.full((2, max(1, longest)), -1.0), torch.ones(2, max(1, longest)).long())
    width = max(2, longest)
    columns = (found.response_ids, found.mask, found.sampler_logprob, found.versions)
    assert [column.shape for column in columns] == [(2, width)] * 4
    assert found.mask.sum(1).tolist() == [longest, 0]
    assert found.sampler_logprob.sum().item() == -longest
