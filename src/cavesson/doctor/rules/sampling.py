"""Rules on responses that were not drawn from the distribution that scores them, which makes KL estimates negative."""

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.reading import Affected, Curve, Reading, Words
from cavesson.doctor.rows import Rows
from cavesson.doctor.rule import Disproof, rule
from cavesson.doctor.rules.consequences import MISLED, MISMATCH
from cavesson.doctor.sample import Sample
from cavesson.doctor.series import Array, Series, since, smoothed, standard_error, together
from cavesson.findings.settings import PURE, filters
from cavesson.findings.words import Phrase, Share

ALIKE = {"float32": 0.005, "float64": 0.005}
MEASURED = 100
"""Tokens with a log-probability of the sampler from which these show how tokens were sampled."""
ROUNDED = 0.15
"""Nats by which sampler and trainer differ on a token by rounding alone."""
FORM = 0.02
"""Share of the shortest responses that a little longer ones are at most if all have a form that sets the length."""
SOME = 3
"""Smallest number of such longer ones."""
COMMON = 0.25
"""How much larger the share of words that most of them have must be among the shortest responses than among the longer
ones to say that they have one form."""
RARE = 0.01
"""Share of the responses that can end before a ban is over, such as episodes that were stopped."""
PERHAPS_FORM = Phrase(
    "many responses end at the smallest length, but they are of one form, or hardly any is a little longer; record the "
    "sampler's log-probabilities"
)
MIN_SHARE_AT_BAN = 0.05
"""Share of the responses below the largest length that end as soon as a ban is over, at least."""
SEVERAL, OFTEN = 4, 0.2
"""Number of steps or tokens, and share of the responses of these steps, that show what is usual."""
SURPRISE, NOISE = 0.03, 5.0
"""Surprise − entropy that matters, in nats per token, and in standard errors."""


class Shift(NamedTuple):
    """How the sampler's log-probabilities differ from those of the trainer."""

    above: float
    """Share of the tokens to which the sampler gives clearly more: what a filter left out is shared among the rest."""
    below: float
    """Share of those to which it gives clearly less, of all that differ clearly."""
    size: float
    """Mean of sampler − trainer over the tokens, in nats."""
    lowers_more: bool
    """Whether the tokens to which it gives clearly less differ more, on average, than those to which it gives more."""

    @property
    def is_filter(self) -> bool:
        """Whether it is as where a filter left out tokens: others gain, and what loses does so by noise."""
        return self.below < 0.05 and not self.lowers_more


def alike(data: RunData) -> float:
    """Return how much sampler and trainer can differ on a token due to rounding alone, in nats."""
    return ALIKE.get(str(data.dtype), ROUNDED)


def shift(data: RunData, sample: Sample) -> Shift | None:
    """Compare sampler and trainer over all trained tokens; None if the sampler's log-probabilities are not known.

    Sampler settings have an effect from the first step. If sampler and trainer agree there, later differences are due
    to stale sampler weights, and the result is zero.
    """
    known = sample.trained & np.isfinite(sample["sampler_gap"])
    if known.sum() < MEASURED:
        return None
    gap, first = -sample["sampler_gap"][known], sample.step[known] == sample.rows.steps[0]
    above, below = gap > alike(data), gap < -alike(data)
    if first.any() and np.mean((above | below)[first]) < 0.01:
        return Shift(0.0, 0.0, 0.0, False)
    raised, lowered = gap[above], -gap[below]
    share = len(lowered) / max(1, len(raised) + len(lowered))
    lowers_more = len(lowered) >= SEVERAL and (not len(raised) or bool(lowered.mean() > raised.mean()))
    return Shift(float(np.mean(above)), share, float(gap.mean()), lowers_more)


def surprise_gap(sample: Sample) -> tuple[float, float] | None:
    """Return the mean and standard error of surprise − entropy, in nats per token; None if entropy is not known.

    If tokens are drawn from the distribution that is scored, their mean surprise equals the mean entropy.
    """
    there = sample.trained & np.isfinite(sample["logprob"]) & np.isfinite(sample["entropy"])
    gap = np.where(there, -sample["logprob"] - sample["entropy"], 0.0)
    count = np.bincount(sample.line[there], minlength=len(sample.rows))
    # Responses are weighted by their number of tokens.
    known = count > 0
    if known.sum() < 16:
        return None
    per_response = np.bincount(sample.line, gap, len(sample.rows))[known]
    mean_count = float(count[known].mean())
    return float(per_response.sum() / count[known].sum()), standard_error(per_response) / mean_count


@rule(
    number=13,
    needs=["tokens.logprob", "tokens.entropy|tokens.sampler_logprob"],
    severity="error",
    training_only=True,
    title="Responses are sampled from a filtered distribution but scored with the full one",
    cause="top-k or top-p cut off the tail during sampling{setting}, but the trainer scores without the cut: sampled "
    "tokens are {gap} nats per token more likely than they should be on average. The KL estimate falls below the true "
    "value, even below 0.",
    healthy="log π − log π_sampler of the sampled tokens, or surprise (−log π) − entropy if the sampler's "
    "log-probabilities are not recorded, in nats per token: 0 within its noise",
    fix="sampling.top_k = 0 and sampling.top_p = 1.0",
    settings={"sampling.top_k": 0, "sampling.top_p": 1.0},
    source="TRL's How-to-train FAQ; The N implementation details of RLHF with PPO; ms-swift issue 8442; TRL issue 6945",
    explains=["negative-kl", "kl-in-few-tokens", "entropy-collapse", "echo-trap", *MISLED, *MISMATCH],
    disproof=Disproof(
        ("tokens.sampler_logprob",), "the sampler gives the sampled tokens no more than the trainer does"
    ),
)
def filtered_sampling(data: RunData) -> Reading | None:
    sample, found = data.sample, shift(data, data.sample)
    gap, first = surprise_gap(sample), int(sample.rows.steps[0])
    points = sample.mean_by_step(-sample["logprob"] - sample["entropy"])
    if found is not None and found.above > 0.02:
        # What a filter keeps is probable: tokens that surprise more than the entropy says are scored as other ones.
        surprises = gap is not None and gap[0] > max(NOISE * gap[1], SURPRISE)
        unhealthy = found.is_filter and not surprises and banned_until(data) is None
        seen = -found.size
    elif gap is not None:
        unhealthy = found is None and gap[0] < -max(NOISE * gap[1], SURPRISE) and is_from_start(points, gap[0])
        seen, began = gap[0], since(points, smoothed(points).value < gap[0] / 2, 3)
        first = first if began is None else began
    elif found is not None:
        unhealthy, seen = False, -found.size
    else:
        return None
    named = filters({name: data.setting(f"config.sampling.{name}") for name in PURE})
    words: Words = {"gap": abs(seen), "setting": f" ({', '.join(named)})" if named else ""}
    curve = Curve(points, 0.0, 0.0, Phrase("surprise (−log π) − entropy, in nats per token"))
    return Reading(seen, unhealthy, first, sample.rows.evidence(range(len(sample.rows))), words, curve)


def is_from_start(points: Series, mean: float) -> bool:
    """Return whether the first steps have at least half of the mean: settings of a sampler have an effect at once."""
    early = float(points.value[: max(3, len(points) // 8)].mean())
    return bool(early * np.sign(mean) >= abs(mean) / 2)


def banned_until(data: RunData) -> int | None:
    """Return the position before which end tokens seem to be forbidden; None if they are not."""
    sample = data.sample
    mine = sample.trained & np.isfinite(sample["sampler_gap"])
    if mine.sum() < MEASURED:
        return None
    position, gap = sample.position[mine], -sample["sampler_gap"][mine]
    last = int(position.max())
    raised, lowered = (np.bincount(position[one > alike(data)], minlength=last + 1) for one in (gap, -gap))
    count = np.bincount(position, minlength=last + 1)
    for at in range(1, last):
        # The sampler raises other tokens at positions before the end of the ban, and none after it.
        share = raised[:at].sum() / max(1, count[:at].sum())
        expected = share * count[at:].sum()
        is_ban = lowered[:at].sum() < 0.05 * raised[:at].sum()  # which lowers nothing but what it forbids
        if share > 0.03 and expected > 30 and raised[at:].sum() < 0.1 * expected and is_ban:
            return None if _end_before(data.rows, at) else at
    return None


def _end_before(rows: Rows, position: int) -> bool:
    """Return whether responses end before a position, so that an end was not forbidden there."""
    began = _short_gone_since(rows)
    length = rows["length"][rows.step >= (rows.steps[0] if began is None else began)]
    return bool(np.mean((length > 0) & (length <= position)) > RARE)


def nothing_banned(data: RunData) -> bool:
    """Return whether the sampler's own log-probabilities show that no token was forbidden at any position.

    What a ban leaves is shared among the other tokens, to which the sampler then gives more than the trainer does.
    """
    sample = data.sample
    return bool(np.isfinite(sample["sampler_gap"][sample.trained]).sum() >= MEASURED) and banned_until(data) is None


def _begin_to_end(data: RunData, counts: Array, least: int, first: int) -> float:
    """Return how much more often responses end at the smallest length than just before it, if most are cut since then.

    Such responses have no fixed form, and the longer they are, the more of them end; but not all at once.
    """
    if least < 5 or not data.has("rows.finish_reason"):
        return 0.0
    is_cut = data.rows.says("finish_reason", "length")[data.rows.step >= first]
    if is_cut.mean() <= 0.5 or counts[least] < MIN_SHARE_AT_BAN * counts[:-1].sum():
        return 0.0
    next_lengths = counts[least + 1 : -1]
    typical = float(next_lengths.mean()) if len(next_lengths) else 0.0
    return float(counts[least]) / 0.5 if counts[least] >= max(8.0, typical / 2) else 0.0


@rule(
    number=15,
    needs=["tokens.logprob", "rows.length"],
    severity="error",
    training_only=True,
    title="Responses are not allowed to end early",
    cause="No response is shorter than {least} tokens, and {pile} of them end exactly there{setting}: the end token is "
    "forbidden during sampling but scored as if it were allowed. Each forbidden end lowers the KL estimate.",
    healthy="responses that end at the smallest length, relative to the neighbouring lengths, over the whole run or "
    "since short responses disappeared from one step to the next: below {limit}; more if the settings do not forbid an "
    "early end, or if the shortest responses may have one form",
    fix="sampling.min_new_tokens = 0; to get longer responses, reward their length",
    settings={"sampling.min_new_tokens": 0},
    source="TRL's How-to-train FAQ (min_length = -1); StackLLaMA",
    explains=["negative-kl", "kl-explosion", "filtered-sampling", "kl-in-few-tokens", "likelihood-displacement",
              "kl-at-start", "ratio-not-one", "update-kl-large",  # where scores leave out the end as well
              "reward-falls", "truncated", *MISMATCH],
    disproof=Disproof(
        ("tokens.sampler_logprob",),
        "the sampler gives the tokens before the shortest end no more than the trainer does, so nothing was forbidden",
        nothing_banned,
    ),
)  # fmt: skip
def end_forbidden(data: RunData, *, limit: float = 3.0) -> Reading | None:
    began, rows = _short_gone_since(data.rows), data.sample.rows
    first = int(rows.steps[0]) if began is None else began
    length = np.where(rows.step >= first, rows["length"], np.nan)
    known = length[np.isfinite(length) & (length > 0)].astype(int)
    if len(known) < 50:
        return None
    least, longest = int(known.min()), int(known.max())
    counts = np.bincount(known, minlength=longest + 1)
    near = counts[least + 1 : least + 4]
    pile = float(counts[least]) / max(float(near.mean()) if len(near) else 0.0, 0.5)
    until = banned_until(data)
    asked = data.setting("config.sampling.min_new_tokens")
    # Texts of a fixed form also share a length, so this criterion counts only if the settings do not exclude a minimum.
    # At the end of a ban, those that would have ended earlier pile up; others still end soon after it.
    is_form = near.sum() < max(FORM * counts[least], SOME)
    piled = least >= 3 and longest > least + 3 and pile > limit and counts[least] >= 8 and not is_form and asked != 0
    perhaps = piled and (_leaves_gap(counts, least) or _have_form(rows, length, least))
    begin = _begin_to_end(data, counts, least, first)
    unhealthy = (until is not None and until >= 2) or (piled and not perhaps) or (begin > limit and asked != 0)
    words: Words = {
        "least": least,
        "pile": Share(counts[least] / len(known)),
        "setting": f" (min_new_tokens = {asked})" if asked else "",
    }
    points = Series(np.arange(longest + 1), counts)
    curve = Curve(points, name=Phrase("responses of each length"), along=Phrase("length in tokens"))
    evidence = rows.evidence(np.flatnonzero(length == least))
    lengths = data.rows["length"]
    short = np.where(np.isfinite(lengths), lengths < (least if until is None else until), np.nan)
    between = None if began is None else (began, began)
    course, undecided = data.rows.by_step(-short), PERHAPS_FORM if perhaps else None
    affected = Affected(rows, length == least, f"length == {least}")
    reading = Reading(max(pile, begin), unhealthy, first, evidence, words, curve, course, between)
    return replace(reading, affected=affected, undecided=undecided)


def _leaves_gap(counts: Array, least: int) -> bool:
    """Return whether fewer responses are a little longer than the shortest ones than are much longer.

    Once a ban is over, responses end as often as others of their kind, and so at the next lengths, too.
    """
    near, later = counts[least + 1 : least + 4], counts[least + 4 : -1]
    return bool(len(later)) and bool(near.mean() < later.mean())


def _have_form(rows: Rows, length: Array, least: int) -> bool:
    """Return whether the shortest responses are alike, unlike the longer ones."""
    return _in_common(rows, length == least) - _in_common(rows, length > least) > COMMON


def _in_common(rows: Rows, part: Array) -> float:
    """Return the share of the words of some responses, ``part`` [n], that most of them have; 1 without texts."""
    words = [set(some) for some in rows.where(part).words("response") if some]
    count = Counter(word for found in words for word in found)
    usual = {word for word, times in count.items() if times > len(words) / 2}
    return float(np.mean([len(found & usual) / len(found) for found in words])) if words else 1.0


def _short_gone_since(rows: Rows) -> int | None:
    """Return the step from which on no response is short any more, if many were just before it; None otherwise.

    A policy that learns to write more leaves short responses over several steps. A ban does so from one to the next.
    """
    known = rows["length"] > 0
    length, step = rows["length"][known], rows.step[known]
    steps, start = np.unique(step, return_index=True)
    if len(steps) < 2 * SEVERAL:
        return None
    shortest = np.minimum.accumulate(np.minimum.reduceat(length, start)[::-1])[::-1]
    edges = np.append(start, len(length))
    for i in range(SEVERAL, len(steps) - SEVERAL + 1):
        before = length[edges[i - SEVERAL] : edges[i]] < shortest[i]
        last = length[edges[i - 1] : edges[i]] < shortest[i]
        if min(before.mean(), last.mean()) > OFTEN and before.mean() * (len(length) - edges[i]) > 30:
            return int(steps[i])
    return None


@rule(
    number=16,
    needs=["tokens.learned", "tokens.logprob", "tokens.ref_logprob", "steps.kl/objective"],
    severity="error",
    training_only=True,
    title="Masked tokens are counted in the KL",
    cause="The logged KL is not that of the responses' own tokens (median {own} nats per response); it is the value "
    "that results when masked tokens are counted too ({all}).",
    healthy="logged KL − KL of the trained tokens, in nats per response: 0",
    fix="sum over the response's mask only; give left-padded prompts position ids that start at their first token",
    source="StackLLaMA; The N implementation details of RLHF with PPO",
    explains=["negative-kl", "kl-explosion", "reward-accounting", "unknown-estimate"],
    windows=True,
)
def padding_counted(data: RunData) -> Reading | None:
    sample = data.sample
    if len(sample.rows) < len(data.rows) or sample.trained.all():
        return None  # only a sample of the rollouts is available, or no masked tokens were recorded
    values = np.nan_to_num(sample["kl_k1"])
    own = np.bincount(sample.line, np.where(sample.trained, values, 0.0), len(sample.rows))
    everything = np.bincount(sample.line, values, len(sample.rows))
    by_step = (sample.rows.by_step(own), sample.rows.by_step(everything), data.metric("kl/objective"))
    ours, whole, logged = together(*by_step)
    off = logged.value - ours.value
    away, near = float(np.median(np.abs(off))), float(np.median(np.abs(logged.value - whole.value)))
    unhealthy = away > 0.05 and near < 0.1 * away
    words = {"own": float(np.median(ours.value)), "all": float(np.median(whole.value))}
    outside = sample.spans(np.flatnonzero(~sample.trained & (np.abs(values) > 0.01)))
    curve = Curve(Series(logged.step, off), 0.0, 0.0)
    return Reading(float(np.median(off)), unhealthy, int(sample.rows.steps[0]), outside, words, curve)
