"""Estimates of the KL divergence from the log-ratio of a token."""

import numpy as np

from cavesson.doctor.series import Array
from cavesson.record.derived import DERIVED


def estimates(log_ratio: Array) -> dict[str, Array]:
    """Return the KL estimates of each token from Δ = log π − log π_ref (http://joschu.net/blog/kl-approx.html)."""
    with np.errstate(over="ignore"):
        return {
            "k1": log_ratio,
            "abs": np.abs(log_ratio),
            "k2": log_ratio**2 / 2,
            "k3": DERIVED["kl_k3"].of({"logprob": log_ratio, "ref_logprob": np.zeros_like(log_ratio)}),
        }
