"""How far the policy moves, and how far training is from scoring, where no trainer measured it."""

import numpy as np

from cavesson.doctor.derivation import DerivedValues, derivation
from cavesson.doctor.recorded import RecordedData
from cavesson.doctor.sample import Sample
from cavesson.doctor.series import Array, Series

SMALLEST = 1e-3
"""Nats by which a policy that moves is further from a reference that does not."""
RARE = 0.01
"""Share of clipped tokens that rounding between sampler and trainer may explain."""
OWN = 2.0
"""How many times as far a policy may move on the responses that it learns from as on others."""
CLEAR = 3.0
"""Standard errors by which a KL must be above what it is compared with."""


@derivation(
    gives=["steps.policy/first_approx_kl"],
    needs=["steps.policy/approx_kl", "tokens.logprob", "tokens.ref_logprob"],
    how="the update of the first step beside the distance from the reference at the next",
)
def distance_before_training(data: RecordedData) -> DerivedValues:
    """Return the part of the first step's approximate KL that the policy's movement does not explain.

    Let π₀ score the first step's responses and π₁ those of the next. On the way from π₀ to π₁, no pass of the update
    differs more from π₀ than π₁ does, and π₁ differs from π₀ by at most its distance from the reference plus that of
    π₀ (the triangle inequality of the root mean square). What training measures beyond that is there before the first
    update. It is a lower bound: it can show a difference, but never its absence. But the two steps have different
    responses: the policy moves further on those that it learns from, and chance makes a difference, too.
    """
    sample, updates = data.sample, data.metric("policy/approx_kl")
    distance = sample.mean_by_step(sample["kl_k1"] ** 2 / 2)
    first = data.rows.steps[0]
    starts = first <= 1 and len(updates) and updates.step[0] == first
    if not starts or distance.step[:2].tolist() != [first, first + 1] or not _moved_once(data, int(first)):
        return None
    error = CLEAR * np.sqrt(2) * _error(sample, sample["kl_k1"] ** 2 / 2, int(first) + 1)
    before, after = np.sqrt(2 * (distance.value[:2] + np.array([0.0, error])))
    left = float(np.sqrt(2 * max(updates.value[0], 0.0)) - before - OWN * after)
    # Unless the next step is further from the reference, its responses may be of the initial policy as well, or the
    # reference may follow the policy.
    if after <= before + SMALLEST or left <= 0:
        return None
    return {"steps.policy/first_approx_kl": Series(updates.step[:1], np.array([left**2 / 2]))}


@derivation(
    gives=["steps.policy/clipped_kl"],
    needs=["steps.policy/clip_fraction", "info.config.num_iterations"],
    how="the clipped tokens of updates before which nothing has changed, whose ratio is off by the clip range or more",
)
def clipped_at_once(data: RecordedData) -> DerivedValues:
    """Return what the clipped tokens alone make of the approximate KL where a step of TRL is a single update.

    It is a lower bound, so nothing is returned where hardly a token is clipped.
    """
    clipped = data.metric("policy/clip_fraction")
    batches, parts = (
        data.setting(f"config.{name}") for name in ("steps_per_generation", "gradient_accumulation_steps")
    )
    is_single = data.setting("config.num_iterations") == 1 and batches is not None and batches == parts
    clip = data.setting("config.epsilon")
    if not is_single or clip is None or np.median(clipped.value) < RARE:
        return None
    return {"steps.policy/clipped_kl": Series(clipped.step, clipped.value * float(clip) ** 2 / 2)}


@derivation(
    gives=["steps.policy/estimated_kl"],
    needs=["tokens.logprob", "tokens.ref_logprob"],
    how="how much the distance from the reference grows from one step to the next",
)
def movement(data: RecordedData) -> DerivedValues:
    """Return an estimate of the KL per token between the policies of two steps that follow each other.

    For policies that are near each other, √(2·KL) is a distance (Fisher-Rao), so that the policy moves by at least the
    difference between its distances from the reference, and by more if it circles around it. Further away this is an
    approximation, which tokens that the reference considers nearly impossible make too large.
    """
    sample = data.sample
    mean, variance = sample.mean_by_step(sample["kl_k1"]), sample.variance_by_step(sample["kl_k1"])
    count = np.searchsorted(sample.rows.step, mean.step, "right") - np.searchsorted(sample.rows.step, mean.step)
    error = np.sqrt(variance.value / count)  # as if the tokens of a response were a single one
    before, after = np.sqrt(2 * np.maximum((mean.value + error, mean.value - CLEAR * error), 0.0))
    # A few tokens can make a single step seem far away, so the next one must be as far.
    grown = np.maximum(np.minimum(after[1:-1], after[2:]) - before[:-2], 0.0)
    follows = (np.diff(mean.step)[:-1] == 1) & (np.diff(mean.step)[1:] == 1)
    if not follows.any():
        return None
    return {"steps.policy/estimated_kl": Series(mean.step[1:-1][follows], grown[follows] ** 2 / 2)}


def _error(sample: Sample, values: Array, step: int) -> float:
    """Return the standard error of the mean over the tokens of a step, whose responses are drawn independently."""
    here = sample.rows.step == step
    there = sample.trained & np.isfinite(values)
    total, count = sample.total(np.where(there, values, 0.0))[here], sample.total(there.astype(float))[here]
    whole = max(float(count.sum()), 1.0)
    return float(np.sqrt(np.sum((total - total.sum() / whole * count) ** 2))) / whole


def _moved_once(data: RecordedData, first: int) -> bool:
    """Return whether the first step is of the initial policy and the next of a later one, as far as it is known."""
    version = data.rows["policy_version"]
    now, then = (version[data.rows.step == step] for step in (first, first + 1))
    return not (np.any(now > 0) or np.any(then <= 0))
