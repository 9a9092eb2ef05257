"""Rules on the calls of tools in episodes: what fails, takes too long, is cut, or is never or always asked for."""

import json
import re
import unicodedata
from collections import Counter
from typing import NamedTuple

import numpy as np

from cavesson.doctor.absent import no_calls
from cavesson.doctor.data import RunData
from cavesson.doctor.reading import Affected, Curve, Reading, Words
from cavesson.doctor.readings import at_least
from cavesson.doctor.rule import rule
from cavesson.doctor.series import Array, Series, mean_by_step, since, smoothed
from cavesson.doctor.turns import Turns
from cavesson.findings.words import Phrase, Share

MIN_CALLS = 20
"""Calls of a tool from which its shares are judged."""
PERSISTENT = 5
"""Steps for which a share must be high, if there are so many."""
RARE = 0.01
"""Share of calls that may time out by chance."""
MARK = re.compile(
    r"(\.\.\.|…)?\s*[\[(<]?\s*(\.\.\.\s*)?(output |result |response |text )?(was )?truncated[^\n]{0,60}$", re.IGNORECASE
)
"""What programs write where they have cut a text."""
LONG = 60
"""Characters, or a third of as many tokens, below which a greatest length is that of what is said."""
CONSEQUENCES = ("turn-limit", "reward-ignores-results", "reward-is-noise", "zero-variance-groups", "reward-falls")


class _Tool(NamedTuple):
    """What is read of one tool."""

    name: str
    points: Series
    first: int | None
    wrong: Array
    """The calls in question, as indices of turns."""


def _worst(found: list[_Tool]) -> _Tool:
    """Return the tool with the highest share from where it is too high; of healthy ones, with the highest in all."""
    return max(found, key=lambda one: (one.first is not None, one.points.after(one.first).value.mean()))


def _judged(found: list[_Tool], limit: float, words: Words, turns: Turns, condition: str | None = None) -> Reading:
    """Return the reading of the worst tool; ``condition`` is what a filter says of a call in question."""
    worst = _worst(found)
    late = worst.wrong[turns.step[worst.wrong] >= worst.first] if worst.first is not None else worst.wrong
    seen = Share(worst.points.after(worst.first).value.mean())
    curve = Curve(worst.points, high=limit)
    wrong = np.isin(np.arange(len(turns.rows)), turns.line[worst.wrong])
    named = json.dumps(worst.name, ensure_ascii=False)
    return Reading(
        seen,
        worst.first is not None,
        worst.first,
        turns.evidence(late),
        {"tool": worst.name, **words},
        curve,
        affected=Affected(turns.rows, wrong, f"tool == {named} and {condition}") if condition else None,
    )


def _lasting(points: Series, limit: float) -> int | None:
    return since(points, smoothed(points).value > limit, min(PERSISTENT, len(points)))


def _enough(turns: Turns) -> dict[str, Array]:
    return {name: calls for name, calls in turns.calls.items() if len(calls) >= MIN_CALLS}


@rule(
    number=78,
    needs=["turns.role", "turns.name"],
    title="A tool times out",
    cause="{seen} of the calls of {tool} take too long and end without a result: what the policy learns depends on how "
    "busy the tool is.",
    healthy="share of a tool's calls that time out: below {limit}",
    fix="make the tool faster, or give it more capacity[; or a larger environment.timeout][; or fewer episodes at a "
    "time: environment.concurrency]",
    source="prime-rl; verifiers",
    explains=["calls-fail", "stalls", *CONSEQUENCES],
    absent=no_calls,
)
def calls_time_out(data: RunData, *, limit: float = Share(0.05)) -> Reading | None:
    turns, found = data.turns, []
    tools = _enough(turns)
    for name, calls in tools.items():
        points = turns.by_step(calls, turns.late)
        first = _lasting(points, limit)
        after = calls[turns.step[calls] >= first] if first is not None else calls
        chance = at_least(float(turns.late[after].sum()), len(after), RARE)
        found.append(
            _Tool(name, points, first if chance < data.chance / len(tools) else None, calls[turns.late[calls]])
        )
    return _judged(found, limit, {}, turns) if found else None


@rule(
    number=77,
    needs=["turns.role", "turns.name"],
    title="Calls of a tool fail",
    cause="{seen} of the calls of {tool} fail ({before} at the start), most often with: {error}. The policy reads "
    "errors in place of results.",
    healthy="share of a tool's calls that fail: below {limit}, or less than {growth} above its start; below {always} "
    "if it stays as it was at the start",
    fix="call the tool with these arguments outside of training, and read its log at these steps; if the arguments "
    "are wrong, make its description and its type hints clearer",
    source="prime-rl; verifiers",
    explains=CONSEQUENCES,
    absent=no_calls,
)
def calls_fail(
    data: RunData, *, limit: float = Share(0.2), growth: float = Share(0.15), always: float = Share(0.9)
) -> Reading | None:
    turns, found = data.turns, []
    tools, offered = _enough(turns), data.setting("tools", [])
    for name, calls in tools.items():
        points = turns.by_step(calls, turns.failed)
        first = _since_failing(turns, calls, points, max(limit, points.first() + growth), data.chance / len(tools))
        if min(points.first(), points.last(), points.value.mean()) > always and (
            name in offered or _goes_on(turns, calls)
        ):
            first = int(points.step[0])
        found.append(_Tool(name, points, first, calls[turns.failed[calls]]))
    if not found:
        return None
    worst = _worst(found)
    words: Words = {"before": Share(worst.points.first()), "error": _usual_error(turns, worst.wrong)}
    return _judged(found, max(limit, worst.points.first() + growth), words, turns, "error")


def _goes_on(turns: Turns, calls: Array) -> bool:
    """Return whether calls do not become rare: those of a tool that does not exist do, as the policy learns."""
    late = turns.step[calls] >= np.median(turns.rows.steps)
    return bool(late.mean() > 0.4)


def _since_failing(turns: Turns, calls: Array, points: Series, high: float, chance: float) -> int | None:
    """Return the step from which calls fail more often than before, unless chance explains it."""
    first = _lasting(points, high)
    if first is None or first == points.step[0]:
        return None
    is_late = turns.step[calls] >= first
    failed = turns.failed[calls]
    usual = max(float(failed[~is_late].mean()), RARE)
    return first if at_least(float(failed[is_late].sum()), int(is_late.sum()), usual) < chance else None


def _usual_error(turns: Turns, calls: Array) -> str:
    """Return the most frequent error, shortened to a line."""
    error, text = turns.texts("error"), turns.texts("text")
    said = Counter(" ".join((error[call] or text[call] or "").split())[:80] for call in calls.tolist())
    return said.most_common(1)[0][0] if said else ""


@rule(
    number=79,
    needs=["turns.role", "turns.name", "turns.text"],
    title="Results of a tool are cut",
    cause="{seen} of the results of {tool} end at {where}: the policy does not read the rest, which may hold what it "
    "asked for.",
    healthy="share of a tool's results that end at a mark of truncation, or at one greatest length in the middle of "
    "their text: below {limit}",
    fix="return less: search, select or summarise inside the tool; or raise the limit of the tool",
    source="verl (max_tool_response_length)",
    explains=CONSEQUENCES,
    windows=True,
    absent=no_calls,
)
def results_cut(data: RunData, *, limit: float = Share(0.05)) -> Reading | None:
    turns, found, where = data.turns, [], {}
    texts = turns.texts("text")
    for name, calls in _enough(turns).items():
        answered = calls[~turns.failed[calls]]
        said = [texts[call] or "" for call in answered.tolist()]
        if len(said) < MIN_CALLS:
            continue
        cut, where[name] = _cut(said, turns["tokens"][answered])
        points = mean_by_step(turns.step[answered], cut.astype(float))
        found.append(_Tool(name, points, _lasting(points, limit), answered[cut]))
    return _judged(found, limit, {"where": where[_worst(found).name]}, turns) if found else None


def _cut(texts: list[str], tokens: Array) -> tuple[Array, str]:
    """Return [n] which results are cut, and where in words."""
    marked = np.array([MARK.search(text[-120:]) is not None for text in texts], bool)
    if marked.any():
        return marked, Phrase("a mark of truncation")
    for length, least, unit in (
        (np.array([len(text) for text in texts], float), LONG, Phrase("the same number of characters")),
        (tokens, LONG / 3, Phrase("the same number of tokens")),
    ):
        pile = length == np.nanmax(length, initial=0)
        if np.nanmax(length, initial=0) >= least and _is_cut(texts, length, pile):
            return pile, unit
    return np.zeros(len(texts), bool), Phrase("their end")


def _is_cut(texts: list[str], length: Array, pile: Array) -> bool:
    """Return whether results of the greatest length are cut: many different ones, of no common form, without an end."""
    longest = [text for text, is_in in zip(texts, pile, strict=True) if is_in]
    below = length[(length < length[pile][0]) & (length >= 0.8 * length[pile][0])]
    others = Counter(below.tolist()).most_common(1)
    if len(set(longest)) < MIN_CALLS or len(longest) <= 5 * (others[0][1] if others else 1):
        return False
    shapes = Counter(re.sub(r"[^\W\d_]", "a", re.sub(r"\d", "0", text)) for text in longest)
    closed = np.mean([unicodedata.category(text.rstrip()[-1:] or "a")[0] in "PS" for text in longest])
    return shapes.most_common(1)[0][1] <= 0.2 * len(longest) and bool(closed <= 0.5)
