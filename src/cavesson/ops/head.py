"""A language-model head: from hidden states to logits, with architecture-specific scaling and soft-capping."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from cavesson.ops.linear import linear, tf32


class Head(NamedTuple):
    """A head with the logits z = cap(scale · (hidden · weightᵀ + bias)), where cap(x) = softcap · tanh(x / softcap)."""

    weight: Tensor
    """`[V, H]`"""
    bias: Tensor | None = None
    """`[V]`; none = 0"""
    scale: float = 1.0
    """on all logits, as in Cohere; Granite divides by its inverse"""
    softcap: float | None = None
    """bound of the logits, as in Gemma 2 (arXiv:2408.00118, section 2); none = unbounded"""
    was_rounded: bool = False
    """whether the weight is kept in less than float32, so that products may use TF32"""

    def float(self) -> "Head":
        """Return the same head in float32."""
        bias = None if self.bias is None else self.bias.float()
        rounded = self.was_rounded or self.weight.dtype != torch.float32
        return self._replace(weight=self.weight.float(), bias=bias, was_rounded=rounded)

    def first(self, rows: int) -> "Head":
        """Return the same head with only this many tokens."""
        bias = None if self.bias is None else self.bias[:rows]
        return self if rows == len(self.weight) else self._replace(weight=self.weight[:rows], bias=bias)


def head_logits(hidden: Float[Tensor, "N H"], head: Head, temperature: float) -> Float[Tensor, "N V"]:
    """Return the logits divided by the temperature, without a graph: intermediate results are overwritten in place."""
    with torch.no_grad(), tf32(head.was_rounded):
        logits = linear(hidden, head.weight)
        if head.bias is not None:
            logits += head.bias
        if head.softcap is None:
            divisor = temperature / head.scale
            return logits if divisor == 1 else logits.div_(divisor)
        return logits.mul_(head.scale / head.softcap).tanh_().mul_(head.softcap / temperature)


def cap_slope(scaled_logits: Float[Tensor, "N V"], softcap: float, temperature: float) -> Float[Tensor, "N V"]:
    """Return cap'(x) = 1 − tanh²(x / softcap), computed from the capped logits z / temperature."""
    return 1 - (scaled_logits * (temperature / softcap)).square_()
