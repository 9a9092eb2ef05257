"""The advantage of a whole response, where all its tokens have the same one."""

import json

import numpy as np

from cavesson.doctor.derivation import DerivedValues, derivation, of_sample
from cavesson.doctor.recorded import RecordedData
from cavesson.doctor.rows import Rows
from cavesson.doctor.sample import Sample
from cavesson.doctor.series import Array

SAME = 1e-6
"""Largest difference of a token's advantage from the mean of its response, relative to their size."""


@derivation(
    gives=["rows.advantage"],
    needs=["tokens.advantage|rows.extra"],
    how="the advantage that all tokens of a response have, or the one that the log gives it",
)
def of_responses(data: RecordedData) -> DerivedValues:
    sample = data.sample
    values = _of_tokens(sample) if data.recorded("tokens.advantage") else _of_log(sample.rows)
    if not np.isfinite(values).any():
        return None
    return {"rows.advantage": of_sample(sample.rows, values)}


def _of_tokens(sample: Sample) -> Array:
    """Return [n] the advantage of each response; all NaN if the tokens of some have different ones."""
    values = sample["advantage"]
    mean = sample.total(values) / np.maximum(sample.length, 1)
    differs = np.abs(values - mean[sample.line]) > SAME * np.abs(mean[sample.line])
    return np.where(sample.length > 0, np.nan if np.any(differs & sample.trained) else mean, np.nan)


def _of_log(rows: Rows) -> Array:
    """Return [n] the number ``advantage`` among the other columns of the log."""
    found = [json.loads(text or "{}").get("advantage") for text in rows.texts("extra")]
    return np.array([one if isinstance(one, float | int) else np.nan for one in found], np.float64)
