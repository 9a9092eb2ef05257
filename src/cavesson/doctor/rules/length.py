"""Rules on how responses end, on their length, and on what length does to the reward."""

from dataclasses import replace

import numpy as np

from cavesson.correlation import rank_correlation
from cavesson.doctor.absent import no_longer
from cavesson.doctor.data import RunData
from cavesson.doctor.groups import repeated, within
from cavesson.doctor.proposal import longer
from cavesson.doctor.reading import Affected, Curve, Reading, Words
from cavesson.doctor.readings import collapse, exceeds, is_higher, lengths, pays
from cavesson.doctor.rule import rule
from cavesson.doctor.rules.consequences import CRITIC
from cavesson.doctor.series import Array, Series, earliest, since, smoothed, standard_error, together, trend
from cavesson.findings.words import Phrase, Share

CUT = "rows.finish_reason|steps.finish/length|rows.cut_text"
"""What says whether responses were cut at the length limit; the first that there is counts."""
WERE_CUT = 'finish_reason == "length"'
"""What a filter of the board says of these responses."""
SHORTER = 0.8
"""Times the length of right answers from which responses are not too short to be right."""
CLEAR, FEW = 3.0, 10
"""Standard errors by which longer responses get clearly less, and how many of them show it."""
PERHAPS_PAYS = Phrase("most responses are truncated and earn a little more than others, which may be due to chance")
PERHAPS_WANTED = Phrase(
    "almost all responses are truncated, which is a problem unless you want responses of this length"
)


def _cut(data: RunData) -> Series:
    """Return by step the share of responses that were cut at the length limit."""
    each = _each_cut(data)
    return data.metric("finish/length") if each is None else data.rows.by_step(each)


def _each_cut(data: RunData) -> Array | None:
    """Return [n] 1 for responses that were cut at the length limit, 0 for others; None if only the share is known."""
    if data.has("rows.finish_reason"):
        return data.rows.says("finish_reason", "length").astype(float)
    return None if data.has("steps.finish/length") else data.rows["cut_text"]


def _affected(data: RunData) -> Affected | None:
    """Return the responses that were cut, if the record says of each whether it was."""
    rows = data.whole.rows
    return Affected(rows, rows.says("finish_reason", "length"), WERE_CUT) if rows.recorded("finish_reason") else None


def _draws_limits(data: RunData) -> bool:
    """Return whether the limits of responses are drawn at random."""
    return bool(data.setting("config.sampling.random_length"))


def _fixes_length(data: RunData) -> bool:
    """Return whether the settings determine how long responses are, so that the policy does not end them."""
    least, most = (data.setting(f"config.sampling.{name}_new_tokens") for name in ("min", "max"))
    return _draws_limits(data) or (bool(least) and least == most)


@rule(
    number=64,
    needs=[CUT],
    min_steps=5,
    title="Responses are truncated",
    cause="{share} of the responses reach the length limit without an end token ({before} at the start): the reward "
    "judges unfinished responses, and nothing rewards finishing them.",
    healthy="share of responses cut at the length limit: below {limit}, or less than {growth} above its start and "
    "at most {most}; more if the share rises and they earn more than the others, or if the settings fix the length",
    fix='a larger sampling.max_new_tokens, or shaping.missing_eos_penalty[, or grpo.overlong = "penalty"]',
    settings={"sampling.max_new_tokens": longer(unless=_draws_limits)},
    source="DAPO 2503.14476; rldoctor; rlprobe; miles",
    explains=["length-bias", "reward-falls"],
    windows=True,
)
def truncated(
    data: RunData, *, limit: float = Share(0.5), growth: float = Share(0.25), most: float = Share(0.9)
) -> Reading | None:
    points = _cut(data)
    if len(points) < 5:
        return None
    share, before = Share(points.last()), Share(points.first())
    # If most responses are cut from the start, that can be by design; only growth is certainly a problem.
    high = max(limit, before + growth)
    pays, is_sure = _longer_pays(data)
    first = None if pays else since(points, smoothed(points).value > high, 4)
    unhealthy = first is not None and share > high
    words, evidence = {"share": share, "before": before}, data.step_evidence(points.step[-1:])
    # Where nearly all are cut from the start, the few that end first can earn less because the limit is too low.
    is_wanted = _fixes_length(data) or (pays and is_sure and before <= most)
    undecided = None
    if share > high and pays and not is_sure:
        undecided = PERHAPS_PAYS
    elif share > most and not is_wanted:
        undecided = PERHAPS_WANTED
    return Reading(
        share,
        unhealthy,
        first,
        evidence,
        words,
        Curve(points, high=high),
        affected=_affected(data),
        undecided=undecided,
    )


def _longer_pays(data: RunData) -> tuple[bool, bool]:
    """Return whether truncated responses earn more than others to the same prompt, and whether by more than chance.

    Then, reaching the limit is what the reward asks for.
    """
    each = _each_cut(data)
    if each is None or not data.has("rows.reward"):
        return False, False
    reward = within(data.rows, data.rows["reward"])
    cut, others = (reward[np.isfinite(reward) & (each == value)] for value in (1, 0))
    more = cut.mean() - others.mean() if len(cut) and len(others) else 0.0
    noise = np.hypot(standard_error(cut), standard_error(others))
    return bool(more > 0.1 * np.std(np.append(cut, others))), bool(more > 2 * noise)


@rule(
    number=65,
    needs=["rows.finish_reason", "tokens.token_id"],
    recorded=["rows.finish_reason"],
    severity="error",
    title="Finished responses count as truncated",
    cause="{seen} of the responses that are marked as truncated end in the same token (id {token}), long before the "
    "length limit or at different lengths: it is an end token that the trainer does not know.",
    healthy="share of truncated responses that end in the same token before the length limit: 0, at most {limit}",
    fix="sampling.eos_token_ids: list all end tokens of the model's generation config",
    source="TRL pull request 7039",
    explains=["truncated", "reward-falls"],
    windows=True,
)
def false_truncation(data: RunData, *, limit: float = Share(0.1)) -> Reading | None:
    sample = data.sample
    turns, calls = sample.rows["turns"], sample.rows["calls"]
    # If each turn made a call, the last result did not fit into the episode: its response had ended.
    unanswered = (calls > 0) & (calls >= turns)
    cut = sample.rows.says("finish_reason", "length") & (sample.length > 0) & ~unanswered
    if cut.sum() < 20:
        return None
    longest = float(data.setting("config.sampling.max_new_tokens") or sample.length[cut].max())
    short = cut & (sample.length < longest)
    last = np.full(len(sample.rows), np.nan)
    last[sample.line[sample.last]] = sample["token_id"][sample.last]
    ids, count = np.unique(last[short], return_counts=True)
    share = Share(count.max() / cut.sum() if len(count) else 0.0)
    largest = int(count.max(initial=0))
    unhealthy = exceeds(data, largest, cut.sum(), limit) and largest > 0.8 * short.sum() and largest >= 10
    words = {"token": float(ids[np.argmax(count)]) if len(ids) else 0.0}
    evidence = sample.rows.evidence(np.flatnonzero(short))
    curve = Curve(sample.rows.by_step(np.where(cut, short, np.nan)), 0.0, 0.0)
    return Reading(share, unhealthy, earliest(sample.rows.step[short]), evidence, words, curve)


@rule(
    number=66,
    needs=["rows.finish_reason", "tokens.token_id", "info.eos_token_ids", "tokens.learned"],
    recorded=["rows.finish_reason", "info.eos_token_ids"],
    severity="error",
    min_steps=5,
    training_only=True,
    title="The end token is not trained on",
    cause="In {seen} of the finished responses, the end token is not trained on: the mask drops it together with the "
    "padding, and the policy never learns to stop.",
    healthy="share of finished responses whose end token is masked or missing: 0, at most {limit}",
    fix="use a separate padding token, or a mask that keeps the first end token",
    source="TRL issue 2708; TRL's PPO page",
    explains=["truncated", "length-exploited", "reward-position", "reward-accounting"],
    windows=True,
)
def end_not_trained(data: RunData, *, limit: float = Share(0.05)) -> Reading | None:
    sample = data.sample
    ended = sample.rows.says("finish_reason", "eos")
    if ended.sum() < 10:
        return None
    ends = np.isin(sample["token_id"], np.array(data.setting("eos_token_ids"), np.float64)) & sample.trained
    has = np.bincount(sample.line[ends], minlength=len(sample.rows)) > 0
    without = np.flatnonzero(ended & ~has)
    share, unhealthy = Share(len(without) / ended.sum()), exceeds(data, len(without), ended.sum(), limit)
    evidence = sample.rows.evidence(without)
    curve = Curve(sample.rows.by_step(np.where(ended, ~has, np.nan)), 0.0, 0.0)
    return Reading(share, unhealthy, earliest(sample.rows.step[without]), evidence, curve=curve)


@rule(
    number=67,
    needs=["rows.length|rows.characters"],
    min_steps=8,
    training_only=True,
    title="The responses shrink to almost nothing",
    cause="The typical response shrinks from {before} to {seen} {unit}: a penalty, the reward, a biased critic "
    "or a negative KL favours short responses.",
    healthy="typical length, in tokens or, if none were recorded, in characters: above {limit} times its start, or "
    "that of the right answers while the reward rises; of episodes, among those with the same calls",
    fix='cleaning.discard = "too_short" with a low cleaning.discard_reward[; a lower kl.coef if the penalty dominates]',
    source="VC-PPO 2503.01491; MedicalGPT issue 374",
    explains=["distinct-collapse", "entropy-collapse", "template-collapse", "zero-variance-groups", "zero-gradient",
              "kl-explosion", "echo-trap", "reward-exhausted", *CRITIC],
    windows=True,
)  # fmt: skip
def length_collapse(data: RunData, *, limit: float = 0.4) -> Reading | None:
    length = lengths(data)
    found = collapse(data, length.by_step(np.median), limit)
    unhealthy = found is not None and found.unhealthy and not _are_answers(data)
    return found and replace(found, unhealthy=unhealthy, words={**found.words, "unit": length.unit})


def _are_answers(data: RunData) -> bool:
    """Return whether responses end as short as right answers, and earn more than longer ones did: that is the task."""
    if not data.recorded("rows.ground_truth") or not pays(data):
        return False
    rows = data.said
    turns = np.maximum(np.nan_to_num(rows["turns"], nan=1.0), 1)
    said, truth = (np.array([len(one or "") for one in rows.texts(name)]) for name in ("response", "ground_truth"))
    late = rows.step >= np.quantile(rows.steps, 0.8)
    return bool(np.median((said / turns)[late]) >= SHORTER * np.median(truth[late]))


@rule(
    number=73,
    needs=[CUT],
    severity="note",
    min_steps=5,
    title="Almost no response ends by itself",
    cause="From the start, {seen} of the responses reach the length limit without an end token: the reward judges "
    "beginnings, unless responses of this length are what you want.",
    healthy="share of responses cut at the length limit from the start: below {limit}",
    fix="a larger sampling.max_new_tokens, or the model's end tokens in sampling.eos_token_ids; nothing, if responses "
    "of a fixed length are wanted",
    source="DAPO 2503.14476; TRL's PPO page (missing_eos_penalty)",
)
def never_ends(data: RunData, *, limit: float = Share(0.9)) -> Reading | None:
    points = _cut(data)
    if len(points) < 5:
        return None
    share = Share(points.first())
    unhealthy = share > limit and points.last() > limit
    evidence = data.step_evidence(points.step[:1])
    curve, affected = Curve(points, high=limit), _affected(data)
    return Reading(share, unhealthy, int(points.step[0]), evidence, curve=curve, affected=affected)


@rule(
    number=51,
    needs=["rows.reward", "rows.length|rows.characters"],
    min_steps=8,
    training_only=True,
    title="The reward favours length",
    cause="Within a step, length and reward are correlated (Spearman {seen}), and the responses grew from {before} to "
    "{after} {unit}: the policy gains reward by length.",
    healthy="rank correlation of length and reward within a step: below {limit}, or responses that grow by less than "
    "{growth}, of episodes among those with the same calls; more if responses need to be longer, so that those "
    "longer than usual get less",
    fix='a reward that does not grow with the length (subtract what length explains)[, grpo.overlong = "penalty"]',
    source="2310.03716; Secrets of RLHF 2307.04964; rlprobe",
    explains=["truncated", "repetition-loops", "kl-explosion", "pattern-spreading", "distinct-collapse",
              "entropy-explosion", "likelihood-displacement", *CRITIC],
    windows=True,
    absent=no_longer,
)  # fmt: skip
def length_exploited(data: RunData, *, limit: float = 0.6, growth: float = Share(0.25)) -> Reading | None:
    of = lengths(data)
    rows, each = of.rows, of.each
    reward, length = of.within(rows["reward"]), of.within(each)
    there = np.isfinite(reward) & np.isfinite(length)
    points = of.by_step()
    before, after = points.first(), points.last()
    # The relation shows only while lengths grow: at the limit, all responses have the same length.
    grown = smoothed(points).value > before + 0.9 * (after - before)
    there &= rows.step <= (points.step[int(np.argmax(grown))] if grown.any() else rows.steps[-1])
    before = max(before, lengths(data.whole).by_step().first())  # a part of a run may begin where lengths are short
    first = since(points, points.value > 1.15 * before, 4)
    # Before that, the reward may have been another one.
    growing = there & (rows.step >= (rows.steps[0] if first is None else first))
    there = growing if growing.sum() >= 100 else there
    found = rank_correlation(length[there], reward[there]) if there.sum() >= 100 else None
    if found is None:
        return None
    unhealthy = found > limit and after > (1 + growth) * before and first is not None and is_higher(data, points, first)
    late = rows.step >= (first or 0)
    unhealthy = unhealthy and not _more_would_cost(each[late], rows["reward"][late])
    words: Words = {"before": before, "after": after, "unit": of.unit}
    curve = Curve(points, high=(1 + growth) * before, name=of.mean)
    return Reading(found, unhealthy, first, rows.highest(each), words, curve)


def _more_would_cost(length: Array, reward: Array) -> bool:
    """Return whether responses [n] that are longer than usual get clearly less: the task needs its length."""
    known = np.isfinite(reward) & np.isfinite(length)
    if not known.any():
        return False
    low, high = np.quantile(length[known], [0.4, 0.6])
    usual, longer = (reward[known & there] for there in ((length >= low) & (length <= high), length > high))
    if min(len(usual), len(longer)) < FEW:
        return False
    error = np.sqrt(usual.var() / len(usual) + longer.var() / len(longer))
    return bool(usual.mean() - longer.mean() > CLEAR * error)


@rule(
    number=52,
    needs=["rows.reward", "rows.length|rows.characters"],
    min_steps=20,
    traits=["length_normalised"],
    training_only=True,
    title="Bad responses grow longer",
    cause="Bad responses are {seen} {unit} longer than good ones, and the gap widens: if each response's loss is "
    "divided by its length, long mistakes are cheap.",
    healthy="mean length of the worse half − of the better half: not rising",
    fix='a loss that is not divided by the length of each response[: grpo.normalise = "token"][, or grpo.normalise = '
    '"constant" (Dr. GRPO)]',
    settings={"grpo.normalise": lambda value, data, reading: "token" if value == "sequence" else value},
    source="Dr. GRPO 2503.20783; DAPO 2503.14476",
    windows=True,
)
def length_bias(data: RunData) -> Reading | None:
    of = lengths(data)
    rows, each = of.rows, of.each
    if not data.traits.get("length_normalised", repeated(rows)):
        return None  # where it is not known, only GRPO, which has groups, is known to do it
    reward, length = of.within(rows["reward"]), of.within(each)
    bad = np.where(reward < 0, length, np.nan)
    low, high = together(rows.by_step(bad), rows.by_step(np.where(reward > 0, length, np.nan)))
    if len(low) < 20:
        return None
    points = Series(low.step, low.value - high.value)
    before = max(0.0, points.first())  # that bad responses reach the length of good ones is not a bias
    widened = min(trend(points).change, points.last() - before)
    unhealthy = trend(points).p < data.chance and widened > 0.2 * float(np.nanmean(each))
    first = since(points, smoothed(points).value > before + widened / 2, 5)
    return Reading(points.last(), unhealthy, first, rows.highest(bad), {"unit": of.unit}, Curve(points))
