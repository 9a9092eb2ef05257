"""Every architecture is sampled and scored as its own full forward pass says, or refused: never wrong."""

import re
from pathlib import Path

import pytest
import torch
from models_helpers import chosen, own_logprobs
from small_models import WINDOW, small_model
from torch import Tensor
from transformers import PreTrainedModel

from cavesson.algorithms.rloo import RLOORun
from cavesson.data.prompts import padded_prompts
from cavesson.errors import UserError
from cavesson.models.policy import Policy
from cavesson.models.sequences import SequencePolicy
from cavesson.models.tiny import tiny_tokenizer
from cavesson.processes import Processes
from cavesson.rollout.engines.decoder import CacheKind
from cavesson.rollout.engines.decoding import Decoding, check_generate, check_scoring, choose_decoding, full_passes
from cavesson.rollout.engines.kept import unpadded
from cavesson.rollout.engines.memory_check import cache_bytes
from cavesson.rollout.engines.responses import Responses, Turns
from cavesson.rollout.engines.sampler import Sampler
from cavesson.rollout.engines.settings import SamplingSettings
from cavesson.train.build import Inputs, build
from cavesson.types import Batch, Scores

DOCS = Path(__file__).parents[2] / "docs" / "models.md"
KINDS = {"preallocated cache": "static", "growing cache": "growing", "refused": "refused"}
PROMPTS = padded_prompts([[2 * n + 3 for n in range(WINDOW + 1)], [10], [10]])
LONGEST = WINDOW + 2


def documented() -> list[tuple[str, str]]:
    """The architectures of the table in `docs/models.md`, and how each is decoded."""
    rows = re.findall(r"^\| (preallocated cache|growing cache|refused)[^|]* \| (`.*`) \|$", DOCS.read_text(), re.M)
    return [(name, KINDS[kind]) for kind, names in rows for name in re.findall("`([^`]+)`", names)]


def sampled(policy: Policy, prompts: Batch, **settings: object) -> tuple[Batch, Responses]:
    sampler = Sampler(policy, tiny_tokenizer(), SamplingSettings(max_new_tokens=LONGEST, **settings), seed=0)
    responses = sampler.sample(prompts, 0, range(len(prompts)))
    return prompts.with_columns(
        response_ids=responses.response_ids, attended=responses.mask, learned=responses.mask
    ), responses


def second_turns(policy: Policy) -> tuple[Batch, Tensor]:
    """Sample two turns of each prompt; return the second ones as responses, and the sampler's log-probabilities."""
    settings = SamplingSettings(max_new_tokens=LONGEST // 2)
    sampler = Sampler(policy, tiny_tokenizer(), settings, seed=0, has_turns=True)
    sampler.prepare(len(PROMPTS), WINDOW + 1 + LONGEST)
    with sampler.sampling():
        first = sampler.sample(PROMPTS, 0, range(3), turns=Turns([0] * 3, [9] * 3))
        assert bool(sampler._kept) == sampler.decoding.replaces
        answers = unpadded(first.response_ids.flip(1), first.mask.flip(1))
        rows = zip(unpadded(PROMPTS["prompt_ids"], PROMPTS["prompt_mask"]), answers, (1, 3, 2), strict=True)
        ids = [[*prompt, *answer[::-1], *[8] * more] for prompt, answer, more in rows]
        later = padded_prompts(ids)
        second = sampler.sample(later, 0, range(3), turns=Turns([9] * 3, [9] * 3))
    data = later.with_columns(response_ids=second.response_ids, attended=second.mask, learned=second.mask)
    return data, second.sampler_logprob[second.mask > 0]


def cache_of(model: PreTrainedModel, size: int) -> CacheKind:
    return choose_decoding(model, size, full_passes(model, size)).cache


def test_many_architectures_are_documented_once():
    names = [name for name, _ in documented()]
    assert len(names) == len(set(names))
    assert sum(kind != "refused" for _, kind in documented()) > 100


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("architecture", "kind"), documented(), ids=[name for name, _ in documented()])
def test_an_architecture_is_sampled_and_scored_correctly_or_refused(architecture, kind):
    model = small_model(architecture)
    if kind == "refused":
        with pytest.raises(UserError, match=architecture) as error:
            sampled(Policy(model), PROMPTS)
        assert "\n" not in str(error.value)
        return
    assert cache_of(model, PROMPTS["prompt_ids"].shape[1] + LONGEST) == kind
    policy = Policy(model)
    with torch.no_grad():
        for at_once in (1, 0):  # one after the other, in the same place if the cache allows it, and all together
            data, responses = sampled(policy, PROMPTS, batch_size=at_once)
            own = own_logprobs(model, data, 1.0)
            inside = data["learned"] > 0
            torch.testing.assert_close(responses.sampler_logprob[inside], chosen(own, data), atol=0.005, rtol=0)
        data, seen = second_turns(policy)
        torch.testing.assert_close(seen, chosen(own_logprobs(model, data, 1.0), data), atol=0.005, rtol=0)
        data, responses = sampled(policy, PROMPTS)
        own, inside = own_logprobs(model, data, 1.0), data["learned"] > 0
        for policy.shares_prompts in (False, True):
            torch.testing.assert_close(policy(data).logprob[inside], chosen(own, data), atol=0.005, rtol=0)
        # ln 258 = 5.55 is what a uniform model would say.
        assert -12 < chosen(own, data).mean() < -0.5
        greedy, _ = sampled(policy, PROMPTS, temperature=0)
        own = own_logprobs(model, greedy, 1.0)
    best = torch.cat([distribution.max(-1).values for distribution in own])
    torch.testing.assert_close(chosen(own, greedy), best, atol=0.005, rtol=0)


def test_gpt_neo_beyond_its_window_of_256_tokens_says_what_transformers_says():
    """Local attention masks by the length of the cache: a preallocated one hides the prompt."""
    model = small_model("gpt_neo", window_size=256, max_position_embeddings=512)
    prompt = [(7 * n) % 200 + 20 for n in range(250)]
    settings = SamplingSettings(max_new_tokens=40, temperature=0, eos_token_ids=(257,))
    sampler = Sampler(Policy(model), tiny_tokenizer(), settings, seed=0)
    seen = sampler.sample(padded_prompts([prompt, prompt[:100]]), 0, range(2)).response_ids
    for row, ids in zip(seen, (prompt, prompt[:100]), strict=True):
        whole = model.generate(
            torch.tensor([ids]), max_new_tokens=40, do_sample=False, eos_token_id=257, pad_token_id=1
        )
        assert row.tolist() == whole[0, len(ids) :].tolist()


@pytest.mark.parametrize(("size", "kind"), [(256, "static"), (257, "growing")])
def test_the_real_size_of_the_cache_decides(size, kind):
    assert cache_of(small_model("gpt_neo", window_size=256), size) == kind


@pytest.mark.parametrize(("size", "replaces"), [(227, True), (228, False), (256, False)])
def test_rows_are_replaced_if_the_cache_is_right_with_spare_columns_too(size, replaces):
    """Local attention sees 256 columns, and 228 with their spare ones are 257."""
    model = small_model("gpt_neo", window_size=256)
    assert choose_decoding(model, size, full_passes(model, size)) == Decoding("static", replaces=replaces)


def test_sequences_may_be_shorter_than_those_that_are_compared():
    model = small_model("qwen2")
    assert choose_decoding(model, 2, full_passes(model, 2)) == Decoding("static", replaces=True)


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "default"])
def test_rows_are_not_replaced_where_frequencies_depend_on_the_batch(kind):
    rope = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 2.0, "original_max_position_embeddings": 64}
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {}
    model = small_model("llama", sliding_window=None, head_dim=8, rope_parameters=rope | factors)
    assert choose_decoding(model, 40, full_passes(model, 40)).replaces == (kind == "default")


def test_a_model_that_differs_beyond_its_window_is_sampled_within_it():
    model = small_model("moshi")
    # The last token of a response is never read: of a sequence one longer than the window, all is seen.
    assert cache_of(model, WINDOW + 1) == "static"
    with pytest.raises(UserError, match="moshi cannot be sampled from: decoding with a cache differs"):
        cache_of(model, WINDOW + 2)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "bloom", "qwen3_5_text", "opt", "gpt_oss"])
def test_half_precision_is_no_difference(architecture):
    model = small_model(architecture)
    expected = cache_of(model, 40)
    assert cache_of(model.to(torch.bfloat16), 40) == expected


def test_the_comparison_reads_few_tokens_and_draws_no_random_number():
    model = small_model("llama", sliding_window=None)
    tokens: list[int] = []
    model.model.register_forward_pre_hook(
        lambda _module, _, named: tokens.append(named["input_ids"].numel()), with_kwargs=True
    )
    before = torch.get_rng_state()
    assert [cache_of(model, 100_000) for _ in range(2)] == ["static", "static"]
    assert torch.equal(torch.get_rng_state(), before)
    assert sum(tokens) / 2 <= 48


@pytest.mark.parametrize("architecture", ["llama", "gpt_neo", "mamba", "bloom", "granite", "jamba"])
def test_a_conversation_is_generated_correctly(architecture):
    before = torch.get_rng_state()
    check_generate(small_model(architecture))
    torch.manual_seed(0)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("architecture", ["xlnet"])
def test_a_conversation_with_a_model_that_generates_something_else_is_refused(architecture):
    with pytest.raises(UserError, match=architecture) as error:
        check_generate(small_model(architecture))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("architecture", ["rwkv", "bart", "xlstm"])
def test_a_model_that_padding_changes_is_not_scored(architecture):
    with pytest.raises(UserError, match=f"{architecture} cannot be scored") as error:
        policy = Policy(small_model(architecture))
        check_scoring(policy, full_passes(policy.model, 40))
    assert "\n" not in str(error.value)


class OtherScores(Policy):
    """One nat off, as where padding moves positions."""

    def forward(self, batch: Batch) -> Scores:
        scores = super().forward(batch)
        return scores._replace(logprob=scores.logprob + 1.0)


def test_what_is_sampled_and_scored_is_compared_in_both(tmp_path, monkeypatch):
    settings = SamplingSettings(max_new_tokens=8)
    Sampler(OtherScores(small_model("llama")), tiny_tokenizer(), settings, seed=0).prepare(2, 4)
    scored = Sampler(OtherScores(small_model("llama")), tiny_tokenizer(), settings, seed=0, is_scored=True)
    with pytest.raises(UserError, match=r"llama cannot be scored: .* by up to 1 nats"):
        scored.prepare(2, 4)
    monkeypatch.setattr("cavesson.models.policy.Policy", OtherScores)
    inputs = Inputs(small_model("llama"), tiny_tokenizer(), ["Hi", "Ho"], lambda prompts, responses: [0.0] * 2)
    with pytest.raises(UserError, match="llama cannot be scored"):
        build(RLOORun(run=tmp_path / "run", batch_size=4, samples_per_prompt=2), inputs, Processes("cpu"))


def test_both_are_compared_with_the_same_full_passes():
    """Three rows, each read once as a whole: prompts of 4, 1 and 4 tokens, and two more."""
    model, whole = small_model("llama"), []
    model.model.register_forward_pre_hook(
        lambda _module, _, named: whole.append(named["input_ids"].shape) if not named["use_cache"] else None,
        with_kwargs=True,
    )
    policy = Policy(model)
    whole.clear()
    Sampler(policy, tiny_tokenizer(), SamplingSettings(max_new_tokens=8), seed=0, is_scored=True).prepare(2, 4)
    assert [shape for shape in whole if shape[0] == 1] == [(1, 6), (1, 3), (1, 6)]


@pytest.mark.parametrize("vocabulary", [1, 3])
def test_every_comparison_stays_within_a_tiny_vocabulary(vocabulary):
    tokens = {"vocab_size": vocabulary, "eos_token_id": 0, "pad_token_id": 0, "bos_token_id": 0}
    model = small_model("llama", **tokens)
    policy = Policy(model)
    SequencePolicy(model, packed=True)
    assert cache_bytes(model, 1, 10) > 0
    assert cache_of(model, 10) == "static"
    check_scoring(policy, full_passes(model, 10))
    check_generate(model)


def test_a_wrong_head_of_a_tiny_vocabulary_is_noticed():
    model = small_model("gemma2", vocab_size=3, pad_token_id=0, final_logit_softcapping=2.0)
    Policy(model)
    own = type(model).forward

    def shifted(self: PreTrainedModel, **inputs: object) -> object:
        output = own(self, **inputs)
        output.logits = output.logits + torch.tensor([0.0, 0.0, 1.0])
        return output

    model.forward = shifted.__get__(model)
    with pytest.raises(UserError, match="gemma2 changes its logits"):
        Policy(model)
