"""From hidden states to log-probabilities, a few tokens at a time, so that `[B, T, V]` is never materialised."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cavesson.ops.chunks import chunks
from cavesson.ops.head import Head, cap_slope, head_logits
from cavesson.ops.linear import input_gradient, tf32, weight_gradient

LogProbs = Callable[[Tensor, Head, Tensor, float], tuple[Tensor, Tensor]]
"""`token_logprobs`, or another function that computes the same."""


def token_logprobs(
    hidden: Float[Tensor, "N H"], head: Head, targets: Int[Tensor, " N"], temperature: float
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Return log p(target) and the entropy −Σ p·log p of p = softmax(logits / temperature), in float32 (nats).

    Of the logits, only those of the first chunk are kept for the backward pass, which recomputes the others.
    """
    head = head.float()
    logprob, entropy = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden.float(), head.weight, head.bias, head[2:], targets, temperature, torch.is_grad_enabled()
    )
    return logprob, entropy


class _TokenLogprobs(torch.autograd.Function):
    """The operation behind `token_logprobs`.

    d log p_y / dz = onehot(y) − p and dH / dz_j = −p_j·(log p_j + H), with z the logits divided by the temperature.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rest: tuple[Any, ...],
        targets: Tensor,
        temperature: float,
        has_graph: bool,
    ) -> tuple[Tensor, Tensor]:
        head = Head(weight, bias, *rest)
        peak, log_total, logprob, entropy = (hidden.new_empty(len(hidden)) for _ in range(4))
        ctx.first = None
        for rows in chunks(len(hidden)):
            logits = head_logits(hidden[rows], head, temperature)
            peak[rows], log_total[rows], entropy[rows] = _relative_to_peak(logits)
            logprob[rows] = logits.gather(1, targets[rows, None]).squeeze(1) - log_total[rows]
            if has_graph and rows.start == 0:
                ctx.first = logits.sub_(log_total[rows, None])
        ctx.save_for_backward(hidden, weight, bias, targets, peak, log_total, entropy)
        ctx.rest, ctx.temperature = rest, temperature
        ctx.set_materialize_grads(False)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, g_logprob: Tensor | None, g_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, peak, log_total, entropy = ctx.saved_tensors
        head = Head(weight, bias, *ctx.rest)
        needed = zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        d_hidden, d_weight, d_bias = (torch.zeros_like(x) if needs else None for x, needs in needed)
        log_p, ctx.first = ctx.first, None  # it is overwritten, and there may be another backward pass
        for rows in chunks(len(hidden)):
            if log_p is None:
                log_p = (
                    head_logits(hidden[rows], head, ctx.temperature).sub_(peak[rows, None]).sub_(log_total[rows, None])
                )
            slope = None
            if head.softcap is not None:
                logits = log_p + (peak + log_total)[rows, None]
                slope = cap_slope(logits, head.softcap, ctx.temperature)
            outputs = (None if g is None else g[rows] for g in (g_logprob, g_entropy))
            gradient = _logit_gradient(log_p, targets[rows], entropy[rows], *outputs)
            gradient.div_(ctx.temperature / head.scale)
            if slope is not None:
                gradient *= slope
            with tf32(head.was_rounded):
                if d_hidden is not None:
                    d_hidden[rows] = input_gradient(gradient, weight)
                if d_weight is not None:
                    d_weight += weight_gradient(gradient, hidden[rows])
            if d_bias is not None:
                d_bias += gradient.sum(0)
            log_p = None
        return d_hidden, d_weight, d_bias, None, None, None, None


def _relative_to_peak(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Subtract each row's largest logit, in place; return it, log Σ exp of the differences, and the entropy, `[N]`."""
    peak = logits.amax(-1)
    relative = logits.sub_(peak[:, None]).exp()
    total = relative.sum(-1)
    log_total = total.log()
    return peak, log_total, log_total - relative.mul_(logits).sum(-1) / total


def _logit_gradient(
    log_p: Tensor, targets: Tensor, entropy: Tensor, g_logprob: Tensor | None, g_entropy: Tensor | None
) -> Tensor:
    """Return the gradient with respect to the logits; it overwrites `log_p`, to save memory."""
    if g_entropy is None:
        assert g_logprob is not None
        gradient = log_p.exp_().mul_(-g_logprob[:, None])
    else:
        p = log_p.exp()
        gradient = log_p.add_(entropy[:, None]).mul_(p * -g_entropy[:, None])
        if g_logprob is not None:
            gradient -= p.mul_(g_logprob[:, None])
    if g_logprob is not None:
        gradient[torch.arange(len(targets), device=targets.device), targets] += g_logprob
    return gradient
