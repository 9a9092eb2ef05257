"""Quantized layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from peft.utils.integrations import dequantize_bnb_weight
from torch import Tensor, nn
from torch.nn.functional import linear

from cavesson.errors import UserError

_WEIGHTS = ("Int8Params", "Params4bit")
"""What bitsandbytes calls them; it need not be installed."""


def is_quantized(model: nn.Module) -> bool:
    """Return whether a Hugging Face model was quantized while it was loaded, or before it was saved."""
    return getattr(model, "hf_quantizer", None) is not None


def check_trainable(model: nn.Module, name: str) -> None:
    """Raise a UserError if weights of a model are quantized, so that they cannot be trained."""
    if is_quantized(model):
        raise UserError(
            f"{name} has quantized weights, which cannot be trained; add model.lora to train adapters on them, or "
            "start from weights that are not quantized"
        )


def keep_unpacked(model: nn.Module) -> None:
    """Keep 4-bit layers on CPU from packing their weights for faster kernels, in place and without gradients."""
    for layer in model.modules():
        if _is_quantized(layer):
            held: Any = layer
            held.state_dict()  # unpacks what a forward pass has packed
            held.support_avx512bf16_for_cpu = False


@contextmanager
def without_rounding(model: nn.Module) -> Iterator[None]:
    """Compute quantized layers with dequantized weights, one layer at a time, inside the block.

    In 8 bits, activations are rounded too, depending on the values next to them (arXiv:2208.07339), and 4-bit kernels
    give different results for different batch sizes. Both differences are far larger than ordinary rounding.
    """
    layers = [layer for layer in model.modules() if _is_quantized(layer)]
    for layer in layers:
        layer.forward = partial(_written_out, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def prepare_to_shard(module: nn.Module) -> None:
    """Let 4-bit layers keep what is needed to read their weights, which lose it with their type when sharded."""
    for layer in module.modules():
        if _is_quantized(layer):
            held: Any = layer
            held.quant_state = held.weight.quant_state


def _is_quantized(layer: nn.Module) -> bool:
    # Not by the attribute `weight`: adapters have one too, which refers to the layer inside them.
    weight = dict(layer.named_parameters(recurse=False)).get("weight")
    return type(weight).__name__ in _WEIGHTS or getattr(layer, "quant_state", None) is not None


def _written_out(layer: Any, x: Tensor) -> Tensor:
    bias = layer.bias
    state = getattr(layer, "quant_state", None)
    if state is None:
        weight = dequantize_bnb_weight(layer.weight, layer.state)
    else:
        weight = import_module("bitsandbytes.functional").dequantize_4bit(layer.weight.data, state)
    return linear(x, weight.to(x), None if bias is None else bias.to(x))
