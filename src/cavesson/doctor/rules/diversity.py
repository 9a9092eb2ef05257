"""Rules on the entropy and the diversity of the responses."""

from dataclasses import replace

import numpy as np
import pyarrow.compute as pc

from cavesson.doctor.data import RunData
from cavesson.doctor.groups import EQUAL, within
from cavesson.doctor.proposal import at_least, calmer, grown, stronger, tighter
from cavesson.doctor.reading import Curve, Reading, Words
from cavesson.doctor.readings import MIN_SHARE, collapse, is_clear
from cavesson.doctor.rows import Rows
from cavesson.doctor.rule import rule
from cavesson.doctor.rules.consequences import CRITIC
from cavesson.doctor.series import Array, Series, since, smoothed, together, trend
from cavesson.findings.words import Percent, Phrase, Share
from cavesson.text.ngrams import NGrams
from cavesson.text.statistics import flat

MANY = float(np.log(100))
"""Entropy of a uniform choice among 100 tokens, in nats. A task may ask for one among fewer, such as labels."""
MANY_RIGHT = 0.1
"""Share of responses with the highest reward from which there are many."""
BUDGET = 4000
"""Words of a step that distinct-2 is measured over: with more words, fewer pairs are new, whatever their variety."""


def entropy(data: RunData) -> Series:
    """Return the mean entropy per token by step; −log π of the sampled tokens if entropy was not recorded.

    A trainer's metric comes last: some trainers count padding.
    """
    if data.has("rows.entropy"):
        return data.rows.mean("entropy")
    if data.has("tokens.logprob"):
        return data.sample.mean_by_step(-data.sample["logprob"])
    return data.metric("policy/entropy")


def distinct(rows: Rows) -> Series:
    """Return by step the share of distinct word pairs over a fixed number of words."""
    steps, (tokens, owner) = rows.steps, flat(rows.words("response"))
    among = np.searchsorted(steps, rows.step)[owner]
    budget = min(BUDGET, int(np.quantile(np.bincount(among, minlength=len(steps)), 0.1))) if len(steps) else 0
    pairs = NGrams(tokens, owner, among).doubled().first(budget // 2)
    enough = pairs.counts(len(steps)) == budget // 2
    return Series(steps, pairs.distinct(len(steps))).where(enough & (budget >= 50))


@rule(
    number=57,
    needs=["rows.entropy|tokens.logprob|steps.policy/entropy", "rows.reward"],
    min_steps=10,
    training_only=True,
    title="The entropy has collapsed",
    cause="The policy's entropy fell from {before} to {seen} nats per token while the reward no longer rises: the "
    "policy no longer explores, so it learns nothing new.",
    healthy="entropy per token, in nats: above {limit} times its start, or a reward that still rises or is the highest "
    "one for {solved} of the responses (a falling entropy alone is normal)",
    fix="[a wider upper clip (grpo.clip_high = 0.28), ][an entropy bonus (ppo.entropy_coef = 0.01), ]fewer epochs of "
    "SFT",
    settings={"grpo.clip_high": at_least(0.28), "rloo.clip_high": at_least(0.28), "ppo.entropy_coef": at_least(0.01)},
    source="2505.22617; DAPO 2503.14476; rldoctor",
    explains=["zero-variance-groups", "zero-gradient", "distinct-collapse", "template-collapse", "repetition-loops",
              "reward-falls", "kl-explosion"],
    windows=True,
)  # fmt: skip
def entropy_collapse(data: RunData, *, limit: float = 0.1, solved: float = Share(0.9)) -> Reading | None:
    points = entropy(data)
    if len(points) < 10 or points.first() < 1e-3:
        return None
    reward = data.rows.mean("reward")
    half = reward.where(reward.step >= np.median(reward.step))
    spread = float(np.nanmedian(data.rows.by_step(data.rows["reward"], np.std).value))
    # What rises again after it has fallen has not been learned.
    rising = trend(half).change > 0.1 * spread and trend(half).p < 0.05 and reward.last() > reward.first()
    begin = data.rows["reward"][data.rows.step <= reward.step[:2].max()]
    gained = reward.last() - reward.first() > 0.5 * float(np.nanstd(begin))
    before, low = points.first(), limit * points.first()
    first = since(points, points.value < low, 5)
    evidence = data.step_evidence(points.step[-1:])
    full = data.rows["reward"] >= np.nanmax(data.rows["reward"]) - EQUAL
    is_solved = data.rows.by_step(full.astype(float)).last(1 / 3) >= solved  # nothing is left to explore
    unhealthy = first is not None and not (rising or gained or is_solved)
    fallen = Series(points.step, np.log(before / np.maximum(points.value, 1e-6)))  # entropy falls by factors
    return Reading(points.last(), unhealthy, first, evidence, {"before": before}, Curve(points, low=low), fallen)


@rule(
    number=58,
    needs=["rows.entropy|tokens.logprob|steps.policy/entropy"],
    min_steps=10,
    training_only=True,
    title="The entropy explodes",
    cause="The policy's entropy is {seen} nats per token ({before} at the start): {what}.",
    healthy="entropy per token, in nats: below {factor} times its start (with a small vocabulary: nearer to its start "
    "than to a uniform choice), or less than {rise} above it; and below {noise} of that of a uniform choice among the "
    "tokens that occur, unless it begins there",
    fix="lower optimizer.learning_rate, [ppo.entropy_coef = 0, ]check whether sampler and trainer disagree",
    settings={"optimizer.learning_rate": calmer(), "ppo.entropy_coef": 0.0},
    source="2505.22617; prime-rl, docs/training.md",
    explains=["reward-falls", "likelihood-displacement", "truncated", "length-collapse", "kl-explosion", *CRITIC],
    windows=True,
)
def entropy_explosion(
    data: RunData, *, factor: float = 1.5, rise: float = 0.5, noise: float = Share(0.85)
) -> Reading | None:
    points, uniform = entropy(data), _uniform(data)
    if len(points) < 10 or points.first() < 1e-3:
        return None
    before, smooth, evidence = points.first(), smoothed(points), data.step_evidence(points.step[-1:])
    # An entropy that returns to where the run started has not exploded.
    start = entropy(data.whole).first() + rise / 2
    high = max(min(factor * before, (before + uniform) / 2), before + rise, start)
    unhealthy = (
        since(points, smooth.value > high, 4) is not None and trend(points).change > 0 and is_clear(data, points)
    )
    began = since(points, smooth.value > (before + high) / 2, 4)
    what = "it rises, and the policy is forgetting how to write"
    # A policy without training begins with such an entropy, which no update has made.
    has_risen = entropy(data.whole).value[0] < noise * uniform
    if not unhealthy and has_risen and MANY < uniform < np.inf and _surprise(data) > noise * uniform:
        began, high = since(points, smooth.value > noise * uniform, 4), noise * uniform
        what, unhealthy = "nearly that of a uniform choice, so that responses are noise", began is not None
    words: Words = {"before": before, "what": Phrase(what)}
    return Reading(points.last(), unhealthy, began, evidence, words, Curve(points, high=high))


def _surprise(data: RunData) -> float:
    """Return the mean of −log π of the last responses, in nats per token; 0 if it is not recorded.

    Where sampling is filtered, few tokens occur, and a policy that would choose among many is not to blame.
    """
    sample = data.sample
    return sample.mean_by_step(-sample["logprob"]).last() if data.recorded("tokens.logprob") else 0.0


def _uniform(data: RunData) -> float:
    """Return the entropy of a uniform choice among the tokens that occur, in nats; infinite if tokens are not known."""
    known = [name for name in ("token_id", "token") if data.recorded(f"tokens.{name}")]
    return float(np.log(pc.count_distinct(data.sample.column(known[0])).as_py())) if known else np.inf


@rule(
    number=59,
    needs=["rows.response"],
    min_steps=8,
    training_only=True,
    title="The responses lose variety",
    cause="The share of distinct word pairs falls from {before} to {seen}: the policy says the same things in the same "
    "words.",
    healthy="distinct-2 over a fixed number of words, of right responses where right answers are recorded: above "
    "{limit} times its start, or less than {drop} below it",
    fix="[raise kl.coef, ]sampling.temperature = 1.0, check what the reward favours (a pattern, a length)",
    settings={"kl.coef": stronger(grown), "kl.target": tighter(grown), "sampling.temperature": at_least(1.0)},
    source="LMFlow's RAFT (0.39 → 0.22); 2310.06452",
    explains=["template-collapse", "kl-explosion", "truncated", "reward-falls"],
    windows=True,
)
def distinct_collapse(data: RunData, *, limit: float = 0.7, drop: float = 0.1) -> Reading | None:
    points = distinct(_comparable(data.said))
    found = collapse(data, points, limit)
    # Where responses are alike from the start, as with a low temperature, a few pairs make a large share.
    return found and replace(found, unhealthy=found.unhealthy and points.first() - points.last() > drop)


def _comparable(rows: Rows) -> Rows:
    """Return the right responses if there are many early and late, else all.

    As a policy learns the one right answer of each prompt, wrong ones vanish, and with them variety that nobody wants.
    What is right loses variety only if the policy says the same in the same words.
    """
    if not (rows.recorded("ground_truth") and rows.recorded("reward")):
        return rows
    right = rows["reward"] >= np.nanmax(rows["reward"]) - EQUAL
    return rows.where(right) if min(right[_third(rows, part)].mean() for part in (0, 2)) > MANY_RIGHT else rows


@rule(
    number=60,
    needs=["rows.prompt", "rows.response"],
    min_steps=8,
    training_only=True,
    title="The responses no longer depend on the prompt",
    cause="In the last steps, two responses to different prompts are as similar ({other}) as two responses to the same "
    "prompt ({same}), unlike at the start.",
    healthy="similarity within a prompt minus similarity between prompts, late / early: above {limit}",
    fix="a reward that depends on the prompt[; grpo.resample drops prompts whose responses all get the same reward]",
    source="2604.06268",
    explains=["reward-falls", "length-bias"],
    windows=True,
)
def template_collapse(data: RunData, *, limit: float = 0.2) -> Reading | None:
    rows, said = data.said, [bool(text) for text in data.said.texts("response")]  # an episode may be calls only
    if data.recorded("turns.role"):  # where users reply, the prompt is not all that a response depends on
        talks = set(data.turns.line[data.turns.role == "user"].tolist())
        said = [is_text and line not in talks for line, is_text in enumerate(said)]
    rows = rows.where(np.array(said, bool))
    if not len(rows):
        return None
    early, late = (rows.where(part) for part in (_third(rows, 0), _third(rows, 2)))
    before, after = _belonging(early), _belonging(late)
    if before is None or after is None or before[0] - before[1] < 0.05:
        return None
    left = max(0.0, after[0] - after[1]) / (before[0] - before[1])
    unhealthy = left < limit and after[1] > 1.5 * before[1]
    alike: Words = {"same": after[0], "other": after[1]}
    curve = Curve(_left_of(rows, before[0] - before[1]), low=limit)
    return Reading(left, unhealthy, int(late.steps[0]), data.step_evidence(late.steps[-1:]), alike, curve)


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
    different = list(map(set, rows.words("response")))
    asked: dict[str | None, list[int]] = {}
    for i, prompt in enumerate(prompts):
        asked.setdefault(prompt, []).append(i)
    generator = np.random.default_rng(0)
    several = [members for members in asked.values() if len(members) >= 2]
    if len(several) < 3 or len(asked) < 6:
        return None
    chosen = generator.integers(0, len(several), pairs)
    size = np.array([len(members) for members in several])[chosen]
    first = generator.integers(0, size)
    second = (first + generator.integers(1, size)) % size  # another one
    same = [_alike(different, several[i][a], several[i][b]) for i, a, b in zip(chosen, first, second, strict=True)]
    some = generator.integers(0, len(different), (pairs, 2))
    other = [_alike(different, i, j) for i, j in some if prompts[i] != prompts[j]]
    return float(np.mean(same)), float(np.mean(other))


def _alike(responses: list[set[str]], i: int, j: int) -> float:
    shared = len(responses[i] & responses[j])
    either = len(responses[i]) + len(responses[j]) - shared
    return shared / either if either else 1.0


@rule(
    number=62,
    needs=["rows.reward", "rows.group", "steps.optim/grad_norm"],
    min_steps=20,
    training_only=True,
    title="Echo trap: the rewards become alike, then the gradient spikes",
    cause="The standard deviation of the rewards within a prompt fell to {seen} of its start, and gradient spikes "
    "follow from step {step} on.",
    healthy="standard deviation of the reward within a prompt, relative to its start: above {limit} before any "
    "gradient spike",
    fix="drop prompts with similar rewards[, grpo.clip_high = 0.28 (a wider upper clip)][, update.epochs = 1]",
    settings={"grpo.clip_high": at_least(0.28), "rloo.clip_high": at_least(0.28), "update.epochs": 1},
    source="RAGEN 2504.20073",
    explains=["gradient-spike", "entropy-collapse"],
)
def echo_trap(data: RunData, *, limit: float = Percent(0.3)) -> Reading | None:
    spread = data.rows.by_step(within(data.rows, data.rows["reward"]), np.std)
    spread, norm = together(spread, data.metric("optim/grad_norm"))
    if len(spread) < 20 or spread.first() < 1e-9:
        return None
    share = smoothed(spread).value / spread.first()
    narrow = since(spread, share < limit, 5)
    if narrow is None:
        return Reading(Percent(share[-1]), False)
    typical = float(np.median(norm.value[norm.step <= narrow]))
    spikes = norm.step[(norm.step > narrow) & (norm.value > 5 * typical)]
    spike: Words = {"step": int(spikes[0]) if len(spikes) else 0}
    curve = Curve(Series(spread.step, share), low=limit)
    unhealthy = len(spikes) >= max(2, MIN_SHARE * len(norm.after(int(spike["step"]))))
    return Reading(Percent(share[-1]), unhealthy, narrow, data.step_evidence(spikes), spike, curve)


@rule(
    number=63,
    needs=["rows.reward", "rows.length", "rows.kl_k1", "tokens.logprob"],
    min_steps=15,
    training_only=True,
    title="The policy settles into one pattern",
    cause="Reward, length and KL rise together while the responses become more and more predictable (−log π {before} → "
    "{seen} nats per token): the policy repeats one safe form.",
    healthy="−log π per token, in nats: does not fall while reward, length and KL all rise",
    fix="judge the run by KL, length and perplexity as well as by the reward[; raise kl.coef]",
    settings={"kl.coef": stronger(grown), "kl.target": tighter(grown)},
    source="Secrets of RLHF 2307.04964",
    severity="note",
    windows=True,
)
def pattern_collapse(data: RunData) -> Reading | None:
    sample = data.sample
    surprise = sample.mean_by_step(-sample["logprob"])
    rising = [data.rows.mean(name) for name in ("reward", "length", "kl_k1")]
    grew = all(found.change > 0 and found.p < data.chance for found in map(trend, rising))
    length = rising[1]
    longer = length.last() > 1.2 * length.first()
    before, now = surprise.first(), surprise.last()
    unhealthy = grew and longer and trend(surprise).p < data.chance and now < 0.6 * before
    first = int(length.step[len(length) // 3])
    evidence = data.step_evidence(length.step[[0, -1]])
    return Reading(now, unhealthy, first, evidence, {"before": before}, Curve(surprise))
