"""What does not fit is refused before it is allocated."""

import pytest
import torch
from transformers import BloomConfig, GPTNeoXConfig, LlamaConfig, MistralConfig, StaticCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from cavesson.algorithms.rloo import RLOORun
from cavesson.errors import UserError
from cavesson.models.device_memory import free_memory
from cavesson.models.load import prepare
from cavesson.models.parts import position_limit
from cavesson.models.tiny import tiny_model, tiny_tokenizer
from cavesson.processes import Processes
from cavesson.rollout.engines.memory_check import BYTES_PER_TOKEN, cache_bytes, check_room
from cavesson.rollout.engines.settings import SamplingSettings
from cavesson.tools.generate import generate
from cavesson.tools.settings import GenerateSettings
from cavesson.train.build import Inputs, build

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}

UNLIMITED = {"vocab_size": 258, "hidden_size": 32, "n_layer": 2, "n_head": 4, "eos_token_id": 0}
"""Sizes of a BLOOM, which has no limit: its attention knows distances only."""


def model_of(config):
    return prepare(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config))


def test_bytes_of_keys_and_values_by_hand():
    grouped = LlamaConfig(**SIZES, vocab_size=9, num_key_value_heads=2, head_dim=8)
    # 3 layers × (keys + values) × 2 heads × 8 numbers × 4 bytes, for each of 5 × 100 tokens.
    assert cache_bytes(model_of(grouped), 5, 100) == 3 * 2 * 2 * 8 * 4 * 500
    assert cache_bytes(model_of(grouped).to(torch.bfloat16), 5, 100) == 3 * 2 * 2 * 8 * 2 * 500
    window = MistralConfig(**SIZES, vocab_size=9, num_key_value_heads=2, head_dim=8, sliding_window=16)
    assert cache_bytes(model_of(window), 5, 100) == 3 * 2 * 2 * 8 * 4 * 5 * 16


def test_bytes_of_a_preallocated_cache_are_those_predicted():
    model = model_of(GPTNeoXConfig(**SIZES, vocab_size=9))
    cache = StaticCache(config=model.config, max_cache_len=70)
    model(input_ids=torch.ones(5, 3, dtype=torch.long), past_key_values=cache)
    assert cache_bytes(model, 5, 70) == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        (None, 512),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
    ],
)
def test_positions_grow_by_the_factor_of_their_scaling(rope, limit):
    assert position_limit(LlamaConfig(max_position_embeddings=512, rope_parameters=rope)) == limit


def test_more_tokens_than_positions_are_refused():
    check_room(tiny_model(), 1, 1, 48, 2000)
    with pytest.raises(UserError) as error:
        check_room(tiny_model(), 1, 1, 49, 2000)
    assert "do not fit into the model's 2,048 positions; reduce sampling.max_new_tokens to 1,999" in str(error.value)
    assert "\n" not in str(error.value)


def test_more_than_there_is_memory_is_refused():
    model = model_of(BloomConfig(**UNLIMITED))
    free = free_memory(torch.device("cpu"))
    per_token = cache_bytes(model, 1, 1) + BYTES_PER_TOKEN
    check_room(model, 1, 1, 1, int(0.5 * free / per_token))
    with pytest.raises(UserError, match=r"reduce sampling\.max_new_tokens or the batch size") as error:
        check_room(model, 1, 1, 1, int(2 * free / per_token))
    assert "\n" not in str(error.value)


def test_a_prompt_with_a_token_that_has_no_embedding_is_refused(tmp_path):
    tokenizer = tiny_tokenizer()
    token = max(tokenizer("Hi")["input_ids"])
    model = model_of(BloomConfig(**(UNLIMITED | {"vocab_size": token})))
    said = f"a prompt has the token {token}, but the model has embeddings for {token} tokens only"
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=said):
        next(generate(str(tmp_path), GenerateSettings(prompt="Hi")))
    settings = RLOORun(run=tmp_path / "run", batch_size=4, samples_per_prompt=2)
    inputs = Inputs(model, tokenizer, ["Hi", "H"], lambda prompts, responses: [0.0] * len(responses))
    with pytest.raises(UserError, match=said):
        build(settings, inputs, Processes("cpu"))


def test_endless_responses_are_refused_before_anything_is_allocated(tmp_path):
    """The random numbers of a single one would take 8 TB."""
    model, tokenizer = model_of(BloomConfig(**UNLIMITED)), tiny_tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    endless = SamplingSettings(max_new_tokens=10**12)
    with pytest.raises(UserError, match="1,000,000,000,000 tokens at the same time needs"):
        next(generate(str(tmp_path), GenerateSettings(prompt="Hi", sampling=endless)))
    settings = RLOORun(run=tmp_path / "run", sampling=endless, batch_size=4, samples_per_prompt=2)
    inputs = Inputs(
        model=model,
        tokenizer=tokenizer,
        prompts=["Hi", "Ho"],
        rewards=lambda prompts, responses: [0.0] * len(responses),
    )
    with pytest.raises(UserError, match="1,000,000,000,000 tokens at the same time needs"):
        build(settings, inputs, Processes("cpu"))
