"""Rules on what a policy asks its tools for: nothing any more, or always the same, and what the reward makes of it."""

import json
import re
from typing import NamedTuple

import numpy as np

from cavesson.doctor.absent import no_calls, no_turns
from cavesson.doctor.data import RunData
from cavesson.doctor.groups import within
from cavesson.doctor.proposal import longer
from cavesson.doctor.reading import Affected, Curve, Reading, Words
from cavesson.doctor.rows import Rows
from cavesson.doctor.rule import rule
from cavesson.doctor.series import Array, mean_by_step, since, smoothed, standard_error
from cavesson.doctor.turns import Turns
from cavesson.findings.words import Phrase, Share
from cavesson.text.words import contains

MIN_EPISODES = 50
"""Episodes of a third of a run from which it can say that a tool is not called any more."""
MIN_CONTRAST, MIN_MIXED = 5.0, 8
"""Sum of squares of what is compared within groups, and groups with both kinds of it, from which their rewards have a
standard error: it says how much is known."""
EARLY, LATE_SHARE = Share(0.9), Share(0.98)
ONCE = 1e-6
FEW = Phrase("too few groups have both right and wrong results of tools")
LIMITS = re.compile(r"turn|max_(steps|iterations)|iteration", re.IGNORECASE)
"""How trainers call the end of an episode at a limit of turns."""


def _callers(turns: Turns, tool: str) -> Array:
    """Return [n] whether each episode calls a tool."""
    found = np.zeros(len(turns.rows), bool)
    found[turns.line[turns.calls.get(tool, np.zeros(0, int))]] = True
    return found


def _episodes(turns: Turns) -> Array:
    """Return [n] whether the turns of a rollout are known."""
    found = np.zeros(len(turns.rows), bool)
    found[turns.line] = True
    return found


def _offered(data: RunData) -> list[str]:
    """Return the tools that the run says it offers, or that have answered: a policy also calls what does not exist."""
    named = data.setting("tools", [])
    offered = [str(one) for one in named] if isinstance(named, list) else []
    answered = [name for name, calls in data.turns.calls.items() if not data.turns.failed[calls].all()]
    return list(dict.fromkeys([*offered, *answered]))


@rule(
    number=84,
    needs=["turns.role"],
    min_steps=8,
    training_only=True,
    title="A tool is never called",
    cause="{tool} is called in {seen} of the episodes in the last third of the run, and {before} in the first third: "
    "what is never tried is never learned.",
    healthy="share of the episodes in the last third of a run that call a tool which it offers: above {limit}",
    fix="train first on conversations that call the tool; say in the prompt when to use it; or do not offer it",
    source="ToRL 2503.23383; Search-R1 2503.09516",
    severity="note",
    absent=no_turns,
)
def tool_never_called(data: RunData, *, limit: float = Share(0.0)) -> Reading | None:
    turns, steps = data.turns, data.turns.rows.steps
    there, step = _episodes(turns), turns.rows.step
    early, late = (there & part for part in (step <= steps[len(steps) // 3], step >= steps[-(len(steps) // 3 or 1)]))
    found = []
    for tool in _offered(data) if late.sum() >= MIN_EPISODES else ():
        calls = _callers(turns, tool)
        before, share = Share(calls[early].mean() if early.any() else 0.0), Share(calls[late].mean())
        points = mean_by_step(step[there], calls[there].astype(float))
        # A tool that was hardly ever called may not be called in a third of the run by chance.
        is_known = not calls.any() or (1 - before) ** late.sum() < data.chance
        first = since(points, points.value <= limit, min(4, len(points)))
        unhealthy = is_known and share <= limit and first is not None
        words: Words = {"tool": tool, "before": before}
        found.append(Reading(share, unhealthy, first, data.step_evidence([first]), words, Curve(points, low=1e-3)))
    return min(found, key=lambda one: (not one.unhealthy, one.seen)) if found else None


@rule(
    number=85,
    needs=["turns.role", "turns.name", "rows.reward"],
    min_steps=8,
    training_only=True,
    title="A tool is always called, although calls earn nothing",
    cause="{tool} is now called in {seen} of the episodes ({before} in the first third of the run). While there were "
    "both, episodes with a call earned no more than others to the same prompts: the policy has learned to call, not to "
    "use the result.",
    healthy="share of the episodes that call a tool whose calls earn less than {gain} standard deviations of the "
    "reward: below {limit} in the last third of a run, or above {start} in the first one",
    fix="let a call cost a little, or reward what the policy makes of the result; where the tool is not needed, do not "
    "offer it",
    source="OTC 2504.14870",
    severity="note",
    absent=no_calls,
)
def tool_always_called(
    data: RunData, *, limit: float = LATE_SHARE, start: float = EARLY, gain: float = 0.3
) -> Reading | None:
    turns, rows = data.turns, data.turns.rows
    there = _episodes(turns) & np.isfinite(rows["reward"])
    early = there & (rows.step <= rows.steps[len(rows.steps) // 3])
    late = there & (rows.step >= rows.steps[-(len(rows.steps) // 3 or 1)])
    reward, found = within(rows, rows["reward"]), []
    for tool in turns.calls:
        calls = _callers(turns, tool)
        before, share = Share(calls[early].mean()), Share(calls[late].mean())
        points = mean_by_step(rows.step[there], calls[there].astype(float))
        first = since(points, smoothed(points).value > limit, min(4, len(points)))
        earned = _earned(reward[there & calls], reward[there & ~calls])
        useless = earned < gain * float(np.std(rows["reward"][there]))
        unhealthy = first is not None and share > limit and before < start and useless
        words: Words = {"tool": tool, "before": before}
        evidence, curve = data.step_evidence([first]), Curve(points, high=limit)
        affected = Affected(rows, calls, f"tool == {json.dumps(tool, ensure_ascii=False)}")
        found.append(Reading(share, unhealthy, first, evidence, words, curve, affected=affected))
    return max(found, key=lambda one: (one.unhealthy, one.seen)) if found else None


def _earned(calling: Array, others: Array) -> float:
    """Return the most that a call may earn, with a probability of 98 %; infinity if too few episodes tell."""
    if min(len(calling), len(others)) < MIN_EPISODES:
        return float("inf")
    error = np.hypot(standard_error(calling), standard_error(others))
    return float(calling.mean() - others.mean() + 2 * error)


@rule(
    number=83,
    needs=["turns.role"],
    min_steps=5,
    title="Episodes end by the limit of turns",
    cause="{seen} of {which} end because the policy has no turn left ({before} at the start): the reward judges "
    "episodes without an answer, and the last results are never read.",
    healthy="share of episodes that end by the limit of turns: below {limit} of those that call tools if a call is the "
    "last turn, else less than {growth} above its start; more if they earn more than the others",
    fix="a larger environment.max_turns; or tell the policy in the prompt how many turns it has, and reward an answer",
    settings={"environment.max_turns": longer()},
    source="verl (max_assistant_turns); verifiers (max_turns)",
    explains=["truncated", "reward-falls", "zero-variance-groups"],
    absent=no_turns,
)
def turn_limit(data: RunData, *, limit: float = Share(0.5), growth: float = Share(0.25)) -> Reading | None:
    turns, rows = data.turns, data.turns.rows
    there, at_limit, unread = _episodes(turns), _limited(turns), _unread(turns)
    # An episode that a user ends at the limit is complete; one that ends with the result of a call is not.
    is_cut = bool(at_limit.any()) and bool(unread[at_limit].mean() > 0.5)
    of = there & _calling(turns) if is_cut else there  # the limit cannot cut an episode without a call
    points = mean_by_step(rows.step[of], at_limit[of].astype(float))
    if len(points) < 5:
        return None
    share, before = Share(points.last()), Share(points.first())
    high = limit if is_cut else max(limit, before + growth)
    first = (
        None
        if _pays(rows["reward"], within(rows, rows["reward"]), at_limit, there)
        else since(points, smoothed(points).value > high, min(4, len(points)))
    )
    evidence = rows.evidence(np.flatnonzero(at_limit & (rows.step >= (first or 0))))
    unhealthy = first is not None and share > high
    which = Phrase("the episodes with calls") if is_cut else Phrase("the episodes")
    words: Words = {"before": before, "which": which}
    said = _limits(turns)
    named = f"finish_reason in {json.dumps(said, ensure_ascii=False)}"
    affected = Affected(rows, at_limit, named) if said else None
    return Reading(share, unhealthy, first, evidence, words, Curve(points, high=high), affected=affected)


def _calling(turns: Turns) -> Array:
    """Return [n] whether an episode has called a tool."""
    found = np.zeros(len(turns.rows), bool)
    found[turns.line[turns.role == "tool"]] = True
    return found


def _limits(turns: Turns) -> list[str]:
    """Return the reasons among those recorded why an episode ends that name the limit of turns."""
    if not turns.rows.recorded("finish_reason"):
        return []
    return sorted({one for one in turns.rows.texts("finish_reason") if one and LIMITS.search(one)})


def _limited(turns: Turns) -> Array:
    """Return [n] whether an episode ended by the limit: as recorded, or with as many turns as none exceeds, unread."""
    if limits := _limits(turns):
        return np.array([reason in limits for reason in turns.rows.texts("finish_reason")], bool)
    spoken = np.bincount(turns.line[turns.role == "assistant"], minlength=len(turns.rows))
    return np.asarray((spoken == spoken.max(initial=0)) & _unread(turns) & (spoken > 0))


def _unread(turns: Turns) -> Array:
    """Return [n] whether an episode ends with the result of a call."""
    found = np.zeros(len(turns.rows), bool)
    found[turns.line[turns.last & (turns.role == "tool")]] = True
    return found


def _pays(reward: Array, centred: Array, at_limit: Array, there: Array) -> bool:
    """Return whether episodes that end by the limit earn more than others to the same prompt."""
    known = there & np.isfinite(reward)
    cut, others = centred[known & at_limit], centred[known & ~at_limit]
    more = cut.mean() - others.mean() if len(cut) and len(others) else 0.0
    return bool(more > 0.1 * np.std(centred[known])) if known.any() else False


@rule(
    number=86,
    needs=["turns.role", "turns.text", "rows.reward", "rows.group"],
    min_steps=5,
    training_only=True,
    title="The reward does not depend on what tools return",
    cause="Of the episodes of a prompt that call tools, those whose calls {contrast} earn only {seen} standard "
    "deviations more than the others: the reward pays for the call and not for its result, or the policy does not use "
    "the result.",
    healthy="by how much a right result raises the reward, in standard deviations: above {limit}, or not known to be "
    "below it",
    fix="reward the answer that follows from the result; if a call is rewarded as such, by far less than a right "
    "answer; leave out prompts that need no tool",
    source="ToRL 2503.23383; ToolRL 2504.13958",
    explains=["tool-always-called", "reward-is-noise", "zero-variance-groups"],
    absent=no_calls,
)
def reward_ignores_results(data: RunData, *, limit: float = 0.25) -> Reading | None:
    rows = data.turns.rows
    found = [one for one in (_gain(rows, *contrast) for contrast in _contrasts(data.turns)) if one is not None]
    follows = _gain(rows, Phrase(""), _repeated(data.turns))
    if not found:
        return Reading(0.0, False, undecided=FEW)
    # What is right may be known in another way than the record's; a reward for what results say is one for results.
    is_used = follows is not None and follows.value >= limit
    gain = max(found, key=lambda one: (one.value >= limit, one.most < limit, one.value))
    undecided = FEW if gain.most >= limit > gain.value and not is_used else None
    since_when, words = int(rows.step[gain.bad[0]]), {"contrast": gain.contrast}
    unhealthy = gain.most < limit and not is_used
    return Reading(gain.value, unhealthy, since_when, rows.evidence(gain.bad), words, undecided=undecided)


class _Gain(NamedTuple):
    """By how much something good raises the reward, in standard deviations of the reward."""

    contrast: Phrase
    value: float
    most: float
    """What it may be, at three standard errors."""
    bad: Array
    """The rollouts without it."""


def _gain(rows: Rows, contrast: Phrase, good: Array) -> _Gain | None:
    """Return by how much what is good, [n] 1 or 0 or NaN, raises the reward within groups; None if too few tell."""
    reward = rows["reward"]
    kept, spread = np.isfinite(reward) & np.isfinite(good), float(np.nanstd(reward))
    slope = _slope(rows.group[kept], good[kept], reward[kept]) if spread else None
    return slope and _Gain(contrast, slope[0] / spread, slope[1] / spread, np.flatnonzero(kept & (good == 0)))


def _contrasts(turns: Turns) -> list[tuple[Phrase, Array]]:
    """Return [n] which episodes have good results or answers, 1, or bad ones, 0; NaN without calls, or with both."""
    rows, called = turns.rows, np.flatnonzero(turns.role == "tool")
    later = rows.step >= rows.steps[len(rows.steps) // 2]  # at first, a policy may not read results yet
    success = _of_episodes(turns, called, ~turns.failed[called], all_of_them=True)
    found = [(Phrase("succeed"), np.where(later, success, np.nan))]
    if rows.recorded("ground_truth") and len(called):
        truth, text = [one or "" for one in rows.texts("ground_truth")], turns.texts("text")
        says = [_says(text[call] or "", truth[turns.line[call]]) for call in called.tolist()]
        result, answers = _of_episodes(turns, called, np.array(says, bool)), _answers(turns)
        if np.nanmean(result) > 0.5:  # else it is not what the tools are asked for, nor perhaps what the reward is for
            right = np.array([_says(*both) if both[0] else np.nan for both in zip(answers, truth, strict=True)])
            found.insert(0, (Phrase("return the right answer"), np.where(later, result, np.nan)))
            found.append((Phrase("lead to the right answer"), np.where(np.isfinite(result), right, np.nan)))
    return found


def _repeated(turns: Turns) -> Array:
    """Return [n] whether what an episode says last repeats the result of a call; NaN without calls."""
    text, answers, called = turns.texts("text"), _answers(turns), np.flatnonzero(turns.role == "tool")
    pairs = [((text[call] or "").strip(), answers[turns.line[call]]) for call in called.tolist()]
    return _of_episodes(turns, called, np.array([_says(*both) or _says(*both[::-1]) for both in pairs], bool))


def _answers(turns: Turns) -> list[str]:
    """Return [n] what the policy says last, if nobody but tools has replied to it before, and nobody does after."""
    found, text = [""] * len(turns.rows), turns.texts("text")
    talks = np.zeros(len(turns.rows), bool)
    talks[turns.line[turns.role == "user"]] = True
    for turn in np.flatnonzero(turns.last & (turns.role == "assistant") & ~talks[turns.line]).tolist():
        found[int(turns.line[turn])] = (text[turn] or "").strip()
    return found


def _says(text: str, truth: str) -> bool:
    return bool(truth.strip()) and contains(text, truth.strip())


def _of_episodes(turns: Turns, calls: Array, good: Array, all_of_them: bool = False) -> Array:
    """Return [n] 1 if a call of an episode is good, 0 if none is; if ``all_of_them``, NaN if only some are."""
    size = len(turns.rows)
    count, right = np.bincount(turns.line[calls], minlength=size), np.bincount(turns.line[calls], good, size)
    found = np.where(count > 0, (right > 0).astype(float), np.nan)
    return np.where((right > 0) & (right < count), np.nan, found) if all_of_them else found


def _slope(group: Array, good: Array, reward: Array) -> tuple[float, float] | None:
    """Return by how much good results raise the reward within groups, and the most that it may be, at three errors."""
    _, group = np.unique(group, return_inverse=True)
    count = np.bincount(group)
    x, y = (values - (np.bincount(group, values) / count)[group] for values in (good, reward))
    squares = float(x @ x)
    mixed = len(np.unique(group[np.abs(x) > ONCE]))
    if squares < MIN_CONTRAST or mixed < MIN_MIXED:
        return None
    slope = float(x @ y) / squares
    freedom = max(len(x) - len(count) - 1, 1)
    error = float(np.sqrt(((y - slope * x) ** 2).sum() / freedom / squares))
    return slope, slope + 3 * error
