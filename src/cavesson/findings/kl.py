"""Estimates of the KL divergence from the log-ratio Δ of a token, and how they pull a policy to its reference."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cavesson.record.derived import DERIVED

ESTIMATORS: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "k1": np.positive,
    "abs": np.abs,
    "k2": lambda log_ratio: log_ratio**2 / 2,
    "k3": lambda log_ratio: DERIVED["kl_k3"].of({"logprob": log_ratio, "ref_logprob": np.zeros_like(log_ratio)}),
}
"""Estimators of the KL, each from Δ = log π − log π_ref of a token (http://joschu.net/blog/kl-approx.html)."""


@np.errstate(over="ignore")
def estimate(estimator: str, log_ratio: NDArray[Any], other: float) -> NDArray[Any]:
    """Return the KL estimate of each token; ``other`` if the estimator is none of ``ESTIMATORS``."""
    compute = ESTIMATORS.get(estimator)
    return np.full_like(log_ratio, other) if compute is None else compute(log_ratio)


def estimates(log_ratio: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Return the KL estimates of each token by all estimators."""
    return {name: estimate(name, log_ratio, np.nan) for name in ESTIMATORS}


def pull(place: str, estimator: str, log_ratio: NDArray[Any]) -> float:
    """Return how much an estimator pulls the policy to the reference where it is used, relative to the KL itself.

    Only the part of its gradient that changes sign with Δ pulls (Schulman, Approximating KL divergence;
    arXiv:2506.09477; arXiv:2512.21852).
    """
    change = (_weight(place, estimator, log_ratio) - _weight(place, estimator, -log_ratio)) / 2
    return float(np.sum(change * log_ratio) / np.sum(log_ratio**2))


def _weight(place: str, estimator: str, log_ratio: NDArray[Any]) -> NDArray[Any]:
    """Return the factor of ∇ log π; for the gradient of KL(π ‖ π_ref) the factor is Δ itself."""
    if place == "loss":
        factors = {"k1": np.ones_like(log_ratio), "k3": -np.expm1(-log_ratio)}
        return np.asarray(factors.get(estimator, log_ratio))
    # The exact KL does not depend on which token was drawn, so it does not favour any token over another.
    return estimate(estimator, log_ratio, 0.0)
