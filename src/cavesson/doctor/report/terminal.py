"""A diagnosis as terminal output."""

from dataclasses import replace

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cavesson.command_line import command_line
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import Diagnosis, Finding
from cavesson.doctor.finding import Evidence, Skipped
from cavesson.doctor.proposal import flags
from cavesson.doctor.recording import DOCS, needs
from cavesson.doctor.report.summary import how_to_record, in_trainer, open_failures, recipe_title, since, summary
from cavesson.doctor.words import Language, number
from cavesson.text.visible import visible

COLOURS = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}


def show(console: Console, data: RunData, diagnosis: Diagnosis, language: Language) -> None:
    """Print the causes with their consequences, then how much could be judged, and what could not be excluded."""
    say = language.phrase
    steps = data.steps
    where = f"{say('steps')} {steps[0]}–{steps[-1]}, " if len(steps) else ""
    console.print(Text.assemble((visible(data.run.folder), "bold"), f"  {where}{len(data.rows)} {say('rollouts')}"))
    console.print(Text(summary(diagnosis, language), "bold"))
    folded = {finding.rule.name: finding for finding in diagnosis.findings if not finding.cause}
    for finding in diagnosis.causes:
        _show_cause(console, finding, folded, int(steps[0]) if len(steps) else 0, language)
    if any(finding.reading.evidence for finding in diagnosis.causes):
        command = f"{visible(command_line('show', data.run.folder))} --step … --sample …"
        console.print(Text(f"\n{say('One rollout token by token')}: {command}", "dim"))
    if any(finding.settings for finding in diagnosis.causes):
        command = visible(command_line("doctor", data.run.folder, "--fix"))
        console.print(Text(f"{say('Try the settings beside an unchanged run')}: {command}", "dim"))
    _show_open(console, data, diagnosis, language)
    _show_names(console, say("Looked at and within range"), "", [rule.name for rule, _ in diagnosis.healthy])
    for reason in dict.fromkeys(one.reason for one in diagnosis.skipped):
        alike = [one for one in diagnosis.skipped if one.reason == reason]
        why = language.reason(_together(alike))
        _show_names(console, say("Not checked"), f" – {why}", [one.rule for one in alike])


def _show_open(console: Console, data: RunData, diagnosis: Diagnosis, language: Language) -> None:
    several = open_failures(diagnosis, language)
    if several:
        console.print(Text.assemble("\n", (language.phrase("Cannot be excluded"), "bold yellow"), f" ({len(several)})"))
    table = Table.grid(padding=(0, 2))
    for failure, record in several:
        table.add_row(failure, Text(record, "dim"))
    console.print(Padding(table, (0, 2)))
    for recipe in how_to_record(data, diagnosis):
        console.print(Padding(Text(f"{recipe_title(recipe, language)} ({DOCS}):"), (1, 2, 0, 2)))
        console.print(Padding(Text(recipe.code), (0, 4)))


def _show_names(console: Console, title: str, why: str, names: list[str]) -> None:
    if names:
        console.print(Text.assemble("\n", (title, "bold"), f" ({len(names)}){why}"))
        console.print(Padding(Text(", ".join(names), "dim"), (0, 2)))


def _together(skipped: list[Skipped]) -> Skipped:
    """Merge rules that were skipped for the same reason into one that lists everything they lack."""
    lines = [{name: number(w) if isinstance(w, float) else w for name, w in one.words.items()} for one in skipped]
    parts = {name: dict.fromkeys(part for line in lines for part in str(line[name]).split(", ")) for name in lines[0]}
    return replace(skipped[0], words={name: ", ".join(several) for name, several in parts.items()})


def _show_cause(console: Console, finding: Finding, folded: dict[str, Finding], first: int, language: Language) -> None:
    say, texts = language.phrase, language.texts(finding.rule, finding.reading, finding.names)
    console.print()
    head = Text(f"{say(finding.severity)}: {texts.title}", COLOURS[finding.severity])
    if finding.reading.since is not None:
        head.append(f"  {since(finding.reading, first, language)}", "not bold")
    console.print(head)
    console.print(Padding(Text(texts.cause), (0, 2)))
    table = Table.grid(padding=(0, 2))
    lines = [
        (say("seen"), f"{number(finding.reading.seen)}  ({texts.healthy})"),
        (say("change"), texts.fix),
        in_trainer(finding, language),
        (say("settings"), flags(finding.settings)),
        (say("explains"), "; ".join(language.texts(folded[n].rule, folded[n].reading).title for n in finding.explains)),
        (say("look at"), ", ".join(_place(place, language) for place in finding.reading.evidence)),
        (say("derived"), "; ".join(f"{needs(one.gives)}: {say(one.how)}" for one in finding.derived)),
        (say("source"), finding.rule.source),
    ]
    for name, text in lines:
        if text:
            table.add_row(Text(name, "dim"), Text(text))
    console.print(Padding(table, (0, 2)))


def _place(place: Evidence, language: Language) -> str:
    parts = {"step": place.step, "sample": place.sample, "token": place.start}
    return " · ".join(f"{language.phrase(name)} {at}" for name, at in parts.items() if at is not None)
