"""Rules on what surrounds the training: failures, prompts, and time."""

import re

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.groups import groups, repeated, solved
from cavesson.doctor.reading import Curve, Reading, Words
from cavesson.doctor.readings import noise_of
from cavesson.doctor.rows import Rows
from cavesson.doctor.rule import rule
from cavesson.doctor.rules.consequences import MISMATCH
from cavesson.doctor.series import Array, Series, mean_by_step, since, smoothed
from cavesson.findings.words import Phrase, Share

EMPTY = re.compile(r"\s*(\[assistant\]\s*)?")
"""A response without content; in a conversation, its role is left."""
ENDED = frozenset(["eos", "stop"])
RARE = float(np.log(0.01))
"""Log-probability of a response below which a policy that samples it often does not sample it."""
CLEAR = 4.0
"""Standard errors by which a mean reward falls clearly."""
NEARLY_ALL = 0.95
"""Share of the other responses without any reward from which the policy may be what fails."""
POLICY_FAILS = Phrase(
    "some responses are empty, but the others earn nothing either: the policy may write nothing; finish reasons or "
    "log-probabilities would tell"
)
ABORTED = frozenset(["abort", "aborted", "error", "failed", "timeout", "cancelled"])


@rule(
    number=68,
    needs=["rows.response"],
    title="Rollouts fail or are empty",
    cause="{seen} of the rollouts are empty or were aborted: the environment or the sampler drops them, and the "
    "remaining ones have a different distribution.",
    healthy="share of empty or aborted rollouts over several steps: below {limit}, or the rewards of the others fall "
    "as these begin, so that the policy is what fails",
    fix="check the logs of the sampler and the environment at these steps; retry instead of recording empty responses",
    source="prime-rl; miles",
    explains=["reward-falls", "length-exploited", "length-collapse", "zero-variance-groups", "zero-gradient",
              "unknown-estimate", "negative-kl", "stops-generating", "template-collapse", *MISMATCH],
)  # fmt: skip
def rollouts_fail(data: RunData, *, limit: float = Share(0.05)) -> Reading | None:
    rows = data.sample.rows
    empty = np.array([EMPTY.fullmatch(text or "") is not None for text in rows.texts("response")])
    aborted = np.zeros(len(rows), bool)
    if rows.has("finish_reason"):
        reasons = [(reason or "").lower() for reason in rows.texts("finish_reason")]
        empty &= ~(np.isin(reasons, list(ENDED)) & (rows["length"] <= 1) & _probable(data))
        aborted = np.isin(reasons, list(ABORTED))
    points = rows.by_step((empty | aborted).astype(float))
    first = since(points, smoothed(points).value > limit, min(5, len(points)))
    seen = Share(points.after(first).value.mean())
    evidence = rows.evidence(np.flatnonzero(empty | aborted))
    unhealthy = first is not None and (bool(aborted.any()) or not _others_fall(rows, empty, first))
    curve, undecided = Curve(points, high=limit), None
    if unhealthy and not rows.recorded("finish_reason") and _others_earn_nothing(rows, empty, first):
        unhealthy, undecided = False, POLICY_FAILS
    return Reading(seen, unhealthy, first, evidence, curve=curve, undecided=undecided)


def _others_fall(rows: Rows, empty: Array, first: int) -> bool:
    """Return whether the rewards of other responses fall as empty ones begin: a failing request spoils no other one."""
    points = rows.by_step(np.where(empty, np.nan, rows["reward"]))
    before, after = points.value[points.step < first], points.value[points.step >= first]
    if not len(before) or not len(after):
        return False
    error = noise_of(points) * np.sqrt(1 / len(before) + 1 / len(after))
    return bool(before.mean() - after.mean() > CLEAR * error)


def _others_earn_nothing(rows: Rows, empty: Array, first: int | None) -> bool:
    """Return whether nearly all other responses get the lowest reward of the run once empty ones begin."""
    others = rows["reward"][~empty & (rows.step >= (first or 0))]
    others = others[np.isfinite(others)]
    return bool(len(others)) and float(np.mean(others <= np.nanmin(rows["reward"]))) > NEARLY_ALL


def _probable(data: RunData) -> Array:
    """Return [n] whether a response is one that the policy samples now and then, such as its end token alone.

    True where probabilities are not recorded. An engine can report those of a response that it then drops.
    """
    sample = data.sample
    if not data.has("tokens.logprob"):
        return np.ones(len(sample.rows), bool)
    return np.asarray(sample.total(np.fmin(sample["logprob"], sample.drawn)) > RARE)


@rule(
    number=69,
    needs=["rows.reward", "rows.group"],
    min_steps=10,
    traits=["grouped"],
    training_only=True,
    title="The prompts are exhausted",
    cause="In {share} of the groups all responses now get the same high reward ({before} at the start): these prompts "
    "have nothing left to teach.",
    healthy="share of groups in which all responses get the same reward, one of the highest tenth of the run: below "
    "{limit}, or less than {growth} above its start",
    fix="use new or harder prompts[; grpo.resample leaves such groups out]",
    source="DAPO 2503.14476",
    explains=["zero-variance-groups", "zero-gradient", "kl-flat"],
    severity="note",
)
def prompts_exhausted(data: RunData, *, limit: float = Share(0.5), growth: float = Share(0.2)) -> Reading | None:
    found = groups(data.rows, data.rows["reward"])
    if len(found.step) < 20 or not repeated(data.rows):
        return None
    points = mean_by_step(found.step, solved(data.rows, found))
    share, before = Share(points.last()), Share(points.first())
    high = max(limit, before + growth)
    first = since(points, smoothed(points).value > high, 4)
    words = {"share": share, "before": before}
    curve, unhealthy = Curve(points, high=high), first is not None and share > high
    return Reading(share, unhealthy, first, data.step_evidence([first]), words, curve)


@rule(
    number=90,
    needs=["rows.prompt", "rows.reward"],
    min_steps=16,
    training_only=True,
    title="The run has only a handful of prompts",
    cause="All {responses} responses are to {seen} different prompts: the policy fits these few, and what it writes to "
    "them becomes ever more alike.",
    healthy="number of different prompts: above {limit}, or without any finding that so few prompts would explain",
    fix="train on more prompts, or for fewer steps; check that the data loader reaches the whole data set",
    source="own threshold",
    explains=["entropy-collapse", "distinct-collapse", "template-collapse", "zero-variance-groups", "zero-gradient",
              "reward-exhausted", "over-optimised"],
    alone="healthy",
)  # fmt: skip
def few_prompts(data: RunData, *, limit: float = 8.0) -> Reading | None:
    rows = data.sample.rows
    prompts = [text or "" for text in rows.texts("prompt")]
    if "" in prompts:
        return None  # no prompts are known, as in a log of texts that begin with them
    _, first = np.unique(prompts, return_index=True)
    points = Series(
        rows.steps,
        np.cumsum(np.bincount(np.searchsorted(rows.steps, rows.step[first]), minlength=len(rows.steps)), dtype=float),
    )
    words: Words = {"responses": float(len(data.rows))}
    evidence = rows.evidence(first)
    return Reading(
        float(len(first)), len(first) <= limit, int(rows.steps[0]), evidence, words, Curve(points, low=limit)
    )


@rule(
    number=70,
    needs=["steps.time/total|steps.time/step"],
    min_steps=10,
    title="Steps stall",
    cause="The slowest step took {seen} times as long as usual ({seconds} s), most of it in {phase}.",
    healthy="time of a step / median of the steps: below {limit}; steps under {shortest} s do not count",
    fix="look for a straggler: one long response, a machine that swaps, a slow reward service",
    source="miles; rlprobe",
    severity="note",
)
def stalls(data: RunData, *, limit: float = 6.0, shortest: float = 5.0) -> Reading | None:
    points = data.metric("time/total") if data.has("steps.time/total") else data.metric("time/step")
    later = points.where(points.step > points.step[0])  # the first step includes warm-up
    if len(later) < 9:
        return None
    over = later.value / np.median(later.value)
    worst = int(np.argmax(over))
    # Short steps vary due to noise of the machine alone.
    unhealthy = bool(over[worst] > limit and later.value[worst] > shortest)
    step = int(later.step[worst])
    words: Words = {"seconds": float(later.value[worst]), "phase": _slowest_phase(data, step)}
    curve = Curve(Series(later.step, over), high=limit)
    return Reading(float(over[worst]), unhealthy, step, data.step_evidence([step]), words, curve, between=(step, step))


def _slowest_phase(data: RunData, step: int) -> str:
    names = [name for name in data.metrics if name.startswith("time/") and name not in ("time/total", "time/step")]
    spent = {name: data.metric(name) for name in names}
    at = {name: float(points.value[points.step == step].sum()) for name, points in spent.items()}
    return max(at, key=lambda name: at[name]).removeprefix("time/") if at else Phrase("an unknown phase")
