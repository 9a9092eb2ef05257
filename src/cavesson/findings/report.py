"""A finding as terminal output, as one line, as JSON and for the board; the page of the doctor shows the same facts."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cavesson.findings.finding import Evidence, Finding, Result, Severity
from cavesson.findings.fixes import flags, recipe_lines
from cavesson.text.visible import visible

COLOURS: Mapping[Severity, str] = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
Say = Callable[[str], str]
"""Translates a phrase of the report."""


class Fact(NamedTuple):
    """A line below the cause of a finding."""

    kind: str
    """seen, fix, explains, evidence, derived or source"""
    label: str
    text: str


def facts(finding: Finding, say: Say = str) -> list[Fact]:
    """Return what is known of a finding, in the order in which it is read; nothing is empty."""
    seen = f"{finding.shown}  ({finding.healthy})" if finding.seen is not None else ""
    by_source: dict[str, list[str]] = {}
    for name, how in finding.derived.items():
        by_source.setdefault(how, []).append(name)
    lines = [
        Fact("seen", say("seen"), seen),
        Fact("fix", say("change"), finding.fix),
        Fact("fix", *in_trainer(finding, say)),
        Fact("fix", say("settings"), flags(finding.settings)),
        Fact("explains", say("explains"), "; ".join(finding.explains.values())),
        Fact("evidence", say("look at"), ", ".join(_location(one, say) for one in finding.evidence)),
        Fact("derived", say("derived"), "; ".join(f"{', '.join(names)}: {how}" for how, names in by_source.items())),
        Fact("source", say("source"), finding.source),
    ]
    return [line for line in lines if line.text]


def in_trainer(finding: Finding, say: Say = str) -> tuple[str, str]:
    """Return a label and what the settings of the fix are called in the run's trainer; both are empty without one."""
    found = finding.trainer_setting_names
    if found is None:
        return "", ""
    names = "; ".join(f"{setting} → {name}" for setting, name in found.settings.items())
    return say("in {trainer}").format(trainer=found.trainer), names


def since(finding: Finding, say: Say = str, first: int | None = None) -> str:
    """Return since when a problem exists, and over which steps it was judged if not over the whole run.

    Args:
        finding: The finding.
        say: Translates phrases.
        first: The first step of the run.
    """
    if finding.since_step is None:
        return ""
    text = f"{say('since step')} {finding.since_step}"
    if finding.since_between == (first, first):
        text += f" ({say('the first')})"
    elif finding.since_between is not None:
        low, high = finding.since_between
        text += f" (90 %: {low})" if low == high else f" (90 %: {low}–{high})"
    if finding.window is not None:
        text += f", {say('judged over steps')} {finding.window[0]}–{finding.window[1]}"
    return text


def show(console: Console, finding: Finding, say: Say = str, first: int | None = None) -> None:
    """Print a finding; for the arguments, see ``since``."""
    console.print()
    head = Text(f"{say(finding.severity)}: {visible(finding.title)}", COLOURS[finding.severity])
    if began := since(finding, say, first):
        head.append(f"  {began}", "not bold")
    console.print(head)
    console.print(Padding(Text(visible(finding.cause)), (0, 2)))
    print_grid(console, ((Text(one.label, "dim"), Text(visible(one.text))) for one in facts(finding, say)))


def print_grid(console: Console, rows: Iterable[tuple[str | Text, ...]], no_wrap: bool = False) -> None:
    """Print rows in indented columns; with `no_wrap`, the first column is never wrapped."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=no_wrap)
    for row in rows:
        table.add_row(*row)
    console.print(Padding(table, (0, 2)))


def line(finding: Finding) -> str:
    """Return a finding in one line, without its cause."""
    began = since(finding)
    return f"{finding.severity} {finding.rule}{began and f' {began}'}: {finding.title}"


def described(finding: Finding, explains: Iterable[str] = ()) -> str:
    """Return a finding in one line with its cause and fix, and with the rules of some of its consequences."""
    follows = ", ".join(explains)
    return f"{line(finding)}. {finding.cause}{follows and f' Explains: {follows}.'} Change: {finding.fix}"


def noted(results: Iterable[Result]) -> list[str]:
    """Return the findings among the results of checks, each in one line."""
    return [described(one) for one in results if isinstance(one, Finding)]


def plain(finding: Finding) -> dict[str, Any]:
    """Return a finding as plain data for JSON, which has no NaN or infinity."""
    seen = finding.seen
    return asdict(finding) | {
        "seen": None if isinstance(seen, float) and not math.isfinite(seen) else seen,
        "explains": list(finding.explains),
        "evidence": [asdict(one) | {"view": one.view} for one in finding.evidence],
    }


_SHOWN_ON_BOARD = (
    "rule", "severity", "title", "cause", "since_step", "since_between", "healthy", "fix", "trainer_setting_names",
    "source", "happened", "affected", "before", "after",
)  # fmt: skip


def for_board(finding: Finding) -> dict[str, Any]:
    """Return what the board's page shows of a finding, under the names of `plain`; `seen` and `explains` are texts."""
    everything = plain(finding)
    return {name: everything[name] for name in _SHOWN_ON_BOARD} | {
        "seen": finding.shown,
        "evidence": [one for one in everything["evidence"] if one["sample"] is not None],
        "explains": list(finding.explains.values()),
        "change": {"toml": recipe_lines(finding.settings), "flags": flags(finding.settings)},
    }


def _location(evidence: Evidence, say: Say) -> str:
    parts = {"step": evidence.step, "sample": evidence.sample, "token": evidence.start}
    return " · ".join(f"{say(name)} {at}" for name, at in parts.items() if at is not None)
