"""Rollouts of one prompt share its pass: what is said of them, and every gradient, is as if each stood alone."""

import pytest
import torch
from batch_helpers import split
from hypothesis import given
from hypothesis import strategies as st
from models_helpers import batch, gradients, sharp_model
from torch import Tensor
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, MistralConfig, PretrainedConfig, Qwen3Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from cavesson.data.prompts import padded_prompts
from cavesson.models.load import prepare
from cavesson.models.policy import Policy
from cavesson.models.shared_prompts import distinct
from cavesson.models.tiny import tiny_tokenizer
from cavesson.rollout.engines.sampler import Sampler
from cavesson.rollout.engines.settings import SamplingSettings

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
COMMON = {"vocab_size": 258, "eos_token_id": 0, "pad_token_id": 1, "bos_token_id": 0}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
LAYERS = ["sliding_attention", "full_attention"]
CONFIGS = [
    GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **COMMON),
    LlamaConfig(**SIZES, **GROUPED, **COMMON),
    Qwen3Config(**SIZES, **GROUPED, **COMMON),
    MistralConfig(**SIZES, **GROUPED, sliding_window=4, **COMMON),  # narrower than the longest prompt
    Gemma3TextConfig(**SIZES, **GROUPED, sliding_window=3, layer_types=LAYERS, **COMMON),
]
PROMPTS = [[5, 6, 7, 8, 9, 10], [11], [5, 6, 7, 8, 9, 10], [12, 13, 14], [11], [11]]
RESPONSES = [[20, 21, 22, 23], [24], [25, 26], [27, 28, 29], [30, 31, 32, 33], [34, 35, 36]]


def policy_of(config: PretrainedConfig, shares_prompts: bool = True) -> Policy:
    torch.manual_seed(0)
    model = prepare(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config))
    return Policy(model, value="trunk", shares_prompts=shares_prompts)


def read_tokens(policy: Policy) -> list[int]:
    """Grows by the number of tokens of every pass."""
    sizes: list[int] = []
    policy.model.get_input_embeddings().register_forward_hook(lambda _m, inputs, _o: sizes.append(inputs[0].numel()))
    return sizes


def loss(policy: Policy, size: int) -> Tensor:
    """A different weight on every response token, summed over micro-batches of this size."""
    whole = batch(PROMPTS, RESPONSES)
    weights = torch.linspace(-1, 2, whole["learned"].numel()).view_as(whole["learned"])
    total = torch.zeros(())
    for part, weight in zip(split(whole, size), weights.split(size), strict=True):
        scores = policy(part)
        columns = scores.logprob + 0.3 * scores.entropy + scores.value
        total = total + (columns * weight[:, : columns.shape[1]]).sum()
    return total


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_scores_and_gradients_are_those_of_rollouts_alone(config):
    together, alone = policy_of(config), policy_of(config, shares_prompts=False)
    sizes = read_tokens(together)
    seen, expected = loss(together, 6), loss(alone, 1)
    # Three prompts, padded to six tokens, and three tokens of each of six responses: the last one predicts nothing.
    assert sizes == [3 * 6, 6 * 3]
    torch.testing.assert_close(seen, expected, atol=1e-4, rtol=1e-5)
    seen.backward()
    expected.backward()
    torch.testing.assert_close(gradients(together), gradients(alone), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("rows", [slice(0, 6), slice(2, 4)], ids=["shared", "different"])
def test_what_is_in_a_batch_does_not_decide_how_it_is_read(rows):
    among = batch(PROMPTS[rows], RESPONSES[rows])
    prompts, count, response = len({tuple(prompt) for prompt in PROMPTS[rows]}), len(among), among["learned"].shape[1]
    for shares_prompts, expected in (
        (True, [prompts * 6, count * (response - 1)]), (False, [count * (6 + response - 1)]),
    ):  # fmt: skip
        policy = Policy(sharp_model(), shares_prompts=shares_prompts)
        sizes = read_tokens(policy)
        with torch.no_grad():
            scored = policy(among).logprob
        assert torch.equal(policy(among).logprob, scored)  # gradients change nothing either
        assert sizes == 2 * expected


def test_responses_of_one_token():
    policy, short = Policy(sharp_model(), shares_prompts=True), [[20], [24], [25], [], [30], [34]]
    seen = policy(batch(PROMPTS, short)).logprob
    alone = torch.cat([policy(part).logprob for part in split(batch(PROMPTS, short), 1)])
    torch.testing.assert_close(seen, alone, atol=1e-5, rtol=1e-5)
    assert seen[3].item() == 0 and (seen[[0, 1, 2, 4, 5]] < 0).all()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_sampling_reads_a_prompt_once_and_draws_as_if_alone(config):
    policy, settings = policy_of(config), SamplingSettings(max_new_tokens=5, eos_token_ids=(257,))
    prompts = padded_prompts(PROMPTS)
    sizes = read_tokens(policy)
    sampler = Sampler(policy, tiny_tokenizer(), settings, seed=0)
    sampler.sample(prompts, 0, range(6))
    sizes.clear()  # the first call compares the cache with full passes
    together = sampler.sample(prompts, 0, range(6))
    assert sizes == [3 * 6, 6, 6, 6, 6]
    one = settings.model_copy(update={"batch_size": 1})
    alone = Sampler(policy, tiny_tokenizer(), one, seed=0).sample(prompts, 0, range(6))
    assert together.response_ids.tolist() == alone.response_ids.tolist()
    torch.testing.assert_close(together.sampler_logprob, alone.sampler_logprob, atol=2e-5, rtol=0)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=8))
def test_distinct_prompts_are_those_of_a_set(rows):
    """Rows of two tokens, the first of them possibly padding."""
    ids, mask = torch.tensor([[1, token] for token, _ in rows]), torch.tensor([[shown, 1] for _, shown in rows])
    among = distinct(ids, mask)
    assert len(among.first) == len(set(rows)) and among.shared == (len(set(rows)) < len(rows))
    assert [rows[among.first[prompt]] for prompt in among.prompt] == rows
    assert sorted(among.first.tolist()) == sorted(rows.index(row) for row in set(rows))
