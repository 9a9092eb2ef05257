"""The outcome of a repair as terminal output and as plain data."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cavesson.doctor.diagnosis import Diagnosis
from cavesson.doctor.words import Language
from cavesson.findings.fixes import flags
from cavesson.findings.words import number
from cavesson.repair.compare import Compared
from cavesson.repair.verify import Outcome
from cavesson.text.visible import visible

STATES = {"found": "there", "gone": "gone", "not measured": "could not be measured"}
COLOURS = {"recovered": "bold green", "not recovered": "bold red", "cannot tell": "bold yellow"}


def show(console: Console, outcome: Outcome, words: Language) -> None:
    """Print the verdict, its reason, and the numbers behind it."""
    plan = outcome.plan
    console.print(Text(f"{outcome.verdict}: {reason(outcome)}", COLOURS[outcome.verdict]))
    table = Table.grid(padding=(0, 2))
    lines = [
        ("finding", plan.rule),
        ("settings", flags(plan.settings)),
        ("forks", f"steps {plan.start}–{plan.end - 1} in {outcome.folder}, from {plan.note}"),
        ("unchanged", _measured(outcome, outcome.unchanged, words)),
        ("changed", _measured(outcome, outcome.changed, words)),
        ("reward", _difference(outcome.reward)),
        ("new", ", ".join(outcome.new)),
    ]
    for name, text in lines:
        if text:
            table.add_row(Text(name, "dim"), Text(visible(text)))
    console.print(table)


def reason(outcome: Outcome) -> str:
    """Return why the verdict is as it is."""
    after, before = outcome.state(outcome.changed), outcome.state(outcome.unchanged)
    if "not measured" in (before, after):
        fork = "changed" if after == "not measured" else "unchanged"
        return f"the finding cannot be measured in the {fork} fork; --steps trains both for longer"
    if before == "gone" and after == "found":
        return "only the changed fork has the finding: the settings may cause it"
    if before == "gone":
        return "neither fork has the finding; --steps trains both for longer"
    if after == "found":
        return "the finding is still there"
    if outcome.verdict == "cannot tell":
        return (
            "the finding is gone, but the reward gains less, as it should if the problem was an exploited reward; "
            "read the responses of both forks to decide"
        )
    return "the finding is gone"


def _measured(outcome: Outcome, diagnosis: Diagnosis, words: Language) -> str:
    rule = outcome.plan.rule
    several = [(one.rule, one.reading) for one in diagnosis.findings] + list(diagnosis.healthy)
    seen = next((f": {number(read.seen)} ({words.healthy(one)})" for one, read in several if one.name == rule), "")
    return STATES[outcome.state(diagnosis)] + seen


def _difference(reward: Compared | None) -> str:
    if reward is None:
        return "not comparable"
    found, kind = reward.difference, "held-out prompts" if reward.held_out else "prompts of training"
    size = ("no clear difference", "gains more", "gains less")[found.sign]
    numbers = f"{number(reward.unchanged)} → {number(reward.changed)}"
    if reward.at_once:
        numbers += f", of which {number(reward.at_once)} at once, before anything is learned; the rest"
    bounds = "no interval: all prompts differ by the same"
    if found.low is not None and found.high is not None:
        bounds = f"95 % interval {number(found.low)} to {number(found.high)}"
    interval = f"{number(found.mean)}, {bounds}"
    return f"{size}: {numbers} ({interval}; {reward.prompts} {kind}, from step {reward.since})"


def plain(outcome: Outcome) -> dict[str, Any]:
    """Return the outcome ready for JSON."""
    plan, reward = outcome.plan, outcome.reward
    return {
        "verdict": outcome.verdict,
        "reason": reason(outcome),
        "finding": plan.rule,
        "settings": plan.settings,
        "flags": flags(plan.settings),
        "start": plan.start,
        "end": plan.end,
        "note": plan.note,
        "folder": str(outcome.folder),
        "unchanged": outcome.state(outcome.unchanged),
        "changed": outcome.state(outcome.changed),
        "new": outcome.new,
        "reward": None if reward is None else reward._asdict() | {"difference": vars(reward.difference)},
    }
