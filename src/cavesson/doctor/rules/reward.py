"""Rules on the reward: what it measures, and how the policy exploits it."""

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.finding import Curve, Percent, Phrase, Reading, Share
from cavesson.doctor.groups import groups, repeated, within
from cavesson.doctor.rows import Rows
from cavesson.doctor.rule import rule
from cavesson.doctor.rules.consequences import CRITIC, RUNAWAY
from cavesson.doctor.series import Array, Series, earliest, series, since, smoothed, together, trend


@rule(
    row=45,
    needs=["rows.reward", "rows.group"],
    least_steps=2,
    title="The reward judges the prompt, not the answer",
    cause="{seen} of the variance of the reward lies between prompts, not between the answers to the same prompt: what "
    "the policy does hardly counts.",
    healthy="share of the reward's variance between prompts: below 80 %",
    fix="shaping.subtract_query = true, or a baseline per prompt (GRPO, RLOO)",
    source="TRL's How-to-train FAQ; own threshold",
    explains=["kl-flat", "reward-is-noise", *CRITIC],
)
def query_dominated(data: RunData) -> Reading | None:
    rows, reward = data.rows, data.rows["reward"]
    prompt = rows["group"]
    there = np.isfinite(reward) & np.isfinite(prompt)
    # As the policy changes over time, rewards are measured relative to the mean of their step.
    value = reward - np.interp(rows.step, *rows.mean("reward"))
    _, key, count = np.unique(prompt[there], return_inverse=True, return_counts=True)
    repeated = count[key] >= 2
    if repeated.sum() < 40 or np.var(value[there]) < 1e-10:
        return None
    mean = np.bincount(key, value[there]) / count
    inside = float(np.sum((value[there] - mean[key])[repeated] ** 2) / np.sum((1 - 1 / count[key])[repeated]))
    share = max(0.0, 1 - inside / float(np.var(value[there][repeated])))
    order = np.argsort(mean)
    chance = float(np.sqrt(inside / np.median(count)))
    # Show a response to the prompt with the lowest mean reward, and two to the one with the highest.
    shown = np.flatnonzero(there)[[*np.flatnonzero(key == order[0])[:1], *np.flatnonzero(key == order[-1])[:2]]]
    return Reading(
        Share(share),
        share > 0.8,
        int(rows.steps[0]),
        data.rollout_evidence(shown),
        curve=Curve(
            Series(np.arange(1, len(order) + 1), mean[order]),
            -2 * chance,
            2 * chance,
            Phrase("mean reward of each prompt less that of its step; green: what chance makes of equal prompts"),
            Phrase("prompts, from the least reward to the most"),
        ),
    )


@rule(
    row=46,
    needs=["rows.reward", "rows.group"],
    algorithms=["grpo", "rloo"],
    title="Groups without any difference",
    cause="In {seen} of the groups all responses have the same reward: their advantages are 0, and the step learns "
    "from the rest alone.",
    healthy="share of groups with equal rewards: below 50 %",
    fix="grpo.resample (dynamic sampling), prompts of middling difficulty, a finer reward, sampling.temperature = 1.0",
    source="DAPO 2503.14476; TRL's frac_reward_zero_std; miles",
    explains=["zero-gradient", "kl-flat"],
)
def zero_variance_groups(data: RunData) -> Reading | None:
    step, _, _, sd = groups(data.rows, data.rows["reward"])
    if len(step) < 8 or not repeated(data.rows):
        return None
    same = (sd < 1e-9).astype(float)
    steps, where = np.unique(step, return_inverse=True)
    points = Series(steps, np.bincount(where, same) / np.bincount(where))
    smooth = smoothed(points)
    first = since(smooth, smooth.value > 0.5, 5)
    seen = points.last() if first is None else float(points.value[points.step >= first].mean())
    return Reading(
        Share(seen),
        first is not None,
        first,
        data.step_evidence([first]),
        curve=Curve(points, high=0.5),
    )


@rule(
    row=47,
    needs=["rows.reward"],
    title="The reward has outliers",
    cause="The most extreme reward ({value}) lies {seen} times the typical spread away from the median: single "
    "responses decide what is learned.",
    healthy="|reward − median| / (1.48 · median absolute deviation): below 15, but for a single response",
    fix="shaping.clip, or shaping.scale = true",
    source="The N implementation details of RLHF with PPO; Secrets of RLHF 2307.04964; own threshold",
    explains=["gradient-spike", "reward-is-noise", "reward-falls", *CRITIC],
)
def reward_outliers(data: RunData) -> Reading | None:
    reward = data.rows["reward"]
    known = np.flatnonzero(np.isfinite(reward))
    if len(known) < 50:
        return None
    inner = within(data.rows, reward)[known]
    spread = float(1.4826 * np.median(np.abs(inner - np.median(inner))))
    spread = max(spread, float(np.subtract(*np.quantile(inner, [0.95, 0.05]))) / 3.29)
    if spread < 1e-9:
        return None
    away = np.abs(inner - np.median(inner)) / spread
    worst = known[np.argsort(-away)]
    distance = np.full(len(reward), np.nan)
    distance[known] = away
    return Reading(
        float(away.max()),
        int(np.sum(away > 15)) >= 2,
        earliest(data.rows.step[known[away > 15]]),
        data.rollout_evidence(worst[:3]),
        {"value": float(reward[worst[0]])},
        curve=Curve(data.rows.by_step(distance, np.max), high=15.0),
    )


@rule(
    row=49,
    needs=["rows.reward", "rows.split"],
    least_steps=12,
    title="The reward is over-optimised",
    cause="While the training reward rises by {gain}, the held-out reward falls by {seen} from its best: the policy "
    "learns the reward's mistakes.",
    healthy="fall of the held-out reward from its best: below 0.3 of its gain before",
    fix="stop at the best checkpoint, raise kl.coef, a larger reward model or several",
    source="Gao et al. 2210.10760",
)
def over_optimised(data: RunData) -> Reading | None:
    held_out = data.evaluation.mean("reward") if len(data.evaluation) else None
    if held_out is None or len(held_out) < 5:
        return None
    train = data.rows.mean("reward")
    smooth = smoothed(held_out, 3)
    best = int(np.argmax(smooth.value))
    fall, gain = float(smooth.value[best] - smooth.value[-1]), float(train.last() - train.first())
    size = max(abs(float(smooth.value[best] - smooth.value[0])), float(np.nanstd(data.evaluation["reward"])) / 4)
    sick = fall > 0.3 * size and gain > 0 and best < len(smooth) - 2 and trend(train).p < 0.05
    return Reading(
        fall,
        sick,
        int(smooth.step[best]),
        data.rollout_evidence(np.searchsorted(data.evaluation.step, smooth.step[[best, -1]]), data.evaluation),
        {"gain": gain},
        curve=Curve(held_out, name=Phrase("held-out reward")),
    )


@rule(
    row=51,
    needs=["rows.reward", "rows.length"],
    least_steps=8,
    title="The reward pays for length",
    cause="Within a step, length and reward go together (Spearman {seen}), and the responses grew from {before} to "
    "{after} tokens: the reward is bought with length.",
    healthy="rank correlation of length and reward within a step: below 0.6, or responses that grow by less than 25 %; "
    "more, where answers need to be longer",
    fix='a reward that does not grow with the length (subtract what length explains), grpo.overlong = "penalty"',
    source="2310.03716; Secrets of RLHF 2307.04964; rlprobe",
    explains=["truncated", "repetition-loops", "kl-explosion", "pattern-spreading", "distinct-collapse", *CRITIC],
)
def length_exploited(data: RunData) -> Reading | None:
    rows = data.rows
    reward, length = within(rows, rows["reward"]), within(rows, rows["length"])
    there = np.isfinite(reward) & np.isfinite(length)
    from scipy import stats  # slow to import

    points = rows.mean("length")
    before, after = points.first(), points.last()
    # The relation shows only while lengths grow: at the limit, all responses have the same length.
    grown = smoothed(points).value > before + 0.9 * (after - before)
    there &= rows.step <= (points.step[int(np.argmax(grown))] if grown.any() else rows.steps[-1])
    if there.sum() < 100 or np.std(length[there]) == 0 or np.std(reward[there]) == 0:
        return None
    found = float(stats.spearmanr(length[there], reward[there]).statistic)
    first = since(points, points.value > 1.15 * before, 4)
    sick = found > 0.6 and after > 1.25 * before and first is not None
    longest = np.argsort(-np.nan_to_num(rows["length"]))[:3]
    return Reading(
        found,
        sick,
        first,
        data.rollout_evidence(longest),
        {"before": before, "after": after},
        curve=Curve(points, high=1.25 * before, name=Phrase("mean length in tokens")),
    )


@rule(
    row=52,
    needs=["rows.reward", "rows.length"],
    least_steps=20,
    algorithms=["grpo"],
    title="Wrong answers grow longer",
    cause="Bad responses are {seen} tokens longer than good ones, and the gap widens: dividing each response's loss by "
    "its length makes long mistakes cheap.",
    healthy="mean length of the worse half − of the better half: not rising",
    fix='grpo.normalise = "token" or "constant" (Dr. GRPO)',
    source="Dr. GRPO 2503.20783; DAPO 2503.14476",
)
def length_bias(data: RunData) -> Reading | None:
    rows = data.rows
    reward, length = within(rows, rows["reward"]), within(rows, rows["length"])
    low = rows.by_step(np.where(reward < 0, length, np.nan))
    high = rows.by_step(np.where(reward > 0, length, np.nan))
    low, high = together(low, high)
    if len(low) < 20:
        return None
    points = Series(low.step, low.value - high.value)
    found = trend(points)
    sick = found.p < 0.01 and found.change > 0.2 * float(np.nanmean(rows["length"])) and points.last() > 0
    longest = np.argsort(-np.nan_to_num(np.where(reward < 0, length, np.nan)))[:3]
    first = since(points, points.value > points.first(), 5)
    return Reading(points.last(), sick, first, data.rollout_evidence(longest), curve=Curve(points))


@rule(
    row=53,
    needs=["rows.reward", "rows.reward_parts"],
    least_steps=5,
    title="One part of the reward decides alone",
    cause="{part} accounts for {seen} of the variance of the reward: the other parts are saturated, or their weights "
    "too small to count.",
    healthy="share of the reward's variance within a step that comes from one part: below 97 %, or another part that "
    "has 5 % of it, too",
    fix="weigh the parts by their spread (rewards.weight), or drop what does not count",
    source="rldoctor; NeMo-RL (GDPO)",
    explains=["kl-explosion", "penalty-mis-scaled", *CRITIC],
    severity="note",
)
def one_part_dominates(data: RunData) -> Reading | None:
    rows = data.sample.rows
    maps = rows.column("reward_parts").to_pylist(maps_as_pydicts="strict")
    names = sorted({name for parts in maps if parts for name in parts})
    if len(names) < 2:
        return None
    reward = within(rows, rows["reward"])
    shares, found = {}, {}
    for name in names:
        values = within(rows, np.array([(parts or {}).get(name, np.nan) for parts in maps], np.float64))
        there = np.isfinite(values) & np.isfinite(reward)
        found[name] = values
        if there.sum() > 50 and np.std(values[there]) > 0 and np.std(reward[there]) > 0:
            shares[name] = float(np.corrcoef(values[there], reward[there])[0, 1]) ** 2
        else:
            shares[name] = 0.0
    part = max(shares, key=lambda name: shares[name])
    others = max(share for name, share in shares.items() if name != part)
    sick = shares[part] > 0.97 and others < 0.05
    return Reading(
        Share(shares[part]),
        sick,
        int(rows.steps[0]),
        data.rollout_evidence(np.argsort(-np.nan_to_num(np.abs(found[part])))[:3], rows),
        {"part": part},
        curve=Curve(_explained_by_step(rows, found[part], reward), high=0.97),
    )


def _explained_by_step(rows: Rows, part: Array, reward: Array) -> Series:
    """Return by step the squared correlation of two columns [n] of mean 0."""
    products = (rows.by_step(product, np.sum) for product in (part * reward, part**2, reward**2))
    both, one, other = together(*products)
    return series(both.step, both.value**2 / (one.value * other.value))


@rule(
    row=54,
    needs=["rows.reward"],
    least_steps=12,
    title="The reward is exhausted by one kind of answer",
    cause="The reward stands at {seen}, its spread within a step has shrunk to {share} of the start's, "
    "and the answers look alike (distinct pairs {before} → {after}).",
    healthy="mean reward: with a spread within a step above 0.1 of its start, or answers that stay different",
    fix="read the answers: is it what was meant? Then stop; else change the reward",
    source="RAGEN 2504.20073; own threshold",
    explains=["zero-variance-groups", "zero-gradient", "distinct-collapse", "entropy-collapse", "pattern-spreading"],
)
def reward_exhausted(data: RunData) -> Reading | None:
    rows = data.rows
    spread = rows.by_step(rows["reward"], lambda values: float(np.std(values)))
    different = data.metric("text/distinct_2")
    if not len(different) or spread.first() < 1e-9:
        return None
    share, before, after = spread.last() / spread.first(), different.first(), different.last()
    mean = rows.mean("reward")
    sick = share < 0.1 and after < 0.5 * before and mean.last() > mean.first()
    return Reading(
        mean.last(),
        sick,
        since(spread, spread.value < 0.2 * spread.first(), 3),
        data.step_evidence(spread.step[-1:]),
        {"share": Percent(share), "before": before, "after": after},
        curve=Curve(
            Series(spread.step, spread.value / spread.first()),
            low=0.1,
            name=Phrase("spread of the reward / at the start"),
        ),
    )


@rule(
    row=55,
    needs=["rows.reward"],
    severity="error",
    least_steps=3,
    title="The reward is the same for nearly every response",
    cause="{seen} of all responses get exactly {value}: the verifier fails on them (an extraction pattern, a template, "
    "a time limit), or nothing ever passes.",
    healthy="share of responses with the lowest reward of the run: below 95 %, or below 90 % at the end",
    fix="score a known good answer by hand; look at a few responses that got {value}",
    source="autocontext pull request 1067; own threshold",
    explains=["zero-variance-groups", "zero-gradient", "kl-flat", *CRITIC],
)
def verifier_dead(data: RunData) -> Reading | None:
    reward = data.rows["reward"][np.isfinite(data.rows["reward"])]
    if len(reward) < 30:
        return None
    floor = float(reward.min())
    share = float(np.mean(reward == floor))
    points = data.rows.by_step((data.rows["reward"] == floor).astype(float))
    return Reading(
        Share(share),
        share > 0.95 and points.last() > 0.9,
        int(points.step[0]),
        data.step_evidence(points.step[:1]),
        {"value": floor},
        curve=Curve(points, high=0.95),
    )


@rule(
    row=56,
    needs=["rows.reward"],
    least_steps=15,
    title="The reward falls",
    cause="The reward falls from {before} to {seen} over the run: a sign is flipped, the learning rate destroys "
    "the policy, or the reward itself changes.",
    healthy="mean reward at the end: not clearly below its start",
    fix="check the signs of reward and advantage on two responses by hand; then lower optimizer.learning_rate",
    source="OpenAI, Fine-tuning GPT-2 from human preferences; own threshold",
    explains=["kl-explosion", *RUNAWAY],
)
def reward_falls(data: RunData) -> Reading | None:
    rows = data.rows
    points = rows.mean("reward")
    spread = float(np.nanmedian(rows.by_step(rows["reward"], lambda values: float(np.std(values))).value))
    fallen = points.first() - 0.4 * max(spread, 1e-9)
    # The reward can fall at once and stay low; it must still be low at the end.
    first = since(smoothed(points), smoothed(points).value < fallen, max(5, len(points) // 4))
    sick = first is not None and points.last() < fallen
    return Reading(
        points.last(),
        sick,
        first,
        data.step_evidence(points.step[-1:]),
        {"before": points.first()},
        curve=Curve(points, low=fallen),
    )
