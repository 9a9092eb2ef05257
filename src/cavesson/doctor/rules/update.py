"""Rules on the update: ratios, clipping, gradients and advantages."""

from dataclasses import replace

import numpy as np

from cavesson.doctor.absent import advantages_as_they_are, no_ratio
from cavesson.doctor.data import RunData
from cavesson.doctor.derive.critic import whitened_alone
from cavesson.doctor.proposal import calmer, for_clipping, for_ratio, for_step
from cavesson.doctor.reading import Curve, Reading, Words
from cavesson.doctor.readings import HIGH, MIN_SHARE, MIN_SPIKES, exceeding, exceeds, pays, spikes
from cavesson.doctor.rows import Rows
from cavesson.doctor.rule import rule
from cavesson.doctor.rules.consequences import RUNAWAY
from cavesson.doctor.sample import Sample
from cavesson.doctor.series import Array, Series, earliest, since, smoothed, trend
from cavesson.findings.words import Phrase, Share

UNCLEAR, AGREE = 0.05, 0.9
"""Relative size below which the sign of a number is rounding, and share of the tokens or responses that must agree."""
MIN_PAIRS, SAME = 20, 0.9999
"""Numbers, and their correlation, from which two columns are the same but for scale and offset."""
PADDED = 0.02
"""Padding beside the trained tokens, and distance of a standard deviation from 1, that whitening over it leaves."""
OPPOSITE = Phrase(": the sizes agree, but the sign is the opposite, so that what turns out better becomes less likely")
RETURNS = Phrase(": it is the return itself, and the value is not subtracted")
IN_ANOTHER_ORDER = Phrase(": the advantages stand in another order than the responses")


@rule(
    number=32,
    needs=["steps.policy/ratio"],
    severity="error",
    title="The probability ratio blows up",
    cause="The mean ratio π/π_old reaches {seen}{skipped}: single updates move the policy so far that clipping cannot "
    "hold it.",
    healthy="mean ratio of a mini-batch: near 1, outside {low} to {high} at most once, or in less than {often} of the "
    "steps; TRL skips a batch above {limit}",
    fix="lower optimizer.learning_rate or update.epochs; check that the old log-probabilities are those of this policy",
    settings={"optimizer.learning_rate": calmer(for_ratio)},
    source="TRL 0.7.10; TRL issues 488, 1347, 1857",
    explains=["kl-explosion", "update-kl-large", *RUNAWAY],
    absent=no_ratio,
)
def ratio_blow_up(
    data: RunData, *, low: float = 0.3, high: float = 2.0, limit: float = 10.0, often: float = Share(0.02)
) -> Reading | None:
    ratio, skipped = data.metric("policy/ratio"), data.metric("optim/skipped")
    bad_ratio = ratio.step[(ratio.value > high) | (ratio.value < low)]
    bad = np.union1d(bad_ratio, skipped.step[skipped.value > 0])
    largest = float(ratio.value.max())
    unhealthy = len(bad) >= max(2, often * len(ratio.after(earliest(bad)))) or largest > limit
    words = {"skipped": Phrase(", and mini-batches are skipped" if np.any(skipped.value > 0) else "")}
    return Reading(largest, unhealthy, earliest(bad), data.step_evidence(bad), words, Curve(ratio, low, high))


@rule(
    number=33,
    needs=["steps.policy/clip_fraction"],
    min_steps=5,
    traits=["clipped"],
    title="Too many tokens are clipped",
    cause="{seen} of the tokens are outside the clip range: each update goes further than allowed, and clipped tokens "
    "have no gradient.",
    healthy="clip fraction over several steps: below {limit}; with ratios of whole responses (GSPO), which clip far "
    "more by design, below {sequences}",
    fix="lower optimizer.learning_rate or update.epochs",
    settings={"optimizer.learning_rate": calmer(for_clipping)},
    source="TRL 0.7.10, logging; rlprobe; DAPO 2503.14476; GSPO 2507.18071",
    explains=["kl-explosion", *RUNAWAY],
)
def clip_fraction_high(data: RunData, *, limit: float = Share(0.25), sequences: float = Share(0.9)) -> Reading | None:
    points = data.metric("policy/clip_fraction")
    if len(points) and not 0 <= points.value.min() <= points.value.max() <= 1:
        return None  # another definition of the clip fraction, such as per cent
    high = sequences if data.traits.get("ratio") == "sequence" else limit
    first = since(smoothed(points), smoothed(points).value > high, 5)
    return exceeding(data, points, first, high)


@rule(
    number=34,
    needs=["steps.policy/approx_kl|steps.policy/estimated_kl"],
    min_steps=3,
    title="One step moves the policy too far",
    cause="Within a step, the policy moves {seen} nats per token away from the one that sampled{estimated}.",
    healthy="policy/approx_kl per token: around 0.01 to 0.05; above {limit} the samples are no longer of this policy. "
    "If it was not recorded, it is estimated from the KL to the reference, as ½·(growth of √(2·KL))² from a step to "
    "the next two: never above {limit}",
    fix="lower optimizer.learning_rate or update.epochs; update.target_policy_kl ends a step early",
    settings={"optimizer.learning_rate": calmer(for_step)},
    source="TRL 0.7.10 (target_kl); Nuts and bolts of deep RL (Schulman); The N implementation details",
    explains=["clip-fraction-high", "kl-explosion", "ratio-blow-up", *RUNAWAY],
    absent=no_ratio,
)
def update_kl_large(data: RunData, *, limit: float = 0.2) -> Reading | None:
    points, leaps = data.metric("policy/approx_kl"), data.metric("policy/estimated_kl")
    first = since(points, points.value > limit, 3)
    leap = since(leaps, leaps.value > limit, 1)
    if len(points) and (first is not None or leap is None):
        return replace(exceeding(data, points, first, limit), words={"estimated": ""})
    found = exceeding(data, leaps, leap, limit, np.max)
    between = None if leap is None else (leap, leap)  # not a curve
    return replace(found, words={"estimated": Phrase(", estimated from the KL to the reference")}, between=between)


@rule(
    number=35,
    needs=["steps.optim/grad_norm"],
    min_steps=10,
    title="The gradient spikes repeatedly",
    cause="The gradient norm repeatedly reaches up to {seen} times its median of the steps before.",
    healthy="gradient norm / running median: above {limit} in fewer than {steps} steps, or in less than {often} of "
    "the steps; norms up to {norm} do not count",
    fix="inspect the batch of that step; a lower optimizer.learning_rate or update.max_grad_norm",
    settings={"optimizer.learning_rate": calmer()},
    source="RAGEN 2504.20073; rlprobe; rldoctor",
    explains=["value-loss-spike"],
)
def gradient_spike(
    data: RunData, *, limit: float = HIGH, steps: int = MIN_SPIKES, often: float = MIN_SHARE, norm: float = 3.0
) -> Reading | None:
    return spikes(data, "optim/grad_norm", limit, steps, often, norm)


@rule(
    number=36,
    needs=["steps.optim/grad_norm|tokens.advantage"],
    min_steps=5,
    title="Many steps learn nothing",
    cause="In {seen} of the steps the gradient or every advantage is 0.",
    healthy="share of steps without a gradient: below {limit}",
    fix="rewards that differ between the responses to a prompt; check optim/learning_rate and the mask",
    source="mlx-lm-lora issue 55; MemGen pull request 33; rldoctor",
    explains=["kl-flat"],
    windows=True,
)
def zero_gradient(data: RunData, *, limit: float = Share(0.2)) -> Reading | None:
    points = data.metric("optim/grad_norm")
    empty = Series(points.step, (points.value < 1e-9).astype(float))
    sample = data.sample if data.has("tokens.advantage") else None
    if sample is not None:
        largest = sample.rows.by_step(sample.total(np.abs(sample["advantage"])), np.max)
        none = Series(largest.step, (largest.value < 1e-7).astype(float))
        empty = none if not len(empty) or none.value.mean() > empty.value.mean() else empty
    if not len(empty):
        return None
    share = Share(empty.value.mean())
    bad = empty.step[empty.value > 0]
    unhealthy = exceeds(data, len(bad), len(empty), limit)
    return Reading(share, unhealthy, earliest(bad), data.step_evidence(bad), curve=Curve(empty, high=limit))


@rule(
    number=37,
    needs=["tokens.advantage", "info.config.ppo.whiten_advantages"],
    min_steps=3,
    severity="error",
    title="Advantages are not whitened as configured",
    cause="Whitened advantages have mean 0 and standard deviation 1 over the trained tokens of all responses; here the "
    "mean is {mean} and the standard deviation {seen}{how}.",
    healthy="standard deviation of whitened advantages over the trained tokens: {low} to {high}, |mean| below "
    "{offset}; not so within each response, and not with the padding instead",
    fix="whiten over the masks of all responses together, and over nothing else",
    source="The N implementation details of RLHF with PPO; rlprobe",
    explains=["update-kl-large", "clip-fraction-high"],
    traits=["critic"],
    windows=True,
    absent=advantages_as_they_are,
)
def advantage_scale(data: RunData, *, low: float = 0.5, high: float = 2.0, offset: float = 0.1) -> Reading | None:
    if not data.setting("config.ppo.whiten_advantages", False):
        return None
    sample = data.sample
    # Whitening uses whole steps, and the sample may have only some of their rollouts.
    steps = _whole_steps(sample.rows, data.rows)
    advantage = np.where(np.isin(sample.step, steps), sample["advantage"], np.nan)
    means, variances = sample.mean_by_step(advantage), sample.variance_by_step(advantage)
    if not len(means):
        return None
    mean, sd = means.value, np.sqrt(variances.value)
    flat = sd < 1e-3  # in a step without variation, the scale is undefined
    each = whitened_alone(sample, advantage)
    alone = np.isin(means.step, each.step[each.value > AGREE])
    padded = np.isin(means.step, _with_padding(sample, advantage, steps))
    bad = ((np.abs(mean) > offset) | (sd > high) | (sd < low) | alone | padded) & ~flat
    # Missing whitening affects most steps; a problem in only a few steps has another cause.
    first = since(means, bad, 3) if exceeds(data, int(bad.sum()), len(bad), 0.5) else None
    how = Phrase(": tokens that are not learned were included, or the whitening is missing")
    if np.mean(alone) > 0.5:
        how = Phrase(", also within each response alone: no response counts for more than another")
    if np.mean(padded) > 0.5:
        how = Phrase(": they are 0 and 1 with the padding, whose advantages are 0 before whitening")
    words: Words = {"mean": float(np.median(mean)), "how": how}
    curve = Curve(Series(means.step, sd), low, high)
    if np.median(np.abs(mean)) > offset:
        curve = Curve(means, -offset, offset, Phrase("mean of the advantages"))
    return Reading(float(np.median(sd)), first is not None, first, data.step_evidence([first]), words, curve)


def _with_padding(sample: Sample, advantage: Array, steps: Array) -> Array:
    """Return the steps whose advantages have mean 0 and deviation 1 only if padding counts.

    With A = return − value and Â = a·A + b, padding, where A is 0, gets b. Its number n follows from the mean, ΣÂ + n·b
    = 0, and the variance, ΣÂ² + n·b² = N + n, is then an identity that only whitening over n padding tokens meets.
    """
    if not (sample.has("return") and sample.has("value")):
        return np.zeros(0, np.int64)
    gap, found = sample["return"] - sample["value"], []
    for step in steps:
        here = np.flatnonzero(sample.trained & (sample.step == step) & np.isfinite(advantage + gap))
        if not _are_alike(advantage[here], gap[here]):
            continue
        offset = float(np.polyfit(gap[here], advantage[here], 1)[1])
        padding = -float(advantage[here].sum()) / offset if offset else 0.0
        variance = (np.sum(advantage[here] ** 2) + padding * offset**2) / (len(here) + padding)
        if padding > PADDED * len(here) and abs(variance - 1) < PADDED and abs(advantage[here].std() - 1) > PADDED:
            found.append(step)
    return np.array(found, np.int64)


def _whole_steps(some: Rows, rows: Rows) -> Array:
    """Return the steps of which ``some`` has all rollouts."""
    steps, count = np.unique(some.step, return_counts=True)
    everything, all_of = np.unique(rows.step, return_counts=True)
    return np.asarray(steps[count == all_of[np.searchsorted(everything, steps)]])


@rule(
    number=74,
    needs=["tokens.advantage", "tokens.return", "tokens.value"],
    min_steps=3,
    severity="error",
    title="Advantages are not the returns minus the values",
    cause="An advantage is the return minus the value, less a mean and divided by a standard deviation if it is "
    "whitened. For {seen} of the trained tokens it is not{how}.",
    healthy="share of the trained tokens whose advantage has the opposite sign of return minus value, is the return "
    "itself, or stands in another order than the responses: 0, at most {limit}",
    fix="check the sign and the order of the advantages, and of the loss that they enter, on two tokens by hand",
    source="PPO 1707.06347, section 5; OpenAI's flipped sign (Fine-tuning GPT-2 from human preferences)",
    explains=["kl-explosion", "update-kl-large", "clip-fraction-high", *RUNAWAY],
    traits=["critic"],
    windows=True,
)
def advantage_sign(data: RunData, *, limit: float = Share(0.01)) -> Reading | None:
    sample = data.sample
    steps = _whole_steps(sample.rows, data.rows)
    opposite = _opposite(sample, steps)
    points, how = sample.mean_by_step(opposite), OPPOSITE
    if len(points) < 3:
        something_else = _something_else(sample, steps)
        if something_else is None:
            return None  # advantages contain something else
        points, how = something_else
        opposite = np.where(np.isin(sample.step, points.step[points.value > 0]) & sample.trained, 1.0, np.nan)
    wrong = np.flatnonzero(opposite == 1)
    judged = max(1, int(np.isfinite(opposite).sum()))
    first = since(points, points.value > limit, 3)
    unhealthy = first is not None and exceeds(data, len(wrong), judged, limit)
    words: Words = {"how": how}
    return Reading(Share(len(wrong) / judged), unhealthy, first, sample.spans(wrong), words, Curve(points, high=limit))


def _something_else(sample: Sample, steps: Array) -> tuple[Series, Phrase] | None:
    """Return by step whether the advantages are the returns, or those of other responses, and which of both.

    The order is seen on the first tokens, of which every response has one. None if most steps show neither.
    """
    gap, first = sample["return"] - sample["value"], sample.position == 0
    known = sample.trained & np.isfinite(sample["advantage"] + gap)
    found = []
    for step in steps:
        here = np.flatnonzero(known & (sample.step == step))
        begins = np.flatnonzero(known & first & (sample.step == step))
        advantage, wanted = sample["advantage"][begins], gap[begins]
        are_returns = _are_alike(sample["advantage"][here], sample["return"][here])
        in_order, in_any_order = (_are_alike(*two) for two in ((advantage, wanted), map(np.sort, (advantage, wanted))))
        found.append((are_returns and not _are_alike(sample["advantage"][here], gap[here]),
                      in_any_order and not in_order))  # fmt: skip
    returns, order = np.array(found, float).reshape(-1, 2).T
    for which, how in ((returns, RETURNS), (order, IN_ANOTHER_ORDER)):
        if len(which) >= 3 and np.mean(which) > AGREE:
            return Series(steps, which), how
    return None


def _are_alike(one: Array, other: Array) -> bool:
    """Return whether two columns are the same but for a positive scale and an offset, exactly."""
    if len(one) < MIN_PAIRS or one.std() < 1e-6 or other.std() < 1e-6:
        return False
    return float(np.corrcoef(one, other)[0, 1]) > SAME


def _opposite(sample: Sample, steps: Array) -> Array:
    """Return [N] 1 for advantages with the wrong sign and 0 for others, in steps where their sizes are as expected.

    Elsewhere, and where the sign may be rounding, the result is NaN.
    """
    found, gap = np.full(len(sample), np.nan), sample["return"] - sample["value"]
    known = sample.trained & np.isfinite(sample["advantage"] + gap)
    for start, stop in zip(*(np.searchsorted(sample.step, steps + add) for add in (0, 1)), strict=True):
        here = start + np.flatnonzero(known[start:stop])
        if not len(here):
            continue
        for expected in (gap[here], gap[here] - gap[here].mean()):  # as it is, and whitened
            clear = np.abs(expected) > UNCLEAR * np.std(expected)
            ratio = sample["advantage"][here[clear]] / expected[clear]
            size = np.median(np.abs(ratio))
            if np.mean(np.abs(np.abs(ratio) / size - 1) < UNCLEAR) > AGREE:
                found[here[clear]] = ratio < 0
    return found


@rule(
    number=38,
    needs=["steps.step|rows.reward"],
    severity="error",
    title="Values are NaN or infinite",
    cause="{column} is NaN or infinite from step {step} on ({seen} values over all columns).",
    healthy="values that are NaN or infinite: 0",
    fix="check the step before: a division by a count of 0, the logarithm of 0, an overflow in float16",
    source="every trainer",
    explains=["ratio-blow-up", "value-loss-spike", "gradient-spike", "zero-gradient", "reward-falls", "kl-explosion",
              "entropy-collapse", "entropy-explosion", "length-collapse", "garbled"],
)  # fmt: skip
def not_finite(data: RunData) -> Reading | None:
    found = [*data.not_finite_metrics(), *data.not_finite_columns()]
    total = sum(count for _, _, count in found)
    if not found:
        return Reading(0.0, False)
    step, column, _ = min(found)
    return Reading(float(total), True, step, data.step_evidence([step]), {"column": column, "step": step})


@rule(
    number=39,
    needs=["tokens.advantage", "tokens.logprob"],
    min_steps=20,
    title="Good responses become less likely",
    cause="The log-probability of tokens with a positive advantage falls by {seen} nats over the run: lowering bad "
    "responses also lowers good ones.",
    healthy="fall of the mean log-probability of tokens with a positive advantage, in nats: below {limit}; any amount "
    "while the reward stays near its maximum",
    fix="give negative advantages less weight, or keep a KL penalty",
    source="2505.18830; GTPO 2508.03772",
    windows=True,
)
def likelihood_displacement(data: RunData, *, limit: float = 0.5) -> Reading | None:
    sample = data.sample
    points = sample.mean_by_step(np.where(sample["advantage"] > 0, sample["logprob"], np.nan))
    if len(points) < 20:
        return None
    found = trend(points)
    unhealthy = found.change < -limit and found.p < data.chance and not pays(data.whole)
    first = since(points, points.value < points.first() - limit / 2, 5)
    evidence = data.step_evidence(points.step[-1:])
    curve = Curve(points, name=Phrase("mean log-probability of tokens with a positive advantage"))
    return Reading(-found.change, unhealthy, first, evidence, curve=curve)
