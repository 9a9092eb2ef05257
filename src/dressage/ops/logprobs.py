"""From hidden states to log-probabilities, a few tokens at a time, so that `[B, T, V]` never exists."""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import FunctionCtx

from dressage.ops.linear import linear

# 256 rows of a 150,000-word vocabulary in float32 are 150 MB.
CHUNK = 256


def token_logprobs(
    hidden: Float[Tensor, "N H"], head: Float[Tensor, "V H"], targets: Int[Tensor, " N"], temperature: float
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Log p(target) and the entropy −Σ p·log p of p = softmax(hidden·headᵀ / temperature), in float32 (nats).

    Logits of each chunk are computed again in the backward pass: what is kept between the passes is `[N, H]`.
    """
    logprob, entropy = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden.float(), head.float(), targets, temperature
    )
    return logprob, entropy


def full_kl(
    hidden: Float[Tensor, "N H"],
    head: Float[Tensor, "V H"],
    ref_hidden: Float[Tensor, "N K"],
    ref_head: Float[Tensor, "V K"],
    temperature: float,
) -> Float[Tensor, " N"]:
    """Σ_v p·(log p − log q) at every position: the exact KL of the next-token distributions (nats)."""
    result = torch.zeros(len(hidden), device=hidden.device)
    for rows in _chunks(len(hidden)):
        p = (linear(hidden[rows].float(), head.float()) / temperature).log_softmax(-1)
        q = (linear(ref_hidden[rows].float(), ref_head.float()) / temperature).log_softmax(-1)
        result[rows] = (p.exp() * (p - q)).sum(-1)
    return result


def _chunks(n: int) -> Iterator[slice]:
    return (slice(start, min(start + CHUNK, n)) for start in range(0, n, CHUNK))


class _TokenLogprobs(torch.autograd.Function):
    """d log p_y / dz = onehot(y) − p and dH / dz_j = −p_j·(log p_j + H), with z the scaled logits."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        normaliser, logprob, entropy = (hidden.new_empty(len(hidden)) for _ in range(3))
        for rows in _chunks(len(hidden)):
            logits = linear(hidden[rows], head).div_(temperature)
            normaliser[rows] = logits.logsumexp(-1)
            logprob[rows] = logits.gather(1, targets[rows, None]).squeeze(1) - normaliser[rows]
            logits -= normaliser[rows, None]
            entropy[rows] = -(logits.exp() * logits).sum(-1)
        ctx.save_for_backward(hidden, head, targets, normaliser, entropy)
        ctx.temperature = temperature  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return logprob, entropy

    @staticmethod
    def backward(ctx: FunctionCtx, g_logprob: Tensor | None, g_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, head, targets, normaliser, entropy = ctx.saved_tensors  # type: ignore[attr-defined]
        needs_hidden, needs_head = ctx.needs_input_grad[:2]  # type: ignore[attr-defined]
        d_hidden = torch.zeros_like(hidden) if needs_hidden else None
        d_head = torch.zeros_like(head) if needs_head else None
        for rows in _chunks(len(hidden)):
            log_p = linear(hidden[rows], head).div_(ctx.temperature).sub_(normaliser[rows, None])  # type: ignore[attr-defined]
            d_logits = _logit_gradient(
                log_p,
                targets[rows],
                entropy[rows],
                None if g_logprob is None else g_logprob[rows],
                None if g_entropy is None else g_entropy[rows],
            ).div_(ctx.temperature)  # type: ignore[attr-defined]
            if d_hidden is not None:
                d_hidden[rows] = linear(d_logits, head.t())
            if d_head is not None:
                d_head += linear(d_logits.t(), hidden[rows].t())
        return d_hidden, d_head, None, None


def _logit_gradient(
    log_p: Tensor, targets: Tensor, entropy: Tensor, g_logprob: Tensor | None, g_entropy: Tensor | None
) -> Tensor:
    p = log_p.exp()
    gradient = torch.zeros_like(p)
    if g_entropy is not None:
        gradient -= g_entropy[:, None] * p * (log_p + entropy[:, None])
    if g_logprob is not None:
        gradient -= g_logprob[:, None] * p
        gradient[torch.arange(len(targets), device=targets.device), targets] += g_logprob
    return gradient
