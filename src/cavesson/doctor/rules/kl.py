"""Rules on the KL to the reference: its sign, its size, and its origin."""

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.finding import Curve, Percent, Phrase, Reading, Share, Words
from cavesson.doctor.kl import NAMES, estimates
from cavesson.doctor.rule import rule
from cavesson.doctor.rules.consequences import CRITIC
from cavesson.doctor.series import Array, Series, since, smoothed, standard_error, together, trend

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "last")
PERSISTENT = 5
"""Steps that a trouble must last."""


def objective(data: RunData) -> Series:
    """Return the mean of Σ(log π − log π_ref) per response by step, recomputed if possible, else as logged."""
    return data.rows.mean("k1") if data.has("rows.k1") else data.metric("kl/objective")


def _noise(data: RunData, points: Series) -> Array:
    """Return the standard error of each step's mean; estimated from neighbouring steps if only means are known."""
    errors = data.rows.by_step(data.rows["k1"], standard_error)
    if len(errors):
        return np.asarray(np.interp(points.step, *errors))
    return np.full(len(points), float(np.median(np.abs(np.diff(points.value)))) if len(points) > 1 else 0.0)


@rule(
    row=12,
    needs=["rows.k1|steps.kl/objective"],
    severity="error",
    least_steps=3,
    title="The KL to the reference is negative",
    cause="The estimated KL is {seen} nats per response and stays below 0 (in {share} of the steps since). A true KL "
    "cannot be negative: the responses were not sampled from the distribution that is scored, and the penalty then "
    "pays the policy for leaving the reference.",
    healthy="mean of Σ(log π − log π_ref) per response: never clearly below 0; TRL warns below −1",
    fix="sampling.top_k = 0, sampling.top_p = 1.0, sampling.min_new_tokens = 0, sampling.temperature = 1.0; count no "
    "padding",
    source="TRL 0.7.10 ppo_trainer.py; TRL issues 235, 351, 925, 1161; TRL's How-to-train FAQ",
    explains=["penalty-mis-scaled"],
)
def negative_kl(data: RunData) -> Reading | None:
    points = objective(data)
    noise = _noise(data, points)
    first = since(points, points.value < -np.maximum(3 * noise, 0.05), PERSISTENT)
    deep = points.step[points.value < -1 - 3 * noise]
    if first is None and len(deep) >= 3:
        first = int(deep[0])
    after = points.where(points.step >= first) if first is not None else points
    return Reading(
        float(np.median(after.value)),
        first is not None,
        first,
        data.step_evidence(after.step[np.argsort(after.value)][:3]),
        {"share": Share(float(np.mean(after.value < 0)))},
        curve=Curve(points, low=0.0),
    )


@rule(
    row=17,
    needs=["rows.k1", "rows.length"],
    severity="error",
    least_steps=5,
    title="The policy earns by saying nothing",
    cause="Responses shrink from {before} to {after} tokens while the KL estimate falls to {seen} nats: an empty "
    "answer avoids the penalty, or is paid by a negative KL.",
    healthy="mean KL per response while responses shrink: not below 0",
    fix='cleaning.discard = "too_short" with a low cleaning.discard_reward; mend what makes the KL negative',
    source="MedicalGPT issue 374",
    explains=["negative-kl", "length-collapse"],
)
def stops_generating(data: RunData) -> Reading | None:
    length, kl = together(data.rows.mean("length"), objective(data))
    before, after = length.first(), length.last()
    shrunk = after < 0.3 * before and after < 4
    return Reading(
        kl.last(),
        shrunk and kl.last() < 0.0,
        since(length, length.value < 0.3 * before, 2),
        data.step_evidence(length.step[-1:]),
        {"before": before, "after": after},
        curve=Curve(kl, low=0.0),
    )


@rule(
    row=18,
    needs=["rows.k1|steps.kl/objective"],
    least_steps=5,
    title="The KL to the reference explodes",
    cause="The KL rises from {before} to {seen} nats per response: the policy leaves the reference faster than the "
    "penalty holds it.",
    healthy="KL per response: 0 to 10 nats (more for long ones: 0.25 nats per token; less for short ones: 0.75); while "
    "it pays 3 times as much, and any without a penalty",
    fix="raise kl.coef (or set kl.target), lower optimizer.learning_rate, stop at the last good checkpoint",
    source="TRL's How-to-train FAQ (0 to 10); Bai et al. 2204.05862; Gao et al. 2210.10760",
    explains=["over-optimised", "clip-fraction-high", "ratio-blow-up", "distinct-collapse", "template-collapse",
              "likelihood-displacement", "truncated", "gradient-spike", "zero-variance-groups", "zero-gradient",
              *CRITIC],
)  # fmt: skip
def kl_explosion(data: RunData) -> Reading | None:
    points = objective(data)
    per_token = np.full(len(points), np.nan)
    if data.has("rows.length"):
        length = data.rows.mean("length")
        per_token = points.value / np.maximum(np.interp(points.step, length.step, length.value), 1)
    # Long responses can have more than ten nats in total, but short ones must not differ much on every token.
    pays = _pays(data)
    most = 30.0 if pays else 10.0
    limit = np.where(np.isfinite(per_token), (points.value > most) & (per_token > most / 40), points.value > most)
    bad = limit | (np.nan_to_num(per_token) > most * 3 / 40)
    first = since(smoothed(points), bad, 3)
    # While the reward is high, a rise from which the KL has returned does not count, nor any rise without a penalty.
    sick = first is not None and not (pays and (not bad[-3:].any() or _free(data)))
    worst = points.step[np.argsort(-points.value)][:3]
    return Reading(
        points.last(),
        sick,
        first,
        data.step_evidence(worst),
        {"before": float(points.value[0])},
        curve=Curve(points, 0.0, most),
    )


def _free(data: RunData) -> bool:
    """Return whether the run has no KL penalty."""
    return data.has("rows.kl_coef") and not np.any(data.rows["kl_coef"] > 0)


def _pays(data: RunData) -> bool:
    """Return whether the reward is still near its maximum and well above its start."""
    if not data.has("rows.reward"):
        return False
    reward = smoothed(data.rows.mean("reward"))
    if len(reward) < 5:
        return False
    gain = reward.value.max() - reward.first()
    return bool(reward.last() - reward.first() > 0.8 * gain and gain > 0.3 * np.nanstd(data.rows["reward"]))


@rule(
    row=19,
    needs=["rows.k1|steps.kl/objective"],
    least_steps=10,
    title="Nothing is learned: the KL stays at 0",
    cause="After {steps} steps the policy is still its reference (KL {seen} nats per response): a learning rate of 0, "
    "advantages that are all 0, frozen weights, or an optimiser that never steps.",
    healthy="largest |KL| per response after the first steps: above 0.0001 nats",
    fix="look at optim/learning_rate, optim/grad_norm and the spread of the rewards within a group",
    source="rldoctor's default",
    explains=["value-constant"],
)
def kl_flat(data: RunData) -> Reading | None:
    points = objective(data)
    later = points.where(points.step >= points.step[0] + 2)
    if not len(later):
        return None
    size = float(np.abs(later.value).max())
    return Reading(
        size,
        size < 1e-4,
        int(points.step[0]),
        data.step_evidence(points.step[-1:]),
        {"steps": float(len(points))},
        curve=Curve(points, low=1e-4),
    )


@rule(
    row=20,
    needs=["rows.k1", "rows.kl_coef", "rows.reward"],
    least_steps=5,
    title="The KL coefficient does not fit the reward's scale",
    cause="In standard deviations of the reward, {what} is {seen}{direction}.",
    healthy="in standard deviations of the reward at the start: β, the price of one nat, below 1; β·KL above 0.01 once "
    "the KL has risen",
    fix="run some steps with kl.coef = 0, look at KL and spread of the reward, and set β to spread / (10 · KL)",
    source="InstructGPT 2203.02155 (0.02), Bai et al. 2204.05862 (0.001), Secrets of RLHF 2307.04964 (0.05)",
    explains=["kl-flat", "kl-explosion", "reward-falls", *CRITIC],
)
def penalty_mis_scaled(data: RunData) -> Reading | None:
    rows = data.rows
    spread = rows.by_step(rows["reward"], lambda values: float(np.std(values)))
    if len(spread) < 5 or spread.first() < 1e-6 or not np.any(rows["kl_coef"] > 0):
        return None
    # GRPO divides rewards by their standard deviation unless configured otherwise.
    scaled = data.algorithm == "grpo" and data.setting("config.grpo.scale") != "none"
    unit = 1.0 if scaled else spread.first()
    price, kl = rows.mean("kl_coef"), rows.mean("k1")
    spent, kl = together(rows.by_step(np.abs(rows["kl_coef"] * rows["k1"]) / unit), kl)
    # The optimal policy is proportional to π_ref · exp(reward / β), close to π_ref if β is a standard deviation.
    drowned = price.last(0.3) / unit > 1
    loose = spent.last(0.3) < 0.01 and kl.last() > 5 and trend(kl).p < 0.01
    points = Series(price.step, price.value / unit) if drowned else spent
    bad = points.value > 1 if drowned else points.value < 0.01
    words: Words = {
        "what": Phrase("the price of one nat of KL" if drowned else "the whole penalty β·KL"),
        "direction": Phrase(": the penalty drowns the reward" if drowned else ", and the KL rises: it holds nothing"),
    }
    curve = Curve(points, high=1.0) if drowned else Curve(points, low=0.01)
    first, evidence = since(points, bad, 3), data.step_evidence(points.step[-1:])
    return Reading(points.last(0.3), drowned or loose, first, evidence, words, curve)


@rule(
    row=21,
    needs=["steps.kl/coef|rows.kl_coef", "rows.k1|steps.kl/objective"],
    least_steps=10,
    title="The KL coefficient runs away",
    cause="The controller raised β by a factor of {seen} while the KL did not fall: the policy outruns it.",
    healthy="β now / its median at the start: below 10, or the KL falls",
    fix="lower optimizer.learning_rate or update.epochs; a smaller kl.horizon adapts faster",
    source="TRL 0.7.10, logging",
    explains=["reward-falls"],
)
def coefficient_runaway(data: RunData) -> Reading | None:
    coef = data.metric("kl/coef") if data.has("steps.kl/coef") else data.rows.mean("kl_coef")
    coef = coef.where(coef.value > 0)
    if len(coef) < 10:
        return None
    kl = objective(data)
    growth = coef.last() / coef.first()
    falls = trend(kl.where(kl.step >= np.median(kl.step))).change < -0.2 * abs(kl.last())
    return Reading(
        growth,
        growth >= 10 and not falls,
        since(coef, coef.value > 3 * coef.first(), 3),
        data.step_evidence(coef.step[-1:]),
        curve=Curve(Series(coef.step, coef.value / coef.first()), high=10.0),
    )


@rule(
    row=22,
    needs=["tokens.logprob", "tokens.ref_logprob"],
    least_steps=5,
    title="The KL comes from a few tokens or one place",
    cause="{seen} of all |log π − log π_ref| lies {where}: it is not the answers that change but one habit, such as a "
    "template that does not fit, an ending, a format.",
    healthy="share of Σ|Δ| in the top 1 % of the tokens: below 50 %; in one tenth of the positions: below 45 %",
    fix="look at these tokens; compare the prompt template with the one the model was tuned with",
    source="rlprobe; Secrets of RLHF 2307.04964",
    severity="note",
)
def kl_in_few_tokens(data: RunData) -> Reading | None:
    sample = data.sample
    late = sample.step >= np.quantile(sample.rows.steps, 0.5)
    mine = np.flatnonzero(late & sample.trained & np.isfinite(sample["log_ratio"]))
    size = np.abs(sample["log_ratio"][mine])
    if len(mine) < 500 or size.mean() < 0.02:
        return None
    order = np.argsort(-size)
    top = float(size[order[: max(1, len(order) // 100)]].sum() / size.sum())
    place = (10 * sample.position[mine] / np.maximum(sample.length[sample.line[mine]], 1)).astype(int).clip(0, 9)
    buckets = np.bincount(place, size, 10) / size.sum()
    bucket = float(buckets.max()) if np.median(sample.length) >= 20 else 0.0
    sick = top > 0.5 or bucket > 0.45
    where = "on 1 % of the tokens" if top > 0.5 else f"in the {ORDINALS[buckets.argmax()]} tenth of the response"
    seen = top if top > 0.5 or not sick else bucket
    first = int(sample.step[mine].min())
    curve = Curve(
        Series(np.arange(1, 11), buckets),
        high=0.45,
        name=Phrase("share of Σ|Δ| in each tenth of the response"),
        along=Phrase("tenths of the response"),
    )
    if top > 0.5:
        edges = np.ceil(np.arange(1, 101) * len(order) / 100).astype(int) - 1
        curve = Curve(
            Series(np.arange(1, 101), (np.cumsum(size[order]) / size.sum())[edges]),
            name=Phrase("share of Σ|Δ| in so many per cent of the tokens"),
            along=Phrase("per cent of the tokens, those that differ the most first"),
        )
    return Reading(Share(seen), sick, first, sample.spans(mine[order]), {"where": Phrase(where)}, curve=curve)


def _use(data: RunData) -> tuple[str, str] | None:
    """Return where β·KL is applied and by which estimator, according to the settings."""
    settings = {
        "ppo": ("reward", data.setting("config.kl.estimator")),
        "rloo": ("reward", data.setting("config.rloo.kl_estimator")),
        "grpo": (data.setting("config.grpo.kl_in"), data.setting("config.grpo.kl_estimator", None)),
    }
    place, name = settings.get(data.algorithm or "", (None, None))
    if name is None and data.algorithm == "grpo":
        name = {"loss": "k3", "reward": "k1"}.get(place)
    return None if place is None or name is None else (place, NAMES.get(name, name))


def _weight(place: str, estimator: str, log_ratio: Array) -> Array:
    """Return the factor of ∇ log π; for the gradient of KL(π ‖ π_ref) the factor is Δ itself."""
    if place == "loss":
        return {"k1": np.ones_like(log_ratio), "k2": log_ratio, "k3": -np.expm1(-log_ratio)}[estimator]
    # The exact KL does not depend on which token was drawn, so it does not favour any token over another.
    return estimates(log_ratio).get(estimator, np.zeros_like(log_ratio))


@rule(
    row=71,
    needs=["info.config.kl", "rows.kl_coef", "tokens.logprob", "tokens.ref_logprob"],
    title="The KL estimator does not hold the policy where it stands",
    cause="The KL goes into the {place} by the estimator {estimator}, whose gradient there is not that of the KL. What "
    "pulls back to the reference is the part of it that changes sign with log π − log π_ref: {seen} of the KL's own.",
    healthy="the estimator's pull towards the reference where it stands, relative to the KL's own: at least 50 %",
    fix='in the reward take k1 (kl.estimator = "kl", grpo.kl_estimator = "k1"), in the loss k2 or k3',
    source="Schulman, Approximating KL divergence; 2506.09477; 2512.21852",
    explains=["kl-explosion", "penalty-mis-scaled", "coefficient-runaway"],
)
def estimator_misplaced(data: RunData) -> Reading | None:
    sample, use = data.sample, _use(data)
    delta = sample["log_ratio"]
    near = sample.trained & (np.abs(delta) < 1) & (np.abs(delta) > 0)
    if use is None or not near.any() or not np.any(data.rows["kl_coef"] > 0):
        return None
    pull = (_weight(*use, delta[near]) - _weight(*use, -delta[near])) / 2
    share = float(np.sum(pull * delta[near]) / np.sum(delta[near] ** 2))
    return Reading(
        Percent(share),
        share < 0.5,
        int(sample.rows.steps[0]),
        sample.worst(np.where(sample.trained, np.abs(delta), np.nan)),
        {"place": Phrase(use[0]), "estimator": use[1]},
        curve=Curve(objective(data), name=Phrase("KL to the reference in nats per response")),
    )


@rule(
    row=23,
    needs=["steps.kl/objective", "tokens.logprob", "tokens.ref_logprob"],
    severity="error",
    title="The logged KL is no known estimate of the KL",
    cause="The logged KL agrees with none of Σ Δ, Σ |Δ|, Σ ½Δ² and Σ (e^−Δ − 1 + Δ) of the recorded tokens, per "
    "response or per token; the nearest is {name}, {seen} away from it.",
    healthy="relative distance of the logged KL from the nearest known estimate: below 0.2",
    fix="log the KL of the tokens that are trained, and say which estimate it is",
    source="Schulman, Approximating KL divergence; 2506.09477; 2512.21852",
)
def unknown_estimate(data: RunData) -> Reading | None:
    sample, logged = data.sample, data.metric("kl/objective")
    if len(sample.rows) < len(data.rows):
        return None  # the mean over a sample of the rollouts need not equal the logged mean over all of them
    found: list[tuple[float, str]] = []
    for name, values in estimates(sample["log_ratio"]).items():
        per_response = sample.total(np.where(sample.trained, values, 0.0))
        for unit, mine in (("per response", per_response), ("per token", per_response / np.maximum(sample.length, 1))):
            ours, theirs = together(sample.rows.by_step(mine), logged)
            scale = float(np.abs(theirs.value).mean())
            if len(ours) and scale > 0.01:
                found.append((float(np.abs(ours.value - theirs.value).mean()) / scale, f"{name} {unit}"))
    if not found:
        return None
    distance, name = min(found)
    return Reading(
        distance,
        distance > 0.2,
        int(logged.step[0]),
        sample.evidence(np.arange(len(sample.rows))),
        {"name": Phrase(name)},
        curve=Curve(logged, name=Phrase("logged KL")),
    )
