"""Probability ratios of tokens and whole responses: π over π_old, the sampler or the reference."""

from jaxtyping import Float
from torch import Tensor


def log_ratio(
    logprob: Float[Tensor, "B T"], old_logprob: Float[Tensor, "B T"], mask: Float[Tensor, "B T"]
) -> Float[Tensor, " B"]:
    """Return Σ_t log π(y_t) − log π_old(y_t) = log π(y|x) − log π_old(y|x) of whole responses; 0 for an empty one."""
    return response_sum(logprob - old_logprob, mask)


def mean_log_ratio(
    logprob: Float[Tensor, "B T"], old_logprob: Float[Tensor, "B T"], mask: Float[Tensor, "B T"]
) -> Float[Tensor, " B"]:
    """Return the log-ratio divided by the number of tokens |y|; 0 for an empty response."""
    return log_ratio(logprob, old_logprob, mask) / mask.sum(1).clamp_min(1.0)


def token_ratio(logprob: Float[Tensor, "B T"], old_logprob: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Return ρ_t = π(y_t)/π_old(y_t) (arXiv:1707.06347, section 3)."""
    return (logprob - old_logprob).exp()


def sequence_ratio(
    logprob: Float[Tensor, "B T"], old_logprob: Float[Tensor, "B T"], mask: Float[Tensor, "B T"]
) -> Float[Tensor, " B"]:
    """Return s = (π(y|x)/π_old(y|x))^(1/|y|), the geometric mean of token ratios (GSPO, arXiv:2507.18071, eq. 7)."""
    return mean_log_ratio(logprob, old_logprob, mask).exp()


def sequence_token_ratio(
    logprob: Float[Tensor, "B T"], old_logprob: Float[Tensor, "B T"], mask: Float[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Return sg[s]·π(y_t)/sg[π(y_t)] (GSPO-token, arXiv:2507.18071, eq. 14; sg stops the gradient).

    The value at every token is the ratio of its response; the gradient flows only through the token's own
    log-probability. Averaged over a response whose tokens share an advantage, the gradient is that of GSPO,
    s·Â·mean_t ∇ log π(y_t).
    """
    ratio = sequence_ratio(logprob, old_logprob, mask).detach()
    return ratio[:, None] * (logprob - logprob.detach()).exp()


def response_token_ratio(
    logprob: Float[Tensor, "B T"], old_logprob: Float[Tensor, "B T"], mask: Float[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Return sg[ρ]·(1 + |y|·(log π(y_t) − sg[log π(y_t)])), with ρ = π(y|x)/π_old(y|x) (sg stops the gradient).

    The value at every token is the ratio of its response; the gradient flows only through the token's own
    log-probability, so that tokens can have weights. Averaged over a response, the gradient is that of ρ,
    ρ·Σ_t ∇ log π(y_t).
    """
    ratio = response_ratio(logprob, old_logprob, mask).detach()[:, None]
    return ratio * (1 + mask.sum(1, keepdim=True) * (logprob - logprob.detach()))


def response_ratio(
    logprob: Float[Tensor, "B T"], old_logprob: Float[Tensor, "B T"], mask: Float[Tensor, "B T"]
) -> Float[Tensor, " B"]:
    """Return ρ = π(y|x)/π_old(y|x) of whole responses, at most e^80, which float32 can represent."""
    return log_ratio(logprob, old_logprob, mask).clamp_max(80.0).exp()


def truncated_importance(ratio: Float[Tensor, "B T"], cap: float) -> Float[Tensor, "B T"]:
    """Return min(π_old/π_sampler, cap), without gradient (Ionides 2008, doi:10.1198/106186008X320456).

    It corrects for a difference between the distribution that is sampled from and the one that is scored, whether due
    to a different inference engine, a different precision or a filter. The cap bounds the variance.
    """
    return ratio.detach().clamp_max(cap)


def masked_importance(ratio: Float[Tensor, "B T"], cap: float) -> Float[Tensor, "B T"]:
    """Return π_old/π_sampler where it is at most the cap, else 0, without gradient: TRL's modes that end in "mask".

    Tokens or responses that the policy made far likelier than their sampler are left out instead of being bounded.
    """
    return ratio.detach() * (ratio <= cap)


def response_sum(x: Float[Tensor, "B T"], mask: Float[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Return Σ_t x_t over the tokens of each response."""
    # Padding may hold anything, including NaN, and 0 · NaN is NaN. So it is replaced instead of multiplied by 0.
    return x.masked_fill(mask == 0, 0.0).sum(1)
