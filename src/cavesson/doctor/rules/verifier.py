"""The rule on a verifier that fails, so that all responses get its lowest score."""

from typing import NamedTuple

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.reading import Curve, Reading, Words
from cavesson.doctor.readings import at_least, exceeds
from cavesson.doctor.rows import Rows
from cavesson.doctor.rule import Disproof, rule
from cavesson.doctor.rules.consequences import CRITIC
from cavesson.doctor.series import Array, Series, mean_by_step, trend
from cavesson.findings.finding import Severity
from cavesson.findings.words import Phrase, Share
from cavesson.text.words import contains

MIN_RESPONSES = 30
"""Responses from which it is said that all have the same reward."""
FAILS = Phrase(
    "the verifier fails on them (an extraction pattern, a template, a time limit), or no response ever passes"
)
ALL_EQUAL = Phrase(
    "no response gets another reward, so the policy learns nothing: all are right, or the verifier accepts everything"
)
CLEAR, DWINDLED = 4.0, 0.6
"""Standard errors of a fall that chance does not explain, and the share of the earlier passes below which later ones
are much fewer."""
ALIVE = 0.8
"""Share of the responses with its lowest score up to which a part of the reward has worked before."""


class Scores(NamedTuple):
    """Finite scores, each column [n]."""

    step: Array
    value: Array

    @classmethod
    def of(cls, rows: Rows, values: Array) -> "Scores":
        """Return those of some rollouts, [n]."""
        finite = np.isfinite(values)
        return cls(rows.step[finite], values[finite])


def lacks_answers(data: RunData) -> bool:
    """Return whether hardly any response with the lowest reward contains the right answer, so that it deserves it."""
    contain = _answers(data)
    return contain is not None and bool(np.mean(contain) < 1 - ALIVE)


def has_answers(data: RunData) -> bool:
    """Return whether many responses with the lowest reward contain the right answer, so that they deserve more."""
    contain = _answers(data)
    return contain is not None and bool(np.mean(contain) >= 1 - ALIVE)


def _answers(data: RunData) -> list[bool] | None:
    """Return which responses with the lowest reward contain the right answer; None if that is not recorded."""
    rows = data.sample.rows
    if not data.has("rows.ground_truth") or not data.has("rows.response"):
        return None
    reward, texts = rows["reward"], rows.texts("response")
    truths = [(truth or "").strip() for truth in rows.texts("ground_truth")]
    known = [i for i in np.flatnonzero(reward == np.nanmin(reward)) if truths[i]]
    contain = [contains(texts[i] or "", truths[i]) for i in known]
    return contain if len(known) >= MIN_RESPONSES else None


@rule(
    number=55,
    needs=["rows.reward"],
    severity="error",
    min_steps=3,
    title="Nearly every response gets the same reward",
    cause="{seen} of all responses get exactly {value}{part}: {why}.",
    healthy="share of responses with the lowest reward of the run: below {limit}, or below {end} at the end, or one "
    "that falls from the start",
    fix="score a response that is known to be right by hand; inspect a few responses that got {value}",
    source="autocontext pull request 1067; own threshold",
    explains=["zero-variance-groups", "zero-gradient", "kl-flat", "reward-is-noise", "reward-falls", *CRITIC],
    disproof=Disproof(
        ("rows.ground_truth",),
        "the responses that get the lowest reward do not contain the right answer",
        lacks_answers,
    ),
    windows=True,
)
def verifier_dead(data: RunData, *, limit: float = Share(0.95), end: float = Share(0.9)) -> Reading | None:
    rows, everything = data.rows, data.whole.rows
    scores = Scores.of(rows, rows["reward"])
    found = _dead(data, scores, Scores.of(everything, everything["reward"]), limit, end)
    if found is None or found.unhealthy or data.whole is not data or not data.sample.rows.has("reward_parts"):
        return found
    # One of several verifiers can fail. What has hardly ever given more may be a part that responses rarely earn.
    parts = data.sample.rows.reward_parts
    for name, values in parts.items() if len(parts) > 1 else ():
        scores = Scores.of(data.sample.rows, values)
        part = _dead(data, scores, scores, limit, end, f" ({name})")
        if part is not None and part.unhealthy and part.since is not None:
            before = scores.value[scores.step < part.since]
            if len(before) and np.mean(before == scores.value.min()) <= ALIVE:
                return part
    return found


def _dead(
    data: RunData, scores: Scores, everything: Scores, limit: float, end: float, part: str = ""
) -> Reading | None:
    """Return the share of the responses that get the lowest score, since a step from which on nearly all do.

    Args:
        data: The run, or a part of it.
        scores: Those that are judged.
        everything: Those of the whole run.
        limit: Smallest share of them that is a problem.
        end: The same at the end.
        part: Which part of the reward these are, as it is shown.
    """
    step, value = scores
    if len(step) < MIN_RESPONSES:
        return None
    floor = float(value.min())
    has_floor = value == floor
    points = mean_by_step(step, has_floor.astype(float))
    first = int(points.step[0])
    if not exceeds(data, has_floor.sum(), len(step), limit):
        first = _dead_since(points, step, has_floor, limit, data.chance) or first
    share = Share(has_floor[step >= first].mean())
    unhealthy = bool(share > limit and points.last() > end)
    earlier = everything.value[everything.step < first]
    if len(earlier):  # later, all responses may also have the highest reward
        unhealthy = unhealthy and bool(floor < earlier.mean())
    unhealthy = unhealthy and not _fades(everything, floor) and (len(earlier) > 0 or not _wakes(points, data.chance))
    curve = Curve(mean_by_step(everything.step, (everything.value == floor).astype(float)), high=limit)
    is_failure = floor <= 0 or floor < everything.value.max()
    words: Words = {"value": floor, "part": part, "why": FAILS if is_failure else ALL_EQUAL}
    # From the start, it may be that no response has deserved more, unless the right answer is among them.
    severity: Severity | None = None if len(earlier) or has_answers(data) else "warning"
    return Reading(share, unhealthy, first, data.step_evidence([first]), words, curve, severity=severity)


def _wakes(points: Series, chance: float) -> bool:
    """Return whether fewer responses get the lowest score [S] step after step: the policy learns what earns more."""
    found = trend(points)
    return found.change < 0 and found.p < chance


def _fades(scores: Scores, floor: float) -> bool:
    """Return whether passes, scores above the lowest one, become fewer over several steps.

    A verifier fails at once: neither before nor after the step at which the share of passes changes most does it fall
    again, by much. A policy that loses what it could do takes its time.
    """
    steps, where = np.unique(scores.step, return_inverse=True)
    count, passed = np.bincount(where), np.bincount(where, scores.value > floor)
    change, _ = _change(passed, count) if len(steps) > 1 else (1, 0.0)
    return any(_falls(passed[part], count[part]) for part in (slice(change), slice(change, None)))


def _falls(passed: Array, count: Array) -> bool:
    """Return whether a share [S] falls at some step, by much, and chance does not explain it."""
    if len(passed) < 2:
        return False
    at, gain = _change(passed, count)
    before, after = (passed[part].sum() / count[part].sum() for part in (slice(at), slice(at, None)))
    return bool(after < DWINDLED * before and 2 * gain > CLEAR**2)


def _change(passed: Array, count: Array) -> tuple[int, float]:
    """Return the step at which a share [S] changes most, and by how much two shares are more likely, in logarithms."""
    before, after = (np.stack([passed, count])[:, ::way].cumsum(1) for way in (1, -1))
    gain = _log_likelihood(*before)[:-1] + _log_likelihood(*after)[-2::-1] - _log_likelihood(*before)[-1]
    return int(np.argmax(gain)) + 1, float(gain.max())


def _log_likelihood(passed: Array, count: Array) -> Array:
    """Return the logarithm of the probability of so many passes, in their order, at their own share."""
    share = passed / count
    with np.errstate(divide="ignore", invalid="ignore"):  # 0 · log 0 = 0
        found = np.nan_to_num(passed * np.log(share)) + np.nan_to_num((count - passed) * np.log1p(-share))
    return np.asarray(found)


def _dead_since(points: Series, step: Array, has_floor: Array, limit: float, chance: float) -> int | None:
    """Return the step from which on nearly all responses have the lowest reward, if chance does not explain it."""
    alive = points.step[points.value <= limit]
    if not len(alive) or not np.any(step > alive[-1]):
        return None
    before, after = has_floor[step <= alive[-1]], has_floor[step > alive[-1]]
    usual = (before.sum() + 1) / (len(before) + 2)  # Laplace's rule of succession
    by_chance = at_least(after.sum(), len(after), usual) * len(points)
    return int(points.step[points.step > alive[-1]][0]) if len(after) >= MIN_RESPONSES and by_chance < chance else None
