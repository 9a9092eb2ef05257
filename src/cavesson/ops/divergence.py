"""Divergences of whole next-token distributions, a few tokens at a time, so that `[N, V]` is never materialised."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cavesson.ops.chunks import chunks
from cavesson.ops.head import Head, cap_slope, head_logits
from cavesson.ops.linear import input_gradient, tf32, weight_gradient


def generalised_jsd(
    hidden: Float[Tensor, "N H"],
    head: Head,
    teacher_hidden: Float[Tensor, "N K"],
    teacher_head: Head,
    beta: float,
    temperature: float,
) -> Float[Tensor, " N"]:
    """Return the generalised Jensen-Shannon divergence of a policy p from a teacher q at every position (nats).

    β·KL(q ‖ m) + (1 − β)·KL(p ‖ m) with m = β·q + (1 − β)·p (arXiv:2306.13649, eq. 1). β = 0 stands for the forward KL,
    KL(q ‖ p), and β = 1 for the reverse KL, KL(p ‖ q), as in TRL. It is differentiable with respect to the policy's
    states and head; the backward pass computes the logits again.

    A model may have more rows in its head than there are tokens. Where the heads differ, both distributions are those
    over the rows that both have.
    """
    rows = min(len(head.weight), len(teacher_head.weight))
    head, teacher_head = (one.first(rows).float() for one in (head, teacher_head))
    found: Tensor = _GeneralisedJSD.apply(  # type: ignore[no-untyped-call]
        hidden.float(), head.weight, head.bias, head[2:], teacher_hidden.float(), teacher_head, beta, temperature
    )
    return found


class _GeneralisedJSD(torch.autograd.Function):
    """The operation behind `generalised_jsd`.

    With z the policy's logits divided by the temperature, ∂D/∂z = p·(g − Σ p·g). Up to a constant, g = ∂D/∂p is
    log p − log q for β = 1, and (1 − β)·(log p − log m) for 0 < β < 1. For β = 0, ∂D/∂z = p − q.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rest: tuple[Any, ...],
        teacher_hidden: Tensor,
        teacher_head: Head,
        beta: float,
        temperature: float,
    ) -> Tensor:
        found = hidden.new_empty(len(hidden))
        for rows in chunks(len(hidden)):
            log_p = head_logits(hidden[rows], Head(weight, bias, *rest), temperature).log_softmax(-1)
            log_q = head_logits(teacher_hidden[rows], teacher_head, temperature).log_softmax(-1)
            found[rows] = _divergence(log_p, log_q, beta)
        ctx.save_for_backward(hidden, weight, bias, teacher_hidden)
        ctx.rest, ctx.teacher_head, ctx.beta, ctx.temperature = rest, teacher_head, beta, temperature
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, teacher_hidden = ctx.saved_tensors
        head = Head(weight, bias, *ctx.rest)
        needed = zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        d_hidden, d_weight, d_bias = (torch.zeros_like(x) if needs else None for x, needs in needed)
        for rows in chunks(len(hidden)):
            logits = head_logits(hidden[rows], head, ctx.temperature)
            log_q = head_logits(teacher_hidden[rows], ctx.teacher_head, ctx.temperature).log_softmax(-1)
            d_logits = _logit_gradient(logits.log_softmax(-1), log_q, ctx.beta) * gradient[rows, None]
            d_logits.div_(ctx.temperature / head.scale)
            if head.softcap is not None:
                d_logits *= cap_slope(logits, head.softcap, ctx.temperature)
            with tf32(head.was_rounded):
                if d_hidden is not None:
                    d_hidden[rows] = input_gradient(d_logits, weight)
                if d_weight is not None:
                    d_weight += weight_gradient(d_logits, hidden[rows])
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        return d_hidden, d_weight, d_bias, None, None, None, None, None


def _divergence(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Return the divergence of each row, given the log-probabilities `[n, V]` of policy and teacher."""
    if beta == 0:
        return _kl(log_q, log_p)
    if beta == 1:
        return _kl(log_p, log_q)
    log_m = _mixture(log_p, log_q, beta)
    return beta * _kl(log_q, log_m) + (1 - beta) * _kl(log_p, log_m)


def _logit_gradient(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Return the gradient of each row's divergence with respect to the policy's logits, `[n, V]`."""
    p = log_p.exp()
    if beta == 0:
        return p - log_q.exp()
    slope = log_p - log_q if beta == 1 else (1 - beta) * (log_p - _mixture(log_p, log_q, beta))
    return p * (slope - (p * slope).sum(-1, keepdim=True))


def _mixture(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)
