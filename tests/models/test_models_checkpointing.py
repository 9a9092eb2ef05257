"""Activations that are computed again: the same numbers and gradients, and nothing random, whatever the model has."""

import copy

import pytest
import torch
from models_helpers import batch, gradients, sharp_model
from small_models import small_config
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DbrxConfig,
    GptOssConfig,
    GraniteMoeConfig,
    JetMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    OPTConfig,
    PhimoeConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.dbrx.configuration_dbrx import DbrxAttentionConfig, DbrxFFNConfig

from cavesson.errors import UserError
from cavesson.models.layers import recompute_layers
from cavesson.models.load import prepare
from cavesson.models.policy import Policy, build_policy
from cavesson.models.sequences import RewardModel
from cavesson.models.settings import ModelSettings, ReferenceSettings, ValueSettings
from cavesson.types import Batch

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
COMMON = {"vocab_size": 258, "eos_token_id": 0, "pad_token_id": 1, "bos_token_id": 0}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
MOE = {"num_experts": 4, "num_experts_per_tok": 2}
CONFIGS: list[PretrainedConfig] = [
    MixtralConfig(**SIZES, **COMMON, **LOCAL, num_key_value_heads=2, router_jitter_noise=0.5),
    PhimoeConfig(
        **SIZES, **COMMON, **LOCAL, num_key_value_heads=2, router_jitter_noise=0.5, input_jitter_noise=0.5,
        hidden_dropout=0.5, attention_dropout=0.5,
    ),
    DbrxConfig(
        d_model=32, n_heads=4, n_layers=2, max_seq_len=64, resid_pdrop=0.5, emb_pdrop=0.5, **COMMON,
        attn_config=DbrxAttentionConfig(attn_pdrop=0.5, kv_n_heads=2, clip_qkv=8.0, rope_theta=1e4),
        ffn_config=DbrxFFNConfig(
            hidden_size=32, ffn_hidden_size=48, moe_num_experts=4, moe_top_k=2, moe_jitter_eps=0.5
        ),
    ),
    JetMoeConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_key_value_heads=2, kv_channels=16, **LOCAL,
        **COMMON,
    ),
    GptOssConfig(**SIZES, **COMMON, **GROUPED, **LOCAL, attention_dropout=0.5),
    Qwen3MoeConfig(**SIZES, **COMMON, **GROUPED, **MOE, moe_intermediate_size=16, attention_dropout=0.5),
    OlmoeConfig(**SIZES, **COMMON, **MOE, num_key_value_heads=2, attention_dropout=0.5),
    GraniteMoeConfig(**SIZES, **COMMON, **LOCAL, num_key_value_heads=2, attention_dropout=0.5),
    OPTConfig(
        hidden_size=32, ffn_dim=48, num_hidden_layers=3, num_attention_heads=4, word_embed_proj_dim=32, dropout=0.5,
        layerdrop=0.5, **COMMON,
    ),
]  # fmt: skip


def policies(config: PretrainedConfig, prepared: bool = True) -> tuple[Policy, Policy]:
    """A policy that keeps its activations, and one with the same weights that computes them again."""
    torch.manual_seed(0)
    made = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    model = prepare(made) if prepared else made
    again = copy.deepcopy(model)
    recompute_layers(again)
    return Policy(model, value="trunk"), Policy(again, value="trunk")


def count_layers(policy: Policy) -> list[bool]:
    """Grows whenever the first layer is computed, by whether gradients are on."""
    seen: list[bool] = []
    layer = next(m for m in policy.model.modules() if isinstance(m, nn.ModuleList))[0]
    next(layer.children()).register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    return seen


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_nothing_is_random_and_nothing_else_is_computed(config: PretrainedConfig) -> None:
    kept, again = policies(config, prepared=False)  # with whatever dropout there is
    layers = count_layers(again)
    with torch.no_grad():
        scored = again(batch()).logprob
    assert layers == [False]
    learned = again(batch())
    assert torch.equal(learned.logprob, scored)
    assert torch.equal(kept(batch()).logprob, scored)
    (learned.logprob.sum() + learned.entropy.sum()).backward()
    assert layers == [False, True, True]  # forward, and once more for backward
    scores = kept(batch())
    (scores.logprob.sum() + scores.entropy.sum()).backward()
    torch.testing.assert_close(gradients(again), gradients(kept), rtol=0, atol=0)
    assert any(float(gradient.abs().max()) > 0 for gradient in gradients(again).values())


def test_half_computes_every_second_layer_again() -> None:
    kept, again = policies(small_config("llama", num_hidden_layers=4))
    recompute_layers(again.model, False)  # changes nothing
    recompute_layers(again.model, "half")
    counts = [0] * 4
    for number, layer in enumerate(again.model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: counts.__setitem__(number, counts[number] + 1))
    for policy in (kept, again):
        policy(batch()).logprob.sum().backward()
    assert counts == [2, 1, 2, 1]
    torch.testing.assert_close(gradients(again), gradients(kept), rtol=0, atol=0)


def test_a_copy_computes_its_own_layers_again() -> None:
    model = sharp_model()
    recompute_layers(model)
    recompute_layers(model)  # as a second training of the same model does
    policy = Policy(copy.deepcopy(model))
    layers, others = count_layers(policy), count_layers(Policy(model))
    policy(batch()).logprob.sum().backward()
    assert (layers, others) == ([True, True], [])


@pytest.mark.parametrize("from_path", [False, True], ids=["copy", "path"])
def test_the_critic_computes_again_too_and_the_reference_never(tmp_path, from_path: bool) -> None:
    sharp_model(seed=3).save_pretrained(tmp_path)
    value = ValueSettings(kind="separate", path=str(tmp_path) if from_path else None)
    settings = ModelSettings(gradient_checkpointing=True)
    policy = build_policy(sharp_model(), settings, value, ReferenceSettings(), 1.0)
    assert policy.critic is not None
    layer = policy.critic.layers[0].mlp
    passes: list[bool] = []
    layer.register_forward_pre_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    scores = policy(batch())
    (scores.logprob.sum() + scores.value.sum()).backward()
    assert passes == [True, True]
    reference = policy.frozen_reference
    assert not any("forward" in vars(module) for module in reference.modules())
    assert not any(module.training for module in (*policy.modules(), *reference.modules()))


def test_an_encoder_that_rewards_computes_its_layers_again() -> None:
    config = BertConfig(**SIZES, vocab_size=258, num_labels=1, hidden_dropout_prob=0.5)
    torch.manual_seed(0)
    kept = BertForSequenceClassification(config)
    again = copy.deepcopy(kept)
    recompute_layers(again)
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 1]])
    pair = {"ids": ids, "learned": torch.ones(2, 4), "length": torch.tensor([4, 3])}
    pairs = Batch({f"{side}_{name}": x for side in ("chosen", "rejected") for name, x in pair.items()})
    passes: list[int] = []
    again.bert.encoder.layer[0].attention.register_forward_pre_hook(lambda *_: passes.append(1))
    one, other = RewardModel(kept, packed=False), RewardModel(again, packed=False)
    assert torch.equal(one(pairs).chosen, other(pairs).chosen)
    other(pairs).chosen.sum().backward()
    assert len(passes) == 3


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(UserError, match="Linear cannot recompute its layers"):
        recompute_layers(nn.Linear(2, 2))
