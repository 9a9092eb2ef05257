"""Estimators of KL(policy ‖ reference) from sampled tokens, and the controller of the KL coefficient."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor


def k1(logprob: Float[Tensor, "*s"], ref_logprob: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Return Δ = log π − log π_ref: unbiased, may be negative (http://joschu.net/blog/kl-approx.html)."""
    return logprob - ref_logprob


def k2(logprob: Float[Tensor, "*s"], ref_logprob: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Return ½Δ²: biased, never negative (same source)."""
    return 0.5 * (logprob - ref_logprob) ** 2


def k3(logprob: Float[Tensor, "*s"], ref_logprob: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Return e^(−Δ) − 1 + Δ: unbiased, never negative (same source)."""
    delta = logprob - ref_logprob
    # With exp() − 1, rounding errors would exceed the result for a typical Δ of 0.001 and could make it negative.
    return (-delta).expm1() + delta


def absolute(logprob: Float[Tensor, "*s"], ref_logprob: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Return |Δ|, TRL's `abs`."""
    return (logprob - ref_logprob).abs()


# "full" needs the whole distribution and is `ops.divergence.generalised_jsd` with β = 1.
ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}


def adapted_coefficient(coef: float, kl: float, target: float, horizon: float, samples: int) -> float:
    """Return the updated coefficient β·(1 + clip(KL/target − 1, ±0.2)·n/horizon) (arXiv:1909.08593, section 2.2).

    `kl` is the mean objective KL of the step (nats per response) and `samples` is n, its number of responses.
    """
    error = max(-0.2, min(0.2, kl / target - 1))
    return coef * (1 + error * samples / horizon)
