"""Float32 matrix products on CPU, computed by oneDNN.

PyTorch uses MKL for float32 products on CPU, and MKL leaves the wide vector units of non-Intel processors unused: on a
2-core AMD EPYC, the same product takes 2.1 times as long as with oneDNN (`benchmarks/linear.py` prints the ratio). The
operator is the one that `torch.compile` emits. If it is missing, or the data is not float32 on CPU, PyTorch's standard
operator is used.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional

_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_precision = RLock()
"""Held while products depend on the precision of float32 products on GPUs, which PyTorch has once for all threads."""


def linear(x: Float[Tensor, "*n i"], weight: Float[Tensor, "o i"]) -> Float[Tensor, "*n o"]:
    """Return X·Wᵀ, differentiable with respect to both."""
    is_float32_on_cpu = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    if not _HAS_ONEDNN or not is_float32_on_cpu or not x.numel():
        return functional.linear(x, weight)
    return _Linear.apply(x, weight)  # type: ignore[no-untyped-call, no-any-return]


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Let float32 products on GPUs use TF32 inside the block, if it is allowed.

    TF32 rounds factors to 11 significant bits, and is several times as fast. Numbers that were bfloat16, with 8 bits,
    are not changed by it, and sums are in float32 either way.
    """
    if not allowed:
        yield
        return
    matmul = torch.backends.cuda.matmul
    with _precision:
        before = matmul.fp32_precision
        matmul.fp32_precision = "tf32"
        try:
            yield
        finally:
            matmul.fp32_precision = before


@contextmanager
def without_tf32() -> Iterator[None]:
    """Keep `tf32` in other threads from affecting the products inside the block.

    A thread waits for the other one only until its products are launched, not until they are computed.
    """
    with _precision:
        yield


def _product(x: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        needs_x, needs_weight = ctx.needs_input_grad  # type: ignore[attr-defined]
        rows, columns = gradient.reshape(-1, len(weight)), x.reshape(-1, weight.shape[1])
        return (
            _product(gradient, weight.t()) if needs_x else None,
            _product(rows.t(), columns.t()) if needs_weight else None,
        )
