"""A diagnosis as terminal output."""

from dataclasses import replace

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from cavesson.command_line import command_line
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import Diagnosis
from cavesson.doctor.findings import findings_in
from cavesson.doctor.reading import Skipped
from cavesson.doctor.recording import DOCS
from cavesson.doctor.report.summary import (
    MOST_LIKELY,
    how_to_record,
    open_failures,
    recipe_title,
    short_recipes,
    summary,
)
from cavesson.doctor.words import Language
from cavesson.findings.report import print_grid
from cavesson.findings.report import show as show_finding
from cavesson.findings.words import number
from cavesson.text.visible import visible


def show(
    console: Console, data: RunData, diagnosis: Diagnosis, language: Language, every_failure: bool = False
) -> None:
    """Print the causes with their consequences, then how much could be judged, and what could not be excluded.

    Of the failures that cannot be excluded, only the most likely ones are printed without `every_failure`.
    """
    say = language.phrase
    steps = data.steps
    where = f"{say('steps')} {steps[0]}–{steps[-1]}, " if len(steps) else ""
    console.print(Text.assemble((visible(data.run.folder), "bold"), f"  {where}{len(data.rows)} {say('rollouts')}"))
    console.print(Text(summary(diagnosis, language), "bold"))
    for finding in findings_in(diagnosis, language):
        if finding.root:
            show_finding(console, finding, say, int(steps[0]) if len(steps) else 0)
    if any(finding.reading.evidence for finding in diagnosis.causes):
        command = f"{visible(command_line('show', data.run.folder))} --step … --sample …"
        console.print(Text(f"\n{say('One rollout token by token')}: {command}", "dim"))
    if any(finding.settings for finding in diagnosis.causes):
        command = visible(command_line("doctor", data.run.folder, "--fix"))
        console.print(Text(f"{say('Try the settings beside an unchanged run')}: {command}", "dim"))
    if every_failure:
        _show_every_failure(console, data, diagnosis, language)
    else:
        _show_likely_failures(console, data, diagnosis, language)
    _show_names(console, say("Looked at and within range"), "", [rule.name for rule, _ in diagnosis.healthy])
    for reason in dict.fromkeys(one.reason for one in diagnosis.skipped):
        alike = [one for one in diagnosis.skipped if one.reason == reason]
        why = language.reason(_together(alike))
        _show_names(console, say("Not checked"), f" – {why}", [one.rule for one in alike])


def _show_likely_failures(console: Console, data: RunData, diagnosis: Diagnosis, language: Language) -> None:
    several = open_failures(diagnosis, language)
    _show_failures(console, several[:MOST_LIKELY], len(several), language)
    if len(several) > MOST_LIKELY:
        more = language.phrase("{more} more").format(more=len(several) - MOST_LIKELY)
        command = visible(command_line("doctor", data.run.folder, "--all"))
        console.print(Padding(Text(f"{more}: {command}", "dim"), (0, 2)))
    for title, code in short_recipes(data, diagnosis, language):
        _show_code(console, title, code)


def _show_every_failure(console: Console, data: RunData, diagnosis: Diagnosis, language: Language) -> None:
    several = open_failures(diagnosis, language)
    _show_failures(console, several, len(several), language)
    for recipe in how_to_record(data, diagnosis):
        _show_code(console, recipe_title(recipe, language), recipe.code)


def _show_failures(console: Console, shown: list[tuple[str, str]], count: int, language: Language) -> None:
    if shown:
        console.print(Text.assemble("\n", (language.phrase("Cannot be excluded"), "bold yellow"), f" ({count})"))
    print_grid(console, ((failure, Text(record, "dim")) for failure, record in shown))


def _show_code(console: Console, title: str, code: str) -> None:
    console.print(Padding(Text(f"{title} ({DOCS}):"), (1, 2, 0, 2)))
    console.print(Padding(Text(code), (0, 4)))


def _show_names(console: Console, title: str, why: str, names: list[str]) -> None:
    if names:
        console.print(Text.assemble("\n", (title, "bold"), f" ({len(names)}){why}"))
        console.print(Padding(Text(", ".join(names), "dim"), (0, 2)))


def _together(skipped: list[Skipped]) -> Skipped:
    """Merge rules that were skipped for the same reason into one that lists everything they lack."""
    lines = [{name: number(w) if isinstance(w, float) else w for name, w in one.words.items()} for one in skipped]
    parts = {name: dict.fromkeys(part for line in lines for part in str(line[name]).split(", ")) for name in lines[0]}
    return replace(skipped[0], words={name: ", ".join(several) for name, several in parts.items()})
