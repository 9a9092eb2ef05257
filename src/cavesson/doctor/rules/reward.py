"""Rules on the reward: what it measures, and how the policy exploits it."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cavesson.doctor.data import RunData
from cavesson.doctor.effects import clear_of
from cavesson.doctor.groups import EQUAL, equal_by_chance, groups, repeated, solved, within
from cavesson.doctor.onset import of_events
from cavesson.doctor.proposal import grown, rounded, stronger, tighter
from cavesson.doctor.reading import Affected, Curve, Reading, Words
from cavesson.doctor.readings import is_lower
from cavesson.doctor.rows import Rows
from cavesson.doctor.rule import rule
from cavesson.doctor.rules.consequences import CRITIC, MISLED, RUNAWAY
from cavesson.doctor.rules.diversity import distinct
from cavesson.doctor.series import Array, Series, earliest, mean_by_step, series, since, smoothed, together, trend
from cavesson.findings.words import Percent, Phrase, Share
from cavesson.record.splits import HELD_OUT

NOT_EVALUATED = Phrase("held-out prompts were evaluated fewer than five times; what is gained there is not known")
VERDICTS, NEARLY_ALL, USUAL, REACH = 8, 0.99, 0.05, 40.0
"""Maximum number of different verdicts, such as sums of three that are 0 or 1, the share of rewards they make up (rare
verdicts are not outliers), the share of one that is usual, and how many times as far from the usual ones as these are
apart a rare one may be: a right answer can earn 40 times as much as the right form."""
LONG = 15
"""Steps from which a fall is judged."""
MIN_SCORES = 100
"""Responses from which it is said that a part of the reward is the same for all of them."""
USED = 1e-3
"""Share of the reward that its parts may leave unexplained, and relative size from which a part counts."""


@rule(
    number=45,
    needs=["rows.reward", "rows.group", "rows.response"],
    min_steps=2,
    training_only=True,
    title="The reward depends on the prompt, not on the response",
    cause="{seen} of the variance of the reward is between prompts, not between the responses to the same prompt: what "
    "the policy does hardly matters.",
    healthy="share of the reward's variance between prompts: below {limit}",
    fix="shaping.subtract_query = true, or a baseline per prompt (GRPO, RLOO)",
    settings={"shaping.subtract_query": True},
    source="TRL's How-to-train FAQ; own threshold",
    explains=["kl-flat", "reward-is-noise", *MISLED],
    windows=True,
)
def query_dominated(data: RunData, *, limit: float = Share(0.8)) -> Reading | None:
    rows, reward = data.sample.rows, data.sample.rows.trained_reward
    prompt = _prompts(rows)
    there = np.isfinite(reward) & np.isfinite(prompt) & _first_of_equal(rows, prompt)
    # As the policy changes over time, rewards are measured relative to the mean of their step.
    value = reward - np.interp(rows.step, *rows.by_step(reward))
    _, key, count = np.unique(prompt[there], return_inverse=True, return_counts=True)
    if count[count >= 2].sum() < 40 or np.var(value[there]) < 1e-10:
        return None
    share, error, inside = _between(key, value[there])
    unhealthy = share - NormalDist().inv_cdf(1 - data.chance) * error > limit
    mean = np.bincount(key, value[there]) / count
    order = np.argsort(mean)
    chance = float(np.sqrt(inside / np.median(count)))
    # Show a response to the prompt with the lowest mean reward, and two to the one with the highest.
    shown = np.flatnonzero(there)[[*np.flatnonzero(key == order[0])[:1], *np.flatnonzero(key == order[-1])[:2]]]
    name = Phrase("mean reward of each prompt − that of its step; green: range expected by chance for equal prompts")
    along = Phrase("prompts, in ascending order of reward")
    curve = Curve(Series(np.arange(1, len(order) + 1), mean[order]), -2 * chance, 2 * chance, name, along)
    course = _course(data.whole) if unhealthy else None
    return Reading(Share(share), unhealthy, int(rows.steps[0]), rows.evidence(shown), curve=curve, course=course)


def _course(data: RunData) -> Series:
    """Return by step how much of the reward's spread is between prompts, or its spread if prompts are not repeated."""
    rows = data.rows
    everywhere = rows.by_step(rows["reward"], np.std)
    if not repeated(rows):
        return everywhere
    inside, everywhere = together(rows.by_step(within(rows, rows["reward"]), np.std), everywhere)
    return Series(inside.step, 1 - inside.value / np.maximum(everywhere.value, 1e-9))


def _prompts(rows: Rows) -> Array:
    """Return [n] a number of each rollout's prompt, NaN if it is not known.

    Where each prompt has one response, some trainers number the groups of all steps one after the other, so that a
    prompt that comes again has another group.
    """
    if repeated(rows) or not rows.has("prompt"):
        return rows["group"]
    codes = rows.column("prompt").combine_chunks().dictionary_encode().indices
    return np.asarray(codes.cast(pa.float64()).to_numpy(zero_copy_only=False))


def _first_of_equal(rows: Rows, prompt: Array) -> Array:
    """Return [n] whether no earlier rollout has the same prompt and response: a repeated response says nothing new."""
    pairs = pa.table({"prompt": pa.array(prompt), "response": rows.column("response")})
    first = (
        pairs.append_column("at", pa.array(np.arange(len(rows))))
        .group_by(["prompt", "response"])
        .aggregate([("at", "min")])
    )
    found = np.zeros(len(rows), bool)
    found[first["at_min"].to_numpy()] = True
    return found


def _between(key: Array, value: Array) -> tuple[float, float, float]:
    """Return the share of the variance that is between prompts, its standard error, and the variance inside them.

    Prompts with a single response do not count. The error is that of the jackknife over the prompts.
    """
    several = np.bincount(key)[key] >= 2
    key, value = np.unique(key[several], return_inverse=True)[1], value[several]
    count, total, squares = (np.bincount(key, weights) for weights in (np.ones(len(key)), value, value**2))

    def of(count: Any, inside: Any, free: Any, total: Any, squares: Any) -> Any:
        return np.maximum(0.0, 1 - inside / free / (squares / count - (total / count) ** 2))

    columns = np.array([count, squares - total**2 / count, count - 1, total, squares])
    everything = columns.sum(1)
    without = of(*(everything[:, None] - columns))
    error = np.sqrt((len(count) - 1) * np.var(without)) if len(count) > 1 else np.inf
    return float(of(*everything)), float(error), float(everything[1] / everything[2])


@rule(
    number=46,
    needs=["rows.reward", "rows.group"],
    traits=["grouped"],
    training_only=True,
    title="All rewards in a group are equal",
    cause="In {seen} of the groups all responses have the same reward: their advantages are 0, and the step learns "
    "only from the other groups.",
    healthy="share of groups with equal rewards: below {limit}, or {nearly} if a rare or a common reward and the size "
    "of the groups explain more than {limit}; groups that training has led to a high reward do not count",
    fix="[grpo.resample (dynamic sampling), ]prompts of medium difficulty, a finer reward, sampling.temperature = 1.0",
    source="DAPO 2503.14476; TRL's frac_reward_zero_std; miles",
    explains=["zero-gradient", "kl-flat"],
)
def zero_variance_groups(data: RunData, *, limit: float = Share(0.5), nearly: float = Share(0.8)) -> Reading | None:
    found = groups(data.rows, data.rows["reward"])
    if len(found.step) < 8 or not repeated(data.rows):
        return None
    equal = found.sd < EQUAL
    if _has_risen(data.rows):
        equal &= ~solved(data.rows, found)
    points = mean_by_step(found.step, equal)
    first = since(points, smoothed(points).value > limit, 5)
    share = Share(points.after(first).value.mean())  # that a few steps exceed the limit can be chance
    # Pairs, or a reward that few responses get, leave many groups equal although prompts are neither too easy nor hard.
    by_chance = mean_by_step(found.step, equal_by_chance(data.rows, data.rows["reward"], found)).after(first)
    unhealthy = first is not None and share > (nearly if by_chance.value.mean() > limit else limit)
    return Reading(share, unhealthy, first, data.step_evidence([first]), curve=Curve(points, high=limit))


def _has_risen(rows: Rows) -> bool:
    """Return whether the mean reward has risen by half of what it lacked, or of the deviation it had at the start."""
    mean, spread = rows.mean("reward"), rows.by_step(rows["reward"], np.std)
    lacked = float(np.nanmax(rows["reward"])) - mean.first()
    return mean.last() - mean.first() > min(spread.first(), lacked) / 2


def _above_most(value: float | None, data: RunData, reading: Reading) -> float:
    """Clip at twice what 95 of 100 rewards stay below, or at what the run has if that is lower."""
    limit = rounded(2 * float(np.nanquantile(np.abs(data.rows.trained_reward), 0.95)))
    return limit if value is None else min(value, limit)


@rule(
    number=47,
    needs=["rows.reward"],
    title="The reward has outliers",
    cause="The most extreme reward ({value}) is {seen} times the typical spread away from the median: single responses "
    "decide what is learned.",
    healthy="|reward − median| / (1.48 · median absolute deviation): below {limit}, except for a single response, less "
    "than {rare} of all, or one of the few values that all rewards have, unless it is far beyond the usual ones",
    fix="shaping.clip, or shaping.scale = true",
    settings={"shaping.clip": _above_most},
    source="The N implementation details of RLHF with PPO; Secrets of RLHF 2307.04964; own threshold",
    explains=["gradient-spike", "reward-is-noise", *MISLED],
)
def reward_outliers(data: RunData, *, limit: float = 15.0, rare: float = Share(1e-4)) -> Reading | None:
    reward = data.rows.trained_reward
    known = np.flatnonzero(np.isfinite(reward))
    can_be = ~_are_verdicts(reward[known])
    if len(known) < 50 or not can_be.any():
        return None
    inner = within(data.rows, reward)[known]
    spread = float(1.4826 * np.median(np.abs(inner - np.median(inner))))
    spread = max(spread, float(np.subtract(*np.quantile(inner, [0.95, 0.05]))) / 3.29)
    if spread < 1e-9:
        return None
    # A reward whose scale grows has no outliers for that reason.
    distance = np.full(len(reward), np.nan)
    distance[known] = np.abs(inner - np.median(inner))
    by_step = smoothed(data.rows.by_step(distance, np.median))
    scale = np.maximum(spread, 1.4826 * np.interp(data.rows.step[known], *by_step))
    away = distance[known] = np.where(can_be, distance[known] / scale, 0.0)
    worst, beyond = known[np.argsort(-away)], known[away > limit]
    first = earliest(data.rows.step[beyond])
    words = {"value": float(reward[worst[0]])}
    curve = Curve(data.rows.by_step(distance, np.max), high=limit)
    between = of_events(data.rows.by_step(reward), np.unique(data.rows.step[beyond]))
    evidence = data.rows.evidence(worst)
    unhealthy = len(beyond) >= 2 and len(beyond) >= rare * len(known)
    return Reading(float(away.max()), unhealthy, first, evidence, words, curve, between=between)


def _are_verdicts(reward: Array) -> Array:
    """Return [n] whether a reward is one of the few values that nearly all rewards have.

    A rare value that is far from the usual ones, relative to what these are apart, is not.
    """
    rounded = reward.round(6) + 0.0  # -0.0 is 0.0
    values, counts = (column.to_numpy() for column in pc.value_counts(pa.array(rounded)).flatten())
    most = np.argsort(-counts, kind="stable")[:VERDICTS]
    if counts[most].sum() < NEARLY_ALL * len(reward):
        return np.zeros(len(reward), bool)
    verdicts, usual = values[most], values[counts >= USUAL * len(reward)]
    if len(usual) > 1:
        verdicts = verdicts[np.abs(verdicts - usual.mean()) <= REACH * np.ptp(usual)]
    return np.isin(rounded, verdicts)


@rule(
    number=49,
    needs=["rows.reward", "rows.split"],
    min_steps=12,
    title="The reward is over-optimised",
    cause="The training reward rises by {gain}, but the held-out reward falls by {seen} from its maximum: the policy "
    "exploits the reward's mistakes.",
    healthy="fall of the held-out reward from its maximum: below {limit} of its gain before, or no more than chance "
    "explains",
    fix="return to the best checkpoint, [raise kl.coef, ]use a larger reward model or several",
    settings={"kl.coef": stronger(grown), "kl.target": tighter(grown)},
    source="Gao et al. 2210.10760",
    training_only=True,
)
def over_optimised(data: RunData, *, limit: float = 0.3) -> Reading | None:
    held_out = data.evaluation.mean("reward") if len(data.evaluation) else None
    if held_out is None or len(held_out) < 5:
        return Reading(float("nan"), False, undecided=NOT_EVALUATED)
    train = data.rows.mean("reward")
    smooth = smoothed(held_out, 3)
    best = int(np.argmax(smooth.value))
    fall, gain = float(smooth.value[best] - smooth.value[-1]), float(train.last() - train.first())
    size = max(abs(float(smooth.value[best] - smooth.value[0])), float(np.nanstd(data.evaluation["reward"])) / 4)
    unhealthy = fall > limit * size and gain > 0 and best < len(smooth) - 2 and trend(train).p < 0.05
    # The maximum of many noisy values is above what any of them is in truth.
    peak, end = held_out.step[max(0, best - 1) : best + 2], held_out.step[-2:]
    unhealthy = unhealthy and _fall_in_errors(data.evaluation, peak, end) > clear_of(data.chance, len(held_out))
    evidence = data.evaluation.evidence(np.searchsorted(data.evaluation.step, smooth.step[[best, -1]]))
    curve = Curve(held_out, name=Phrase("held-out reward"))
    affected = Affected(data.evaluation, np.ones(len(data.evaluation), bool), f'split == "{HELD_OUT}"')
    return Reading(fall, unhealthy, int(smooth.step[best]), evidence, {"gain": gain}, curve, affected=affected)


def _fall_in_errors(rows: Rows, early: Array, late: Array) -> float:
    """Return how much higher the mean reward of some steps is than that of others, in standard errors.

    The responses to a prompt are one observation, so that a prompt that is asked at both times is compared with itself.
    """
    reward, known = rows["reward"], np.isfinite(rows["reward"])
    parts = [known & np.isin(rows.step, steps) for steps in (early, late)]
    means = [float(reward[part].mean()) for part in parts]
    weights = [np.where(part, (reward - mean) / part.sum(), 0.0) for part, mean in zip(parts, means, strict=True)]
    error = np.sqrt(np.sum(np.bincount(rows.prompt, weights[0] - weights[1]) ** 2))
    return (means[0] - means[1]) / max(float(error), 1e-12)


@rule(
    number=53,
    needs=["rows.reward", "rows.reward_parts"],
    min_steps=5,
    title="One part of the reward dominates",
    cause="{part} accounts for {seen} of the variance of the reward: the other parts are saturated, or their weights "
    "are too small to matter.",
    healthy="share of the reward's variance within a step that comes from one part: below {limit}, or another part "
    "that has at least {other} of it, too",
    fix="weight the parts by their standard deviation (rewards.weight), or remove parts that do not matter",
    source="rldoctor; NeMo-RL (GDPO)",
    explains=["kl-explosion", "penalty-mis-scaled", "distinct-collapse", "template-collapse", "repetition-loops",
              *CRITIC],
    severity="note",
)  # fmt: skip
def one_part_dominates(data: RunData, *, limit: float = Share(0.97), other: float = Share(0.05)) -> Reading | None:
    rows = data.sample.rows
    parts = _parts(rows)
    if not parts or not (_are_certain(data) or _add_up(list(parts.values()), within(rows, rows["reward"]))):
        return None
    reward = within(rows, rows.trained_reward)
    shares = {name: _explained(values, reward) for name, values in parts.items()}
    part = max(shares, key=lambda name: shares[name])
    others = max(share for name, share in shares.items() if name != part)
    unhealthy = shares[part] > limit and others < other
    evidence = rows.highest(np.abs(parts[part]))
    curve = Curve(_explained_by_step(rows, parts[part], reward), high=limit)
    return Reading(Share(shares[part]), unhealthy, int(rows.steps[0]), evidence, {"part": part}, curve)


@rule(
    number=91,
    needs=["rows.reward", "rows.reward_parts"],
    min_steps=3,
    title="A part of the reward is the same for all responses",
    cause="{part} gave {value} to {seen} of the responses, while other parts differ: it teaches nothing. Either no "
    "response ever earns it, its function fails on all of them, or the policy could do all that it asks for from the "
    "start.",
    healthy="share of responses that get the most frequent score of a part: at most {limit}",
    fix="score a response that must earn this part, and one that must not, by hand; remove the part if both are right",
    source="own threshold",
    explains=["one-part-dominates"],
    severity="note",
)
def part_constant(data: RunData, *, limit: float = Share(0.999)) -> Reading | None:
    rows = data.sample.rows
    parts = {name: values for name, values in rows.reward_parts.items() if np.isfinite(values).sum() >= MIN_SCORES}
    if len(parts) < 2 or not any(map(_differs, parts.values())) or not _are_certain(data):
        return None
    is_usual = {name: values == _most_frequent(values) for name, values in parts.items()}
    shares = {name: is_usual[name].sum() / np.isfinite(values).sum() for name, values in parts.items()}
    part = max(shares, key=lambda name: shares[name])
    known = np.isfinite(parts[part])
    curve = Curve(mean_by_step(rows.step[known], is_usual[part][known].astype(float)), high=limit)
    words: Words = {"part": part, "value": _most_frequent(parts[part])}
    first = int(rows.steps[0])
    return Reading(Share(shares[part]), shares[part] > limit, first, data.step_evidence([first]), words, curve)


def _most_frequent(values: Array) -> float:
    scores, counts = np.unique(values[np.isfinite(values)], return_counts=True)
    return float(scores[counts.argmax()])


def _are_certain(data: RunData) -> bool:
    """Return whether parts of the reward are such; some importers take every number beside the reward for one."""
    return data.recorded("info.config") or data.info.get("format") == "trl"


def _parts(rows: Rows) -> dict[str, Array]:
    """Return the parts of the reward, [n] each minus the mean of their group; empty if there are not two or more.

    Other numbers that a trainer logs with a response, such as the level of the prompt, are the same for a whole group.
    """
    each = rows.reward_parts
    apart = {name: within(rows, values) for name, values in each.items()}
    of_prompt = {name for name in each if repeated(rows) and _differs(each[name]) and not _differs(apart[name])}
    found = {name: values for name, values in apart.items() if name not in of_prompt}
    return found if len(found) > 1 else {}


def _differs(values: Array) -> bool:
    known = values[np.isfinite(values)]
    return bool(len(known)) and float(known.max() - known.min()) > 1e-9


def _add_up(parts: Sequence[Array], reward: Array) -> bool:
    """Return whether a weighted sum of several parts is the reward, and not a single one of them alone is."""
    there = np.isfinite(reward)
    columns, goal = np.nan_to_num(np.stack(parts, 1)[there]), reward[there]
    weights = np.linalg.lstsq(columns, goal, rcond=None)[0]
    used = np.abs(weights) * np.std(columns, 0) > USED * np.std(goal)
    return bool(np.sum((goal - columns @ weights) ** 2) < USED * np.sum(goal**2)) and int(used.sum()) > 1


def _explained(part: Array, reward: Array) -> float:
    """Return the share of the variance of the reward that one of its parts explains."""
    there = np.isfinite(part) & np.isfinite(reward)
    varies = there.sum() > 50 and np.std(part[there]) > 0 and np.std(reward[there]) > 0
    return float(np.corrcoef(part[there], reward[there])[0, 1]) ** 2 if varies else 0.0


def _explained_by_step(rows: Rows, part: Array, reward: Array) -> Series:
    """Return by step the squared correlation of two columns [n] of mean 0."""
    products = (rows.by_step(product, np.sum) for product in (part * reward, part**2, reward**2))
    both, one, other = together(*products)
    return series(both.step, both.value**2 / (one.value * other.value))


@rule(
    number=54,
    needs=["rows.reward", "steps.text/distinct_2|rows.response"],
    min_steps=12,
    training_only=True,
    title="One kind of response exhausts the reward",
    cause="The reward stays at {seen}, its standard deviation within a step has shrunk to {share} of the start, and "
    "the responses look alike (distinct word pairs {before} → {after}).",
    healthy="mean reward: with a standard deviation within a step above {limit} times its start, or responses that "
    "stay different",
    fix="read the responses: if they are what you want, stop; otherwise change the reward",
    source="RAGEN 2504.20073; own threshold",
    explains=["zero-variance-groups", "zero-gradient", "distinct-collapse", "entropy-collapse", "pattern-spreading"],
)
def reward_exhausted(data: RunData, *, limit: float = 0.1) -> Reading | None:
    rows = data.rows
    spread = rows.by_step(rows["reward"], np.std)
    logged = data.metric("text/distinct_2")
    different = logged if len(logged) else distinct(data.sample.rows)
    if not len(different) or spread.first() < 1e-9:
        return None
    share, before, after = spread.last() / spread.first(), different.first(), different.last()
    mean = rows.mean("reward")
    unhealthy = share < limit and after < 0.5 * before and mean.last() > mean.first()
    relative = Series(spread.step, spread.value / spread.first())
    curve = Curve(relative, low=limit, name=Phrase("standard deviation of the reward / at the start"))
    first = since(spread, spread.value < 0.2 * spread.first(), 3)
    evidence = data.step_evidence(spread.step[-1:])
    words = {"share": Percent(share), "before": before, "after": after}
    return Reading(mean.last(), unhealthy, first, evidence, words, curve)


@rule(
    number=56,
    needs=["rows.reward"],
    min_steps=LONG,
    title="The reward falls",
    cause="The reward falls from {before} to {seen} over the run: a sign is flipped, the learning rate destroys the "
    "policy, or the reward itself changes.",
    healthy="mean reward at the end: not clearly below its start, and at least half of what it had gained at its peak",
    fix="check the signs of reward and advantage on two responses by hand; then lower optimizer.learning_rate",
    source="OpenAI, Fine-tuning GPT-2 from human preferences; own threshold",
    explains=[
        "kl-explosion",
        "update-kl-large",
        "ratio-blow-up",
        "clip-fraction-high",
        *(name for name in RUNAWAY if name not in ("verifier-dead", "rollouts-fail")),
    ],
    windows=True,
)
def reward_falls(data: RunData) -> Reading | None:
    found, points = _fall(data), data.rows.mean("reward")
    if data.whole is not data or found.unhealthy:
        return found
    # The reward can rise first: then the steps since its peak are judged as a part of the run.
    peak = int(points.step[np.argmax(smoothed(points).value)])
    late = data.part(peak, data.chance)
    fell = _fall(late) if peak > points.step[0] and len(late.rows.steps) >= LONG else found
    return replace(fell, window=(peak, int(points.step[-1]))) if fell.unhealthy else found


def _fall(data: RunData) -> Reading:
    rows = data.rows
    points = rows.mean("reward")
    spread = float(np.nanmedian(rows.by_step(rows["reward"], np.std).value))
    before, now = points.first(), points.last()
    start = data.whole.rows.mean("reward").first()
    fallen = min(before - 0.4 * max(spread, 1e-9), (before + start) / 2)  # in a part of the run: half of its gain
    # The reward can fall at once and stay low; it must still be low at the end.
    first = since(points, smoothed(points).value < fallen, max(5, len(points) // 4))
    unhealthy = first is not None and now < fallen and is_lower(data, points, first)
    evidence = data.step_evidence(points.step[-1:])
    return Reading(
        now, unhealthy, first, evidence, {"before": before}, Curve(points, low=fallen, name=Phrase("mean reward"))
    )
