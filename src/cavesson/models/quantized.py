"""Quantized layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from peft.utils.integrations import dequantize_bnb_weight
from torch import Tensor, nn
from torch.nn.functional import linear

_WEIGHTS = ("Int8Params", "Params4bit")
"""What bitsandbytes calls them; it need not be installed."""


@contextmanager
def without_rounding(model: nn.Module) -> Iterator[None]:
    """Compute quantized layers with dequantized weights, one layer at a time, inside the block.

    In 8 bits, activations are rounded too, depending on the values next to them (arXiv:2208.07339), and 4-bit kernels
    give different results for different batch sizes. Both differences are far larger than ordinary rounding.
    """
    layers = [layer for layer in model.modules() if _is_quantized(layer)]
    for layer in layers:
        layer.state_dict()  # unpacks weights that a forward pass on CPU packed for its kernels
        layer.forward = partial(_written_out, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _is_quantized(layer: nn.Module) -> bool:
    # Not by the attribute `weight`: adapters have one too, which refers to the layer inside them.
    return type(dict(layer.named_parameters(recurse=False)).get("weight")).__name__ in _WEIGHTS


def _written_out(layer: Any, x: Tensor) -> Tensor:
    bias = layer.bias
    weight = dequantize_bnb_weight(layer.weight, getattr(layer, "state", None)).to(x)
    return linear(x, weight, None if bias is None else bias.to(x))
