"""Log-probabilities for a GPU: large pieces of tokens, each with one product and a few fused kernels.

With a bfloat16 head, products of bfloat16 numbers are summed up in float32 and stay in float32, so that
log-probabilities are those of a float32 head with these weights. Only the gradient of the logits is rounded to
bfloat16, for the products of the backward pass; the gradient of the weight is summed up in float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cavesson.ops.chunks import chunks
from cavesson.ops.gpu import is_on_gpu
from cavesson.ops.head import Head

PIECE = 2048
"""Tokens at a time: 1.2 GB of logits in float32 with a vocabulary of 150,000."""


class Kernels(NamedTuple):
    """What is computed of a piece; the functions of this module, or others that compute the same."""

    product: Callable[[Tensor, Tensor], Tensor]
    scores: Callable[..., tuple[Tensor, Tensor, Tensor]]
    gradient: Callable[..., Tensor]


def piece_logprobs(
    hidden: Float[Tensor, "N H"],
    head: Head,
    targets: Int[Tensor, " N"],
    temperature: float,
    kernels: Kernels,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Return what `token_logprobs` does, in float32; the backward pass computes the logits again.

    The head may have another dtype than the states, which are then converted to it. `kernels` are `PLAIN`, or the same
    functions compiled.
    """
    logprob, entropy = _PieceLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden.to(head.weight.dtype), head.weight, head.bias, head, targets, temperature, kernels
    )
    return logprob, entropy


class _PieceLogprobs(torch.autograd.Function):
    """The operation behind `piece_logprobs`; its gradients are those of `token_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        targets: Tensor,
        temperature: float,
        kernels: Kernels,
    ) -> tuple[Tensor, Tensor]:
        total, logprob, entropy = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        for rows in chunks(len(hidden), PIECE):
            products = kernels.product(hidden[rows], weight.t())
            found = kernels.scores(products, bias, targets[rows], head.scale, head.softcap, temperature)
            total[rows], logprob[rows], entropy[rows] = found
        ctx.save_for_backward(hidden, weight, bias, targets, total, entropy)
        ctx.head, ctx.temperature, ctx.kernels = head[2:], temperature, kernels
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, g_logprob: Tensor, g_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, total, entropy = ctx.saved_tensors
        scale, softcap, _ = ctx.head
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        for rows in chunks(len(hidden), PIECE):
            products = ctx.kernels.product(hidden[rows], weight.t())
            known = (targets[rows], total[rows], entropy[rows], g_logprob[rows], g_entropy[rows])
            gradient = ctx.kernels.gradient(products, bias, *known, weight.dtype, scale, softcap, ctx.temperature)
            if d_hidden is not None:
                d_hidden[rows] = gradient @ weight
            if d_weight is not None:
                d_weight += ctx.kernels.product(gradient.t(), hidden[rows])
            if d_bias is not None:
                d_bias += gradient.sum(0, dtype=torch.float32)
        return d_hidden, d_weight, d_bias, None, None, None, None


def _product(x: Tensor, y: Tensor) -> Tensor:
    """Return X·Y in float32, with sums in float32."""
    if x.dtype == torch.float32:
        return x @ y
    if is_on_gpu(x):
        return torch.mm(x, y, out_dtype=torch.float32)
    return x.float() @ y.float()


def _logits(products: Tensor, bias: Tensor | None, scale: float, softcap: float | None, temperature: float) -> Tensor:
    """Return the logits divided by the temperature, see `Head`."""
    logits = products if bias is None else products + bias.float()
    if softcap is None:
        return logits * (scale / temperature)
    return (logits * (scale / softcap)).tanh() * (softcap / temperature)


def _scores(
    products: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scale: float,
    softcap: float | None,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Σ exp, log p(target) and the entropy of each row, `[n]`."""
    logits = _logits(products, bias, scale, softcap, temperature)
    peak = logits.amax(-1, keepdim=True)
    relative = logits - peak
    weights = relative.exp()
    sums = weights.sum(-1)
    log_sums = sums.log()
    total = peak.squeeze(1) + log_sums
    logprob = logits.gather(1, targets[:, None]).squeeze(1) - total
    return total, logprob, log_sums - (weights * relative).sum(-1) / sums


def _gradient(
    products: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    total: Tensor,
    entropy: Tensor,
    g_logprob: Tensor,
    g_entropy: Tensor,
    dtype: torch.dtype,
    scale: float,
    softcap: float | None,
    temperature: float,
) -> Tensor:
    """Return the gradient of the products, `[n, V]` in this dtype: of log p_y and of H, see `token_logprobs`."""
    logits = _logits(products, bias, scale, softcap, temperature)
    log_p = logits - total[:, None]
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    gradient = is_target * g_logprob[:, None]
    gradient = gradient - log_p.exp() * (g_logprob[:, None] + g_entropy[:, None] * (log_p + entropy[:, None]))
    slope = 1.0 if softcap is None else 1 - (logits * (temperature / softcap)).square()
    return (gradient * (slope * (scale / temperature))).to(dtype)


PLAIN = Kernels(_product, _scores, _gradient)


def compiled(compile: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Kernels:
    """Return the kernels of this module, compiled but for the product, which is a library's."""
    return Kernels(_product, compile(_scores), compile(_gradient))
