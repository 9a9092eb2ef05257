"""Rules on the entropy and the diversity of the responses."""

import zlib
from itertools import pairwise

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.finding import Curve, Percent, Phrase, Reading, Share, Words
from cavesson.doctor.groups import within
from cavesson.doctor.rows import Rows
from cavesson.doctor.rule import rule
from cavesson.doctor.rules.consequences import CRITIC
from cavesson.doctor.series import Array, Series, since, smoothed, together, trend

BUDGET = 4000
"""Words of a step that distinct-2 is measured over: more words have fewer new pairs, whatever their variety."""


def entropy(data: RunData) -> Series:
    """Return the mean entropy per token by step, or −log π of the sampled tokens if entropy was not recorded."""
    if data.has("rows.entropy"):
        return data.rows.mean("entropy")
    if data.has("steps.policy/entropy"):
        return data.metric("policy/entropy")
    sample = data.sample
    return sample.mean_by_step(-sample["logprob"])


def distinct(rows: Rows) -> Series:
    """Return by step the share of distinct word pairs over a fixed number of words."""
    steps, values = [], []
    responses = rows.texts("response")
    edges = np.append(np.searchsorted(rows.step, rows.steps), len(rows))
    totals = [sum(len((responses[i] or "").split()) for i in range(a, b)) for a, b in pairwise(edges)]
    budget = min(BUDGET, int(np.quantile(totals, 0.1))) if totals else 0
    for step, (start, stop) in zip(rows.steps.tolist(), pairwise(edges), strict=True):
        pairs: list[tuple[str, str]] = []
        for text in responses[start:stop]:
            words = (text or "").split()
            pairs += pairwise(words)
        if budget >= 50 and len(pairs) >= budget // 2:
            steps.append(step)
            values.append(len(set(pairs[: budget // 2])) / (budget // 2))
    return Series(np.array(steps, np.int64), np.array(values))


@rule(
    row=57,
    needs=["rows.entropy|tokens.logprob|steps.policy/entropy", "rows.reward"],
    least_steps=10,
    title="The entropy has collapsed",
    cause="The policy's entropy fell from {before} to {seen} nats per token while the reward rises no more: it no "
    "longer tries anything, so nothing new can be learned.",
    healthy="entropy per token, in nats: above 0.1 of its start, or a reward that still rises (falling alone is "
    "normal)",
    fix="a wider upper clip (grpo.clip_high = 0.28), an entropy bonus (ppo.entropy_coef), fewer epochs of SFT",
    source="2505.22617; DAPO 2503.14476; rldoctor",
    explains=["zero-variance-groups", "zero-gradient", "distinct-collapse", "template-collapse", "repetition-loops"],
)
def entropy_collapse(data: RunData) -> Reading | None:
    points = entropy(data)
    if len(points) < 10 or points.first() < 1e-3:
        return None
    reward = data.rows.mean("reward")
    half = reward.where(reward.step >= np.median(reward.step))
    spread = float(np.nanmedian(data.rows.by_step(data.rows["reward"], lambda values: float(np.std(values))).value))
    rising = trend(half).change > 0.1 * spread and trend(half).p < 0.05
    gained = reward.last() - reward.first() > 0.5 * float(np.std(data.rows["reward"][data.rows.step <= reward.step[1]]))
    low = points.value < 0.1 * points.first()
    first = since(points, low, 5)
    sick = first is not None and not rising and not gained
    return Reading(
        points.last(),
        sick,
        first,
        data.step_evidence(points.step[-1:]),
        {"before": points.first()},
        curve=Curve(points, low=0.1 * points.first()),
    )


@rule(
    row=58,
    needs=["rows.entropy|tokens.logprob|steps.policy/entropy"],
    least_steps=10,
    title="The entropy explodes",
    cause="The policy's entropy rose from {before} to {seen} nats per token: it is forgetting how to write.",
    healthy="entropy per token, in nats: below 1.5 times its start, or less than 0.5 above it",
    fix="lower optimizer.learning_rate, ppo.entropy_coef = 0, look for a sampler that disagrees",
    source="2505.22617; prime-rl, docs/training.md",
    explains=["reward-falls", "likelihood-displacement", "truncated", "kl-explosion", *CRITIC],
)
def entropy_explosion(data: RunData) -> Reading | None:
    points = entropy(data)
    if len(points) < 10 or points.first() < 1e-3:
        return None
    limit = max(1.5 * points.first(), points.first() + 0.5)
    first = since(smoothed(points), smoothed(points).value > limit, 4)
    sick = first is not None and trend(points).change > 0
    began = since(smoothed(points), smoothed(points).value > (points.first() + limit) / 2, 4)
    return Reading(
        points.last(),
        sick,
        began,
        data.step_evidence(points.step[-1:]),
        {"before": points.first()},
        curve=Curve(points, high=limit),
    )


@rule(
    row=59,
    needs=["rows.response"],
    least_steps=8,
    title="The responses lose their variety",
    cause="The share of different pairs of words falls from {before} to {seen}: the policy says the same things in the "
    "same words.",
    healthy="distinct-2 over a fixed number of words: above 0.7 of its start",
    fix="raise kl.coef, sampling.temperature = 1.0, look at what the reward likes (a pattern, a length)",
    source="LMFlow's RAFT (0.39 → 0.22); 2310.06452",
    explains=["template-collapse", "kl-explosion", "truncated"],
)
def distinct_collapse(data: RunData) -> Reading | None:
    points = distinct(data.sample.rows)
    if len(points) < 8:
        return None
    before = points.first()
    sick = points.last() < 0.7 * before and trend(points).p < 0.01
    return Reading(
        points.last(),
        sick,
        since(points, points.value < 0.8 * before, 3),
        data.step_evidence(points.step[-1:]),
        {"before": before},
        curve=Curve(points, low=0.7 * before),
    )


@rule(
    row=60,
    needs=["rows.prompt", "rows.response"],
    least_steps=8,
    title="The answers no longer depend on the prompt",
    cause="Two responses to different prompts are as alike ({other}) as two to the same prompt ({same}) in the last "
    "steps, which was not so at the start.",
    healthy="likeness within a prompt less likeness between prompts, late / early: above 0.2",
    fix="a reward that looks at the prompt; grpo.resample drops prompts whose responses all earn the same",
    source="2604.06268",
)
def template_collapse(data: RunData) -> Reading | None:
    rows = data.sample.rows
    early, late = (rows.where(part) for part in (_third(rows, 0), _third(rows, 2)))
    before, after = _belonging(early), _belonging(late)
    if before is None or after is None or before[0] - before[1] < 0.05:
        return None
    left = max(0.0, after[0] - after[1]) / (before[0] - before[1])
    sick = left < 0.2 and after[1] > 1.5 * before[1]
    words: Words = {"same": after[0], "other": after[1]}
    return Reading(
        left,
        sick,
        int(late.steps[0]),
        data.step_evidence(late.steps[-1:]),
        words,
        curve=Curve(_left_of(rows, before[0] - before[1]), low=0.2),
    )


def _left_of(rows: Rows, start: float, stretches: int = 8) -> Series:
    """Return by segment of steps the similarity within prompts minus that between prompts, relative to ``start``."""
    several = np.array_split(rows.steps, min(stretches, len(rows.steps)))
    parts = [rows.where(np.isin(rows.step, steps)) for steps in several]
    found = [(int(part.steps[0]), _belonging(part)) for part in parts]
    known = [(step, max(0.0, alike[0] - alike[1]) / start) for step, alike in found if alike is not None]
    return Series(np.array([step for step, _ in known], np.int64), np.array([left for _, left in known]))


def _third(rows: Rows, which: int) -> Array:
    low, high = np.quantile(rows.steps, [which / 3, (which + 1) / 3])
    return np.asarray((rows.step >= low) & (rows.step <= high))


def _belonging(rows: Rows, pairs: int = 400) -> tuple[float, float] | None:
    """Return the mean Jaccard index of the words of two responses: to the same prompt, and to different prompts."""
    prompts = rows.texts("prompt")
    words = [set((text or "").lower().split()) for text in rows.texts("response")]
    asked: dict[str | None, list[int]] = {}
    for i, prompt in enumerate(prompts):
        asked.setdefault(prompt, []).append(i)
    generator = np.random.default_rng(0)
    several = [members for members in asked.values() if len(members) >= 2]
    if len(several) < 3 or len(asked) < 6:
        return None
    chosen = generator.integers(0, len(several), pairs)
    same = [_alike(words, *generator.choice(several[i], 2, replace=False)) for i in chosen]
    some = generator.integers(0, len(words), (pairs, 2))
    other = [_alike(words, i, j) for i, j in some if prompts[i] != prompts[j]]
    return float(np.mean(same)), float(np.mean(other))


def _alike(words: list[set[str]], i: int, j: int) -> float:
    union = words[i] | words[j]
    return len(words[i] & words[j]) / len(union) if union else 1.0


@rule(
    row=61,
    needs=["rows.repetition|rows.response"],
    least_steps=5,
    title="The responses repeat themselves",
    cause="{seen} {what}, {before} at the start: the policy goes round in circles.",
    healthy="share of repeated 4-grams in a response, or of what compression leaves out where no tokens were recorded: "
    "below 30 %, or below twice its start",
    fix="a penalty for repetition in the reward, a smaller sampling.max_new_tokens, a reward model that has seen loops",
    source="StackLLaMA; rlprobe",
    explains=["distinct-collapse", "truncated", "template-collapse", "kl-explosion", "pattern-spreading"],
)
def repetition_loops(data: RunData) -> Reading | None:
    if data.has("rows.repetition"):
        rows, what = data.rows, "of the runs of four tokens in a response have been there before"
        values = rows["repetition"]
    else:
        rows, what = data.sample.rows, "of a response can be left out because it stands there already"
        values = _compressed(rows)
    points = rows.by_step(values)
    if len(points) < 5:
        return None
    limit = max(0.3, 2 * points.first())
    first = since(smoothed(points), smoothed(points).value > limit, 4)
    worst = np.argsort(-np.nan_to_num(values))[:3]
    return Reading(
        Share(points.last()),
        first is not None,
        first,
        data.rollout_evidence(worst, rows),
        {"before": Share(points.first()), "what": Phrase(what)},
        curve=Curve(points, high=limit),
    )


def _compressed(rows: Rows) -> Array:
    """Return [n] the share of a long response that compression with zlib saves; NaN for a short one."""
    texts = [(text or "").encode("utf-8", "surrogatepass") for text in rows.texts("response")]
    return np.array([max(0.0, 1 - 2 * len(zlib.compress(t)) / len(t)) if len(t) >= 200 else np.nan for t in texts])


@rule(
    row=62,
    needs=["rows.reward", "rows.group", "steps.optim/grad_norm"],
    least_steps=20,
    title="Echo trap: variety falls, then the gradient breaks out",
    cause="The spread of the rewards within a prompt fell to {seen} of what it was, and gradient spikes follow from "
    "step {step} on.",
    healthy="spread of the reward within a prompt, relative to its start: above 30 % before any gradient spike",
    fix="drop prompts with little spread, grpo.clip_high = 0.28 (a wider upper clip), update.epochs = 1",
    source="RAGEN 2504.20073",
    explains=["gradient-spike", "entropy-collapse"],
)
def echo_trap(data: RunData) -> Reading | None:
    spread = data.rows.by_step(within(data.rows, data.rows["reward"]), lambda values: float(np.std(values)))
    spread, norm = together(spread, data.metric("optim/grad_norm"))
    if len(spread) < 20 or spread.first() < 1e-9:
        return None
    share = smoothed(spread).value / spread.first()
    narrow = since(spread, share < 0.3, 5)
    if narrow is None:
        return Reading(Percent(share[-1]), False)
    typical = float(np.median(norm.value[norm.step <= narrow]))
    spikes = norm.step[(norm.step > narrow) & (norm.value > 5 * typical)]
    return Reading(
        Percent(share[-1]),
        len(spikes) >= 2,
        narrow,
        data.step_evidence(spikes[:3]),
        {"step": int(spikes[0]) if len(spikes) else 0},
        curve=Curve(Series(spread.step, share), low=0.3),
    )


@rule(
    row=63,
    needs=["rows.reward", "rows.length", "rows.k1", "tokens.logprob"],
    least_steps=15,
    title="The policy settles into one pattern",
    cause="Reward, length and KL rise together while the responses become ever more probable (−log π {before} → "
    "{seen} nats per token): the policy repeats one safe form.",
    healthy="−log π per token, in nats: not falling while reward, length and KL all rise",
    fix="judge by KL, length and perplexity beside the reward; raise kl.coef",
    source="Secrets of RLHF 2307.04964",
    severity="note",
)
def pattern_collapse(data: RunData) -> Reading | None:
    sample = data.sample
    surprise = sample.mean_by_step(-sample["logprob"])
    rising = [data.rows.mean(name) for name in ("reward", "length", "k1")]
    found = [trend(points) for points in rising]
    grew = all(one.change > 0 and one.p < 0.01 for one in found)
    longer = rising[1].last() > 1.2 * rising[1].first()
    down = trend(surprise)
    sick = grew and longer and down.p < 0.01 and surprise.last() < 0.6 * surprise.first()
    return Reading(
        surprise.last(),
        sick,
        int(rising[1].step[len(rising[1]) // 3]),
        data.step_evidence(rising[1].step[[0, -1]]),
        {"before": surprise.first()},
        curve=Curve(surprise),
    )
