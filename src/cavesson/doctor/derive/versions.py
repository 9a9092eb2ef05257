"""What a record says of the weights: which ones sampled a response, and whether they change."""

import numpy as np

from cavesson.doctor.derivation import DerivedValues, derivation, of_sample
from cavesson.doctor.recorded import RecordedData
from cavesson.doctor.sample import Sample
from cavesson.doctor.series import Array, trend

CHANGED = 0.02
"""Nats by which a log-probability must differ between two steps; the record rounds them to eleven bits."""
MIN_TOKENS = 8
"""Tokens that must recur."""


def policy_changes(data: RecordedData) -> bool:
    """Return whether there is evidence that the policy changes during training.

    It is a metric; or the same first token of the same prompt with different log-probabilities in two steps; or a trend
    in what is sampled, which does not occur while the policy stays the same.
    """
    moved = data.metric("policy/approx_kl")
    if len(moved):
        return bool(np.any(moved.value > 1e-9))
    whole = data.whole
    if _scores_change(whole.sample):
        return True
    series = [whole.sample.mean_by_step(-whole.sample["logprob"]), whole.rows.mean("reward"), whole.rows.mean("length")]
    return any(trend(points).p < whole.chance / len(series) for points in series)


def _scores_change(sample: Sample) -> bool:
    """Return whether most first tokens that recur after the same prompt do so with another log-probability."""
    before, now = recurring(sample, "logprob")
    return len(now) >= MIN_TOKENS and bool(np.mean(np.abs(now - before) > CHANGED) > 0.5)


def recurring(sample: Sample, column: str) -> Array:
    """Return [2, k] a column where a first token recurs after the same prompt in another step: before, and then."""
    if not sample.has("token_id"):
        return np.zeros((2, 0))
    values, tokens, prompts = sample[column], sample["token_id"], sample.rows.texts("prompt")
    seen: dict[tuple[str | None, float], tuple[int, float]] = {}
    found = []
    for at in np.flatnonzero((sample.position == 0) & np.isfinite(values + tokens)).tolist():
        here = int(sample.step[at]), float(values[at])
        before = seen.setdefault((prompts[sample.line[at]], float(tokens[at])), here)
        if here[0] != before[0]:
            found.append((before[1], here[1]))
    return np.array(found).reshape(-1, 2).T


@derivation(
    gives=["rows.policy_version"],
    needs=["tokens.sampler_version"],
    how="the weights that sampled the first token of the response",
)
def policy_versions(data: RecordedData) -> DerivedValues:
    sample = data.sample
    first = sample.position == 0
    version = np.full(len(sample.rows), np.nan)
    version[sample.line[first]] = sample["sampler_version"][first]
    return {"rows.policy_version": of_sample(sample.rows, version)}
