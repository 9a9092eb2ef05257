"""Heads with a bias, a scale or a soft-cap: scored, sampled and learned as the model's own logits say."""

import pytest
import torch
from models_helpers import batch, chosen, gradients, own_logprobs, policy_of, scramble
from transformers import (
    BertConfig,
    CodeGenConfig,
    Cohere2Config,
    CohereConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPTJConfig,
    GraniteConfig,
    GraniteMoeConfig,
    HyperCLOVAXConfig,
    MiniCPM3Config,
    MptConfig,
    NanoChatConfig,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
    VaultGemmaConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from cavesson.data.prompts import padded_prompts
from cavesson.errors import UserError
from cavesson.models.load import prepare
from cavesson.models.policy import Policy
from cavesson.models.sequences import SequencePolicy
from cavesson.models.settings import LoraSettings, ReferenceSettings
from cavesson.models.tiny import tiny_tokenizer
from cavesson.rollout.engines.sampler import Sampler
from cavesson.rollout.engines.settings import SamplingSettings
from cavesson.types import Batch

TOKENS = {"vocab_size": 258, "eos_token_id": 0, "pad_token_id": 1, "bos_token_id": 0, "tie_word_embeddings": False}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SIZES, **TOKENS, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3}
GPT = {**TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4, "initializer_range": 0.3}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}

CONFIGS = [
    Gemma2Config(**GROUPED, final_logit_softcapping=2.0),
    Gemma3TextConfig(**GROUPED, final_logit_softcapping=2.0),
    VaultGemmaConfig(**GROUPED, final_logit_softcapping=2.0),
    NanoChatConfig(**GROUPED, final_logit_softcapping=2.0),
    GraniteConfig(**GROUPED, logits_scaling=3.0),
    GraniteMoeConfig(**GROUPED, logits_scaling=3.0, num_local_experts=4),
    CohereConfig(**GROUPED, logit_scale=0.3),
    Cohere2Config(**GROUPED, logit_scale=0.3),
    HyperCLOVAXConfig(**GROUPED, logits_scaling=0.3),
    MiniCPM3Config(**SIZES, **TOKENS, **LATENT, num_key_value_heads=4, dim_model_base=16, initializer_range=0.3),
    GPTJConfig(**GPT),
    CodeGenConfig(**GPT),
    PhiConfig(**SIZES, **TOKENS, initializer_range=0.3),
]
EVERY_HEAD = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)


def model_of(config: PretrainedConfig) -> PreTrainedModel:
    """A model with weights large enough that its head matters, and a bias where it has one."""
    torch.manual_seed(0)
    model = prepare(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config))
    bias = getattr(model.get_output_embeddings(), "bias", None)
    if bias is not None:
        torch.nn.init.normal_(bias)
    return model


def test_the_heads_do_something():
    """Without this, a bias that is zero or a cap that no logit reaches would prove nothing."""
    for config in CONFIGS:
        model = model_of(config)
        states = model.base_model(input_ids=torch.arange(9)[None]).last_hidden_state
        plain = states @ model.get_output_embeddings().weight.t()
        own = model(input_ids=torch.arange(9)[None]).logits
        difference = (plain.log_softmax(-1) - own.log_softmax(-1)).abs().max()
        assert difference.item() > 0.1, config.model_type


@EVERY_HEAD
def test_scores_are_those_of_the_models_own_logits(config):
    policy, data = Policy(model_of(config), temperature=0.7), batch()
    inside = data["learned"] > 0
    with torch.no_grad():
        scores, own = policy(data), own_logprobs(policy.model, data, 0.7)
    torch.testing.assert_close(scores.logprob[inside], chosen(own, data), atol=1e-4, rtol=1e-4)
    entropy = torch.cat([-(p.exp() * p).sum(-1) for p in own])
    torch.testing.assert_close(scores.entropy[inside], entropy, atol=1e-4, rtol=1e-4)


@EVERY_HEAD
def test_gradients_are_those_of_the_models_own_logits(config):
    policy, data = Policy(model_of(config), temperature=0.7), batch()
    scores = policy(data)
    (scores.logprob.sum() + 0.3 * scores.entropy.sum()).backward()
    seen = gradients(policy.model)
    policy.zero_grad()
    own = own_logprobs(policy.model, data, 0.7)
    (chosen(own, data).sum() - 0.3 * sum((p.exp() * p).sum() for p in own)).backward()
    expected = gradients(policy.model)
    assert set(seen) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(seen[name], gradient, atol=2e-4 * float(gradient.abs().max() + 1), rtol=1e-3)


@EVERY_HEAD
def test_the_exact_kl_is_that_of_the_models_own_logits(config):
    policy, data = policy_of(model_of(config), reference=ReferenceSettings(kind="copy"), temperature=0.7), batch()
    scramble(policy)
    with torch.no_grad():
        p, q = (own_logprobs(one.model, data, 0.7) for one in (policy, policy.frozen_reference))
    expected = torch.cat([(a.exp() * (a - b)).sum(-1) for a, b in zip(p, q, strict=True)])
    assert float(expected.mean()) > 0.001
    torch.testing.assert_close(policy.reference_kl(data)[data["learned"] > 0], expected, atol=1e-4, rtol=1e-3)


@EVERY_HEAD
def test_sampling_is_from_the_models_own_logits(config):
    policy, tokenizer = Policy(model_of(config), temperature=0.7), tiny_tokenizer()
    prompts = padded_prompts([[5, 6, 7, 8, 9], [10], [11, 12]])
    settings = SamplingSettings(max_new_tokens=7, temperature=0.7)
    responses = Sampler(policy, tokenizer, settings, seed=0).sample(prompts, 0, range(3))
    data = prompts.with_columns(response_ids=responses.response_ids, attended=responses.mask, learned=responses.mask)
    with torch.no_grad():
        own = own_logprobs(policy.model, data, 0.7)
    torch.testing.assert_close(responses.sampler_logprob[data["learned"] > 0], chosen(own, data), atol=1e-4, rtol=1e-4)


@EVERY_HEAD
def test_examples_are_scored_by_the_models_own_logits(config):
    model = model_of(config)
    ids = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 0, 0]])
    mask = torch.tensor([[0.0, 0, 1, 1, 1], [0, 1, 1, 0, 0]])
    data = Batch({"ids": ids, "learned": mask, "length": torch.tensor([5, 3])})
    with torch.no_grad():
        seen = SequencePolicy(model, packed=False)(data).logprob
        own = [model(input_ids=row[None, :n]).logits[0].log_softmax(-1) for row, n in zip(ids, (5, 3), strict=True)]
    expected = [own[0][1, 7], own[0][2, 8], own[0][3, 9], own[1][0, 11], own[1][1, 12]]
    torch.testing.assert_close(seen[mask > 0], torch.stack(expected), atol=1e-4, rtol=1e-4)


def test_half_precision_is_scored_by_the_models_own_logits():
    config = Gemma2Config(**GROUPED, final_logit_softcapping=2.0)
    policy, data = Policy(model_of(config).to(torch.bfloat16)), batch()
    with torch.no_grad():
        own = own_logprobs(policy.model, data, 1.0)
        torch.testing.assert_close(policy(data).logprob[data["learned"] > 0], chosen(own, data), atol=0.05, rtol=0.02)


def test_adapters_learn_under_a_head_with_a_bias():
    policy = policy_of(model_of(GPTJConfig(**GPT)), lora=LoraSettings(rank=4, targets=("q_proj",)))
    policy(batch()).logprob.sum().backward()
    assert all("lora" in name for name in gradients(policy))


def test_a_state_space_model_with_a_scale_learns_from_examples():
    model = model_of(FalconH1Config(**GROUPED, **MAMBA, lm_head_multiplier=0.3))
    data = Batch(
        {"ids": torch.arange(5, 9)[None], "learned": torch.tensor([[0.0, 1, 1, 1]]), "length": torch.tensor([4])}
    )
    with torch.no_grad():
        own = model(input_ids=data["ids"]).logits[0].log_softmax(-1)
        seen = SequencePolicy(model, packed=False)(data).logprob[0, 1:]
    torch.testing.assert_close(seen, own[:3].gather(1, data["ids"][0, 1:, None]).squeeze(1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (BertConfig(**SIZES, **TOKENS, is_decoder=True), "bert changes its logits"),  # a layer in front of its head
        (MptConfig(**TOKENS, d_model=32, n_heads=4, n_layers=2, logit_scale=0.3), "mpt changes its logits"),
    ],
    ids=["layer", "unused-scale"],
)
def test_other_heads_are_refused_in_one_line(config, part):
    model = model_of(config)
    for build in (Policy, lambda model: SequencePolicy(model, packed=False)):
        with pytest.raises(UserError, match=part) as error:
            build(model)
        assert "\n" not in str(error.value)


def test_a_cap_that_the_first_logits_do_not_reach_is_noticed():
    """The logits of these weights stay below 0.1, where a cap of 2 changes nothing that could be measured."""
    config = Gemma2Config(**{**GROUPED, "initializer_range": 0.002}, final_logit_softcapping=2.0)
    model = model_of(config)
    assert model(input_ids=torch.arange(4)[None]).logits.abs().max().item() < 0.1
    model.config.final_logit_softcapping = None
    own = type(model).forward

    def capped(self: PreTrainedModel, **inputs: object) -> object:
        output = own(self, **inputs)
        output.logits = 2.0 * torch.tanh(output.logits / 2.0)
        return output

    model.forward = capped.__get__(model)
    with pytest.raises(UserError, match="gemma2 changes its logits"):
        Policy(model)
