"""What a record says of the weights: which ones sampled a response, and whether they change."""

from typing import TYPE_CHECKING

import numpy as np

from cavesson.doctor.derive.derivation import Found, derivation, of_sample
from cavesson.doctor.sample import Sample
from cavesson.doctor.series import trend

if TYPE_CHECKING:
    from cavesson.doctor.data import RunData


CHANGED = 0.02
"""Nats by which a log-probability must differ between two steps; the record rounds them to eleven bits."""
FEWEST = 8
"""Tokens that must recur."""


def policy_changes(data: "RunData") -> bool:
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
    if not sample.has("token_id"):
        return False
    first = np.flatnonzero((sample.position == 0) & np.isfinite(sample["logprob"]) & np.isfinite(sample["token_id"]))
    prompts, tokens, logprob = sample.rows.texts("prompt"), sample["token_id"], sample["logprob"]
    seen: dict[tuple[str | None, float], float] = {}
    changes = []
    for at in first.tolist():
        key = prompts[sample.line[at]], float(tokens[at])
        if key in seen:
            changes.append(abs(logprob[at] - seen[key]) > CHANGED)
        seen.setdefault(key, float(logprob[at]))
    return len(changes) >= FEWEST and bool(np.mean(changes) > 0.5)


@derivation(
    gives=["rows.policy_version"],
    needs=["tokens.sampler_version"],
    how="the weights that sampled the first token of the response",
)
def policy_versions(data: "RunData") -> Found:
    sample = data.sample
    first = sample.position == 0
    version = np.full(len(sample.rows), np.nan)
    version[sample.line[first]] = sample["sampler_version"][first]
    return {"rows.policy_version": of_sample(sample.rows, version)}
