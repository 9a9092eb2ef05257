"""The same code scores and samples every architecture: what the sampler says equals what scoring says."""

import pytest
import torch
from transformers import (
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from dressage.data.prompts import padded_prompts
from dressage.errors import UserError
from dressage.models.load import prepare
from dressage.models.policy import Policy
from dressage.models.tiny import tiny_tokenizer
from dressage.sampling.sampler import Sampler
from dressage.sampling.settings import SamplingSettings

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
COMMON = {"vocab_size": 258, "eos_token_id": 0, "pad_token_id": 1, "bos_token_id": 0}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}


def model_of(config: PretrainedConfig) -> torch.nn.Module:
    torch.manual_seed(0)
    return prepare(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config))


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **COMMON),
        GPTNeoXConfig(**SIZES, **COMMON),
        LlamaConfig(**SIZES, **GROUPED, **COMMON),
        MistralConfig(**SIZES, **GROUPED, sliding_window=None, **COMMON),
        Qwen2Config(**SIZES, num_key_value_heads=2, **COMMON),
        Qwen3Config(**SIZES, **GROUPED, **COMMON),
        GemmaConfig(**SIZES, **GROUPED, **COMMON),
    ],
    ids=lambda config: config.model_type,
)
def test_sampling_and_scoring_agree(config):
    policy, tokenizer = Policy(model_of(config)), tiny_tokenizer()
    prompts = padded_prompts([[5, 6, 7, 8, 9], [10], [11, 12]], 1)
    responses = Sampler(policy, tokenizer, SamplingSettings(max_new_tokens=7), seed=0).sample(prompts, 0, range(3))
    batch = prompts.with_columns(response_ids=responses.response_ids, mask=responses.mask)
    with torch.no_grad():
        scored = policy(batch).logprob
    torch.testing.assert_close(scored, responses.sampler_logprob, atol=2e-5, rtol=0)
    # ln 258 = 5.55 is what a uniform model would say; a score of 0 everywhere would agree as well.
    assert -8 < float(scored[responses.mask > 0].mean()) < -3


def test_a_model_that_caps_its_logits_is_refused():
    config = Gemma2Config(**SIZES, **GROUPED, **COMMON, final_logit_softcapping=0.05)
    with pytest.raises(UserError, match="gemma2 changes its logits"):
        Policy(model_of(config))
