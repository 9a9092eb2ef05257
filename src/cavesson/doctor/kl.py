"""Estimates of the KL divergence, and which of them a run pays for."""

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.sample import Sample
from cavesson.doctor.series import Array


def estimates(log_ratio: Array) -> dict[str, Array]:
    """Returns the estimates of a token's KL from Δ = log π − log π_ref (http://joschu.net/blog/kl-approx.html)."""
    with np.errstate(over="ignore"):
        return {
            "k1": log_ratio,
            "abs": np.abs(log_ratio),
            "k2": log_ratio**2 / 2,
            "k3": np.expm1(-log_ratio) + log_ratio,
        }


NAMES = {"kl": "k1", "abs": "abs", "mse": "k2", "k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}
"""What trainers call them."""


def penalty(data: RunData, sample: Sample) -> Array:
    """Returns [N] what β multiplies, by the estimator that the run names (k1 if none); NaN where none can tell."""
    named = NAMES.get(str(data.setting("config.kl.estimator", "kl")))
    log_ratio = sample["log_ratio"]
    return estimates(log_ratio)[named] if named else np.full(len(sample), np.nan)
