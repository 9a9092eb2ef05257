"""A built-in tiny model and tokenizer, for tests, the tiny recipe and experiments."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers import PreTrainedTokenizerFast as FastTokenizer

from cavesson.models.mapped import dtype_of

_SPECIAL = ("<|endoftext|>", "<|pad|>")


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """Build a tokenizer with one token per byte (258 in total: 256 bytes, an end and a pad token), padding left."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*_SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": _SPECIAL[0], "pad_token": _SPECIAL[1]}
    return FastTokenizer(tokenizer_object=tokenizer, padding_side="left", **special)


def tiny_model(seed: int = 0, layers: int = 2, hidden: int = 96, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Build a Llama with about 0.3 million random parameters for `tiny_tokenizer`, determined by the seed."""
    config = LlamaConfig(
        vocab_size=len(_SPECIAL) + 256,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        cast_weights(model, dtype)
        return model


def cast_weights(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast only the weights, as loading does: the frequencies of positions would be wrong in bfloat16."""
    for parameter in module.parameters():
        if dtype_of(parameter) != dtype:
            parameter.data = parameter.data.to(dtype)
