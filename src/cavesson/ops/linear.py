"""Matrix products on CPU by whichever way is fastest: see `matmul`.

On other devices, and for other dtypes than float32 and bfloat16, PyTorch's operator is used.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from cavesson.ops.gpu import is_on_gpu
from cavesson.ops.matmul import PRODUCTS, Layout, current

_precision = RLock()
"""Held while products depend on the precision of float32 products on GPUs, which PyTorch has once for all threads."""


def linear(x: Float[Tensor, "*n i"], weight: Float[Tensor, "o i"]) -> Float[Tensor, "*n o"]:
    """Return X·Wᵀ, differentiable with respect to both."""
    if not is_chosen(x, weight):
        return functional.linear(x, weight)
    if not torch.is_grad_enabled():
        return _chosen("forward", x, weight)  # without the time that a custom function takes
    return _Linear.apply(x, weight)  # type: ignore[no-untyped-call, no-any-return]


def input_gradient(gradient: Float[Tensor, "*n o"], weight: Float[Tensor, "o i"]) -> Float[Tensor, "*n i"]:
    """Return G·W, the gradient of `linear` with respect to X, without a graph."""
    return _product("input", gradient, weight.t())


def weight_gradient(gradient: Float[Tensor, "n o"], x: Float[Tensor, "n i"]) -> Float[Tensor, "o i"]:
    """Return Gᵀ·X, the gradient of `linear` with respect to W, without a graph."""
    return _product("weight", gradient.t(), x.t())


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


def is_chosen(x: Tensor, weight: Tensor) -> bool:
    """Return whether there are several products of these factors to choose from."""
    is_alike = x.device.type == "cpu" and not is_on_gpu(x) and x.dtype == weight.dtype
    return is_alike and len(PRODUCTS.get(x.dtype, ())) > 1 and bool(x.numel()) and bool(weight.numel())


def _product(layout: Layout, x: Tensor, weight: Tensor) -> Tensor:
    return _chosen(layout, x, weight) if is_chosen(x, weight) else functional.linear(x, weight)


def _chosen(layout: Layout, x: Tensor, weight: Tensor) -> Tensor:
    return current().product(layout, x, weight)(x, weight)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _chosen("forward", x, weight)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        needs_x, needs_weight = ctx.needs_input_grad  # type: ignore[attr-defined]
        rows, columns = gradient.reshape(-1, len(weight)), x.reshape(-1, weight.shape[1])
        return (
            _chosen("input", gradient, weight.t()) if needs_x else None,
            _chosen("weight", rows.t(), columns.t()) if needs_weight else None,
        )
