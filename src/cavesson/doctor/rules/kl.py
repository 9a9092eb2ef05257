"""Rules on the KL to the reference: its sign, its size, and its origin."""

from dataclasses import replace
from typing import Any

import numpy as np

from cavesson.doctor.absent import no_penalty, no_reference
from cavesson.doctor.data import RunData
from cavesson.doctor.proposal import calmer, fitting, for_kl, over_limit, stronger, tighter
from cavesson.doctor.reading import Affected, Curve, Reading
from cavesson.doctor.readings import pays
from cavesson.doctor.rule import Disproof, rule
from cavesson.doctor.rules.consequences import CRITIC, RUNAWAY
from cavesson.doctor.sample import Sample
from cavesson.doctor.series import Array, Series, since, smoothed, standard_errors, together, trend
from cavesson.findings.kl import estimates, pull
from cavesson.findings.settings import HELD
from cavesson.findings.words import Percent, Phrase, Share

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "last")
PERSISTENT = 5
"""Steps that a problem must last."""
USUAL_RATE = 1e-5
"""The default learning rate."""


LOGGED = "rows.kl_k1|steps.kl/objective|steps.kl/per_token"
"""What shows the KL of a step."""
NEAR = 5
"""Steps before and after a step that show how far the policy moves in one."""
UNCLEAR_KL = Phrase("`kl` does not say what was measured, and when: log it as kl/objective (docs/metrics.md)")
BELOW = "kl_k1 < 0"
"""What a filter of the board says of responses with a negative KL."""
TINY = 0.01
"""Mean logged KL, in nats, below which it matches everything."""
USUAL_LENGTH = 100.0
"""Tokens of a response where only a KL per token was logged, and no lengths."""


def objective(data: RunData) -> Series:
    """Return the mean of Σ(log π − log π_ref) per response by step, recomputed if possible, else as logged."""
    if data.has("rows.kl_k1"):
        return data.rows.mean("kl_k1")
    total, each = data.metric("kl/objective"), data.metric("kl/per_token")
    return total if len(total) else Series(each.step, each.value * _lengths(data, each.step))


def _lengths(data: RunData, step: Array) -> Array:
    """Return [S] the mean length of the responses at some steps; a usual one if it was not recorded."""
    length = data.rows.mean("length") if data.has("rows.length") else data.metric("length/response_mean")
    return np.interp(step, length.step, length.value) if len(length) else np.full(len(step), USUAL_LENGTH)


def _noise(data: RunData, points: Series) -> Array:
    """Return the standard error of each step's mean; estimated from neighbouring steps if only means are known."""
    errors = data.rows.by_step(data.rows["kl_k1"], standard_errors)
    if len(errors):
        return np.asarray(np.interp(points.step, *errors))
    return np.full(len(points), float(np.median(np.abs(np.diff(points.value)))) if len(points) > 1 else 0.0)


def sampled_before(data: RunData) -> bool:
    """Return whether most responses are of older weights, whose own KL to the reference is not negative.

    E_old[log π − log π_ref] = KL(π_old ‖ π_ref) − KL(π_old ‖ π) is negative while the policy is near its reference.
    """
    sample = data.sample
    of_sampler = sample["sampler_logprob"] - sample["ref_logprob"]
    known = sample.trained & np.isfinite(of_sampler)
    is_old = np.mean(sample.rows["policy_version"] < sample.rows.step) > 0.5
    return bool(is_old and known.any() and of_sampler[known].mean() >= 0)


@rule(
    number=12,
    needs=[LOGGED],
    severity="error",
    min_steps=3,
    training_only=True,
    title="The KL to the reference is negative",
    cause="The estimated KL is {seen} nats per response and stays below 0 (in {share} of the steps since). A true KL "
    "cannot be negative: the responses were not sampled from the distribution that scores them, and the penalty then "
    "rewards the policy for moving away from the reference.",
    healthy="mean of Σ(log π − log π_ref) per response: never clearly below 0; TRL warns below {warned}",
    fix="sampling.top_k = 0, sampling.top_p = 1.0, sampling.min_new_tokens = 0, sampling.temperature = 1.0; leave "
    "padding out",
    settings={"sampling.top_k": 0, "sampling.top_p": 1.0, "sampling.min_new_tokens": 0, "sampling.temperature": 1.0},
    source="TRL 0.7.10 ppo_trainer.py; TRL issues 235, 351, 925, 1161; TRL's How-to-train FAQ",
    explains=["penalty-mis-scaled"],
    disproof=Disproof(
        ("rows.policy_version", "tokens.sampler_logprob", "tokens.ref_logprob"),
        "older weights sampled the responses, and their own KL to the reference is not negative",
        sampled_before,
    ),
    absent=no_reference,
)
def negative_kl(data: RunData, *, warned: float = -1.0) -> Reading | None:
    points = objective(data)
    noise = _noise(data, points)
    first = since(points, points.value < -np.maximum(3 * noise, 0.05), PERSISTENT)
    deep = points.step[points.value < warned - 3 * noise]
    if first is None and len(deep) >= 3:
        first = int(deep[0])
    after = points.after(first)
    seen = float(np.median(after.value))
    words = {"share": Share(np.mean(after.value < 0))}
    evidence = data.step_evidence(after.step[np.argsort(after.value)])
    below = Affected(data.rows, data.rows["kl_k1"] < 0, BELOW) if data.recorded("rows.kl_k1") else None
    found = Reading(seen, first is not None, first, evidence, words, Curve(points, low=0.0), affected=below)
    return found if data.has("rows.kl_k1") else _unless_unclear(data, found)


def _unless_unclear(data: RunData, found: Reading) -> Reading:
    """Return what a rule found in the logged KL; nothing is wrong with a number of which it is not known what it is."""
    is_unclear = found.unhealthy and not len(data.metric("kl/objective")) and data.is_unclear("kl/per_token")
    return replace(found, unhealthy=False, undecided=UNCLEAR_KL) if is_unclear else found


@rule(
    number=17,
    needs=["rows.kl_k1", "rows.length"],
    traits=["kl_place"],
    severity="error",
    min_steps=5,
    title="The policy is rewarded for empty responses",
    cause="Responses shrink from {before} to {after} tokens while the KL estimate falls to {seen} nats: an empty "
    "response avoids the penalty, or a negative KL rewards it.",
    healthy="mean KL per response while responses shrink: not below 0",
    fix='cleaning.discard = "too_short" with a low cleaning.discard_reward; fix what makes the KL negative',
    source="MedicalGPT issue 374",
    explains=["negative-kl", "length-collapse"],
    windows=True,
)
def stops_generating(data: RunData) -> Reading | None:
    length, kl = together(data.rows.mean("length"), objective(data))
    before, after = length.first(), length.last()
    short = 0.3 * before
    unhealthy = after < min(short, 4) and kl.last() < 0
    first = since(length, length.value < short, 2)
    evidence = data.step_evidence(length.step[-1:])
    return Reading(kl.last(), unhealthy, first, evidence, {"before": before, "after": after}, Curve(kl, low=0.0))


@rule(
    number=18,
    needs=[LOGGED],
    min_steps=5,
    title="The KL to the reference explodes",
    cause="The KL rises from {before} to {seen} nats per response: the policy moves away from the reference faster "
    "than the penalty can hold it.",
    healthy="KL per response: 0 to {limit} nats (long responses: up to {long} nats per token; short ones: at most "
    "{short} nats per token); {factor} times as much while the reward stays near its maximum, or any amount if there "
    "is no penalty either. A rise does not count if the last third of the run is in this range",
    fix="[raise kl.coef, ][or set kl.target, ]lower optimizer.learning_rate, return to the last good checkpoint",
    settings={"kl.coef": stronger(over_limit), "kl.target": tighter(over_limit),
              "optimizer.learning_rate": calmer(for_kl)},
    source="TRL's How-to-train FAQ (0 to 10); Bai et al. 2204.05862; Gao et al. 2210.10760",
    explains=["over-optimised", "clip-fraction-high", "ratio-blow-up", "distinct-collapse", "template-collapse",
              "likelihood-displacement", "truncated", "gradient-spike", "zero-variance-groups", "zero-gradient",
              *CRITIC],
)  # fmt: skip
def kl_explosion(
    data: RunData, *, limit: float = 10.0, long: float = 0.25, short: float = 0.75, factor: float = 3.0
) -> Reading | None:
    points = objective(data)
    per_token = np.full(len(points), np.nan)
    if data.has("rows.length") or not len(data.metric("kl/objective")):
        per_token = points.value / np.maximum(_lengths(data, points.step), 1)
    # Long responses can have a larger KL in total, but short ones must not differ much on every token.
    is_paid = pays(data)
    scale = factor if is_paid else 1.0
    high = points.value > scale * limit
    bad = np.where(np.isfinite(per_token), high & (per_token > scale * long), high)
    bad |= np.nan_to_num(per_token) > scale * short
    first = since(smoothed(points), bad, 3)
    # A rise does not count if the KL has returned from it, nor, without a penalty, while the reward is high.
    has_returned = not bad[-(3 if is_paid else max(3, len(bad) // 3)) :].any()
    unhealthy = first is not None and not has_returned and not (is_paid and _free(data))
    evidence = data.step_evidence(points.step[np.argsort(-points.value)])
    words = {"before": float(points.value[0])}
    curve = Curve(points, 0.0, scale * limit)
    return Reading(points.last(), unhealthy, first, evidence, words, curve)


def _free(data: RunData) -> bool:
    """Return whether the run has no KL penalty."""
    return data.has("rows.kl_coef") and not np.any(data.rows["kl_coef"] > 0)


@rule(
    number=19,
    needs=[LOGGED],
    min_steps=10,
    title="Nothing is learned: the KL stays at 0",
    cause="After {steps} steps the policy still equals its reference (KL {seen} nats per response): the learning rate "
    "is 0, all advantages are 0, the weights are frozen, the optimiser never steps, or the reference has the same "
    "weights.",
    healthy="largest |KL| per response after the first steps: above {limit} nats",
    fix="check optim/learning_rate, optim/grad_norm and the standard deviation of the rewards within a group",
    settings={"optimizer.learning_rate": lambda value, data, reading: max(value, USUAL_RATE)},
    source="rldoctor's default",
    explains=["value-constant", "value-not-fitting"],
    absent=no_reference,
)
def kl_flat(data: RunData, *, limit: float = 1e-4) -> Reading | None:
    points = objective(data)
    later = points.where(points.step >= points.step[0] + 2)
    if not len(later):
        return None
    size = float(np.abs(later.value).max())
    evidence = data.step_evidence(points.step[-1:])
    words = {"steps": float(len(points))}
    return Reading(size, size < limit, int(points.step[0]), evidence, words, Curve(points, low=limit))


@rule(
    number=20,
    needs=["rows.kl_k1", "rows.kl_coef", "rows.reward"],
    traits=["kl_place"],
    min_steps=5,
    title="The KL coefficient does not fit the reward's scale",
    cause="In standard deviations of the reward, {what} is {seen}{direction}.",
    healthy="in standard deviations of the reward at the start: β, the price of one nat, below {limit}; β·KL above "
    "{floor} once the KL has risen",
    fix="run a few steps with kl.coef = 0, measure the KL and the standard deviation of the reward, and set β to "
    "standard deviation / (10 · KL)",
    settings={"kl.coef": fitting},
    source="InstructGPT 2203.02155 (0.02), Bai et al. 2204.05862 (0.001), Secrets of RLHF 2307.04964 (0.05)",
    explains=["kl-flat", "kl-explosion", "reward-falls", *CRITIC],
    absent=no_penalty,
)
def penalty_mis_scaled(data: RunData, *, limit: float = 1.0, floor: float = 0.01) -> Reading | None:
    rows = data.rows
    spread = rows.by_step(rows["reward"], np.std)
    if len(spread) < 5 or spread.first() < 1e-6 or not np.any(rows["kl_coef"] > 0):
        return None
    unit = 1.0 if data.setting("rewards_are_scaled") else spread.first()
    price, kl = rows.mean("kl_coef"), rows.mean("kl_k1")
    spent, kl = together(rows.by_step(np.abs(rows["kl_coef"] * rows["kl_k1"]) / unit), kl)
    # The optimal policy is proportional to π_ref · exp(reward / β), close to π_ref if β is a standard deviation.
    outweighs = price.last(0.3) / unit > limit
    weak = spent.last(0.3) < floor and kl.last() > 5 and trend(kl).p < 0.01
    points = Series(price.step, price.value / unit) if outweighs else spent
    bad = points.value > limit if outweighs else points.value < floor
    words = {
        "what": Phrase("the price of one nat of KL" if outweighs else "the whole penalty β·KL"),
        "direction": Phrase(": it outweighs the reward" if outweighs else ", and the KL rises: it is too weak"),
    }
    curve = Curve(points, high=limit) if outweighs else Curve(points, low=floor)
    first, evidence = since(points, bad, 3), data.step_evidence(points.step[-1:])
    return Reading(points.last(0.3), outweighs or weak, first, evidence, words, curve)


@rule(
    number=21,
    needs=["steps.kl/coef|rows.kl_coef", LOGGED],
    traits=["kl_place"],
    min_steps=10,
    title="The KL coefficient grows without effect",
    cause="The controller raised β by a factor of {seen}, but the KL did not fall: the policy changes faster than the "
    "controller adapts.",
    healthy="current β / its median at the start: below {limit}, or the KL falls",
    fix="lower optimizer.learning_rate or update.epochs; a smaller kl.horizon adapts faster",
    settings={"optimizer.learning_rate": calmer()},
    source="TRL 0.7.10, logging",
    explains=["reward-falls"],
    windows=True,
)
def coefficient_runaway(data: RunData, *, limit: float = 10.0) -> Reading | None:
    coef = data.metric("kl/coef") if data.has("steps.kl/coef") else data.rows.mean("kl_coef")
    coef = coef.where(coef.value > 0)
    if len(coef) < 10:
        return None
    kl = objective(data)
    falls = trend(kl.where(kl.step >= np.median(kl.step))).change < -0.2 * abs(kl.last())
    growth = coef.last() / coef.first()
    first = since(coef, coef.value > 3 * coef.first(), 3)
    evidence = data.step_evidence(coef.step[-1:])
    curve = Curve(Series(coef.step, coef.value / coef.first()), high=limit)
    return Reading(growth, growth >= limit and not falls, first, evidence, curve=curve)


@rule(
    number=22,
    needs=["tokens.logprob", "tokens.ref_logprob"],
    min_steps=5,
    title="Most of the KL comes from a few tokens or one place",
    cause="{seen} of the distance to the reference is {where}: a single habit changes rather than the content of the "
    "responses, such as a mismatched template, an ending, or a format.",
    healthy="share of Σ|Δ| in the top 1 % of the tokens: below {few}; in one tenth of the positions: below {tenth}",
    fix="inspect these tokens; compare the prompt template with the one that the model was fine-tuned with",
    source="rlprobe; Secrets of RLHF 2307.04964",
    severity="note",
)
def kl_in_few_tokens(data: RunData, *, few: float = Share(0.5), tenth: float = Share(0.45)) -> Reading | None:
    sample = data.sample
    late = sample.step >= np.quantile(sample.rows.steps, 0.5)
    mine = np.flatnonzero(late & sample.trained & np.isfinite(sample["kl_k1"]))
    size = np.abs(sample["kl_k1"][mine])
    if len(mine) < 500 or size.mean() < 0.02:
        return None
    order = np.argsort(-size)
    top = float(size[order[: max(1, len(order) // 100)]].sum() / size.sum())
    place = (10 * sample.position[mine] / np.maximum(sample.length[sample.line[mine]], 1)).astype(int).clip(0, 9)
    buckets = np.bincount(place, size, 10) / size.sum()
    bucket = float(buckets.max()) if np.median(sample.length) >= 20 else 0.0
    unhealthy = top > few or bucket > tenth
    where = "on 1 % of the tokens" if top > few else f"in the {ORDINALS[buckets.argmax()]} tenth of the response"
    seen = top if top > few or not unhealthy else bucket
    first = int(sample.step[mine].min())
    name, along = Phrase("share of Σ|Δ| in each tenth of the response"), Phrase("tenths of the response")
    curve = Curve(Series(np.arange(1, 11), buckets), high=tenth, name=name, along=along)
    if top > few:
        edges = np.ceil(np.arange(1, 101) * len(order) / 100).astype(int) - 1
        points = Series(np.arange(1, 101), (np.cumsum(size[order]) / size.sum())[edges])
        along = Phrase("per cent of the tokens, the largest |Δ| first")
        curve = Curve(points, name=Phrase("cumulative share of Σ|Δ|"), along=along)
    return Reading(Share(seen), unhealthy, first, sample.spans(mine[order]), {"where": Phrase(where)}, curve)


def _sound(value: Any, data: RunData, reading: Reading) -> str:
    """Return an estimator that has the gradient of the KL where it is used."""
    return "k1" if data.setting("kl.place") == "reward" else "k3"


@rule(
    number=71,
    needs=["info.kl.place", "info.kl.estimator", "rows.kl_coef", "tokens.logprob", "tokens.ref_logprob"],
    traits=["kl_place"],
    title="The KL estimator does not hold the policy where it is used",
    cause="The KL goes into the {place} with the estimator {estimator}, whose gradient there is not the gradient of "
    "the KL. Only the part of it that changes sign with log π − log π_ref pulls the policy towards the reference: "
    "{seen} of the pull of the KL itself.",
    healthy="pull of the estimator towards the reference where it is used, relative to that of the KL itself: at least "
    "{limit}",
    fix='in the reward, use k1[ (kl.estimator = "k1")][ (grpo.kl_estimator = "k1")]; in the loss, use k2 or k3',
    settings={"kl.estimator": _sound, "grpo.kl_estimator": _sound, "rloo.kl_estimator": _sound},
    source="Schulman, Approximating KL divergence; 2506.09477; 2512.21852",
    explains=["kl-explosion", "penalty-mis-scaled", "coefficient-runaway", *RUNAWAY],
    absent=no_penalty,
)
def estimator_misplaced(data: RunData, *, limit: float = HELD) -> Reading | None:
    sample, place, estimator = data.sample, str(data.setting("kl.place")), str(data.setting("kl.estimator"))
    delta = sample["kl_k1"]
    near = sample.trained & (np.abs(delta) < 1) & (np.abs(delta) > 0)
    if not near.any() or not np.any(data.rows["kl_coef"] > 0):
        return None
    share = Percent(pull(place, estimator, delta[near]))
    worst = sample.worst(np.where(sample.trained, np.abs(delta), np.nan))
    words = {"place": Phrase(place), "estimator": estimator}
    curve = Curve(objective(data), name=Phrase("KL to the reference in nats per response"))
    return Reading(share, share < limit, int(sample.rows.steps[0]), worst, words, curve)


@rule(
    number=23,
    needs=["steps.kl/objective|steps.kl/per_token", "tokens.logprob", "tokens.ref_logprob"],
    severity="error",
    title="The logged KL is not a known estimate of the KL",
    cause="The logged KL is none of the known estimates from the recorded tokens, neither per response nor per token; "
    "the nearest is {name}, at a relative distance of {seen}.",
    healthy="relative distance of the logged KL from the nearest known estimate: below {limit}",
    fix="log the KL of the trained tokens, and name the estimator",
    source="Schulman, Approximating KL divergence; 2506.09477; 2512.21852",
    disproof=Disproof(
        ("tokens.logprob", "tokens.ref_logprob"),
        "the logged KL of another trainer lies between an estimate for the policy before the update and one for the "
        "policy after it: most trainers average their KL over the update",
    ),
    windows=True,
)
def unknown_estimate(data: RunData, *, limit: float = 0.2) -> Reading | None:
    sample, logged = data.sample, _logged(data)
    if len(sample.rows) < len(data.rows):
        return None  # the mean over a sample of the rollouts need not equal the logged mean over all of them
    # For the same reason, a step counts only if the KL of all its trained tokens is known.
    gaps = np.unique(sample.step[sample.trained & ~np.isfinite(sample["kl_k1"])])
    found: list[tuple[float, str, Series]] = []
    for name, values in estimates(sample["kl_k1"]).items():
        for unit, all_steps in _units(sample, values):
            ours = all_steps.where(~np.isin(all_steps.step, gaps))
            for mine in (ours, _between_logs(data, ours)):
                away = _distance(mine, logged) if data.own else _beyond_update(mine, logged)
                if len(away):
                    found.append((float(away.value.mean()), f"{name} {unit}", away))
    if not found:
        return None
    distance, name, course = min(found, key=lambda one: one[0])
    evidence = sample.rows.evidence(range(len(sample.rows)))
    curve, first = Curve(logged, name=Phrase("logged KL")), int(logged.step[0])
    reading = Reading(distance, distance > limit, first, evidence, {"name": Phrase(name)}, curve, course)
    return _unless_unclear(data, reading)


def _distance(mine: Series, logged: Series) -> Series:
    """Return how far the logged KL is from an estimate by step, relative to its mean; empty if that is tiny."""
    own, theirs = together(mine, logged)
    scale = float(np.abs(theirs.value).mean()) if len(own) else 0.0
    return Series(own.step, np.abs(own.value - theirs.value) / scale) if scale > TINY else mine.where(mine.step < 0)


def _beyond_update(mine: Series, logged: Series) -> Series:
    """Return how far the logged KL is from those that the policy may have during the update of each step.

    On the responses that it learns from, the policy may move as far again as it does on the next ones.
    """
    if len(mine) < 2:
        return mine.where(mine.step < 0)
    place = np.arange(len(mine))
    low, high = np.maximum(place - NEAR, 0), np.minimum(place + NEAR, len(mine) - 1)
    rate = np.abs((mine.value[high] - mine.value[low]) / (mine.step[high] - mine.step[low]))
    own, moved, theirs = together(mine, Series(mine.step, 2 * rate), logged)
    off = np.clip(theirs.value - own.value, -moved.value, moved.value)
    return _distance(Series(own.step, own.value + off), theirs)


def _logged(data: RunData) -> Series:
    """Return the KL as it was logged, in either unit; one of them must have been."""
    return next(filter(len, map(data.metric, ("kl/objective", "kl/per_token"))))


def _units(sample: Sample, values: Array) -> list[tuple[str, Series]]:
    """Return the means by step of an estimate [N], in each unit in which trainers log a KL.

    Per token, verl averages the means of the responses, and TRL averages over the tokens of all of them.
    """
    total, by_step = sample.total(np.where(sample.trained, values, 0.0)), sample.rows.by_step
    return [
        ("per response", by_step(total)),
        ("per token", by_step(total / np.maximum(sample.length, 1))),
        ("per token", sample.mean_by_step(values)),
    ]


def _between_logs(data: RunData, ours: Series) -> Series:
    """Return the means over the steps since the previous logged one: TRL logs such means, of 10 steps by default."""
    logged, ends = _logged(data), _logged(data.whole).step
    if not len(ours):
        return ours
    begins = np.append(data.whole.rows.steps[:1], ends[:-1] + 1)[np.searchsorted(ends, logged.step)]
    first, stop = np.searchsorted(ours.step, begins), np.searchsorted(ours.step, logged.step, side="right")
    steps = data.rows.steps
    recorded = np.searchsorted(steps, logged.step, side="right") - np.searchsorted(steps, begins)
    kept = (begins >= steps[:1]) & (stop > first) & (stop - first == recorded)
    total = np.append(0.0, np.cumsum(ours.value))
    return Series(logged.step[kept], (total[stop] - total[first])[kept] / (stop - first)[kept])


@rule(
    number=92,
    needs=["rows.teacher_kl", "rows.length"],
    min_steps=20,
    title="The policy does not come closer to its teacher",
    cause="The reverse KL to the teacher per token is {seen} times what it was at the start ({start} nats): what the "
    "policy writes is as unlikely under the teacher as before.",
    healthy="reverse KL to the teacher per token at the end / at the start: below {limit}, or it starts below {floor} "
    "nats",
    fix="a larger optimizer.learning_rate; check that the teacher gets prompts in its own chat template; with rewards, "
    "lower their weights",
    source="Thinking Machines, On-policy distillation (2025); GKD 2306.13649",
)
def teacher_not_approached(data: RunData, *, limit: float = 1.0, floor: float = 0.05) -> Reading | None:
    rows = data.rows
    points = rows.by_step(rows["teacher_kl"] / np.maximum(rows["length"], 1))
    start, seen = points.first(), points.last(0.3)
    if start <= 0:
        return None
    evidence = data.step_evidence(points.step[-1:])
    words, curve = {"start": start}, Curve(points, high=start)
    return Reading(seen / start, seen / start >= limit and start > floor, int(points.step[0]), evidence, words, curve)
