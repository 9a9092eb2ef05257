"""Estimators of the KL divergence, and the one that a run uses in its penalty."""

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.sample import Sample
from cavesson.doctor.series import Array


def estimates(log_ratio: Array) -> dict[str, Array]:
    """Return the KL estimates of each token from Δ = log π − log π_ref (http://joschu.net/blog/kl-approx.html)."""
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
    """Return [N] the KL estimates that β multiplies, by the run's estimator (default: k1); NaN if it is unknown."""
    named = NAMES.get(str(data.setting("config.kl.estimator", "kl")))
    log_ratio = sample["log_ratio"]
    return estimates(log_ratio)[named] if named else np.full(len(sample), np.nan)
