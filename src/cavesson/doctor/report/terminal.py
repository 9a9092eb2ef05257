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
from cavesson.doctor.words import Language, number
from cavesson.text.visible import visible

COLOURS = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}


def show(console: Console, data: RunData, diagnosis: Diagnosis, language: Language) -> None:
    """Print the causes with their consequences, then the healthy rules, then the skipped ones."""
    say = language.phrase
    steps = data.rows.steps
    where = f"{say('steps')} {steps[0]}–{steps[-1]}, " if len(steps) else ""
    console.print(Text.assemble((visible(data.run.folder), "bold"), f"  {where}{len(data.rows)} {say('rollouts')}"))
    if diagnosis.healthy and not diagnosis.findings:
        console.print(Text(say("No problems found."), "bold green"))
    elif not diagnosis.findings:
        console.print(Text(say("Nothing could be checked."), "bold yellow"))
    folded = {finding.rule.name: finding for finding in diagnosis.findings if not finding.cause}
    for finding in diagnosis.causes:
        _show_cause(console, finding, folded, language)
    if any(finding.reading.evidence for finding in diagnosis.causes):
        command = f"{visible(command_line('show', data.run.folder))} --step … --sample …"
        console.print(Text(f"\n{say('One rollout token by token')}: {command}", "dim"))
    _show_names(console, say("Healthy"), "", [rule.name for rule, _ in diagnosis.healthy])
    for reason in dict.fromkeys(one.reason for one in diagnosis.skipped):
        alike = [one for one in diagnosis.skipped if one.reason == reason]
        why = language.reason(_together(alike))
        _show_names(console, say("Not checked"), f" – {why}", [one.rule for one in alike])


def _show_names(console: Console, title: str, why: str, names: list[str]) -> None:
    if names:
        console.print(Text.assemble("\n", (title, "bold"), f" ({len(names)}){why}"))
        console.print(Padding(Text(", ".join(names), "dim"), (0, 2)))


def _together(skipped: list[Skipped]) -> Skipped:
    """Merge rules that were skipped for the same reason into one that lists everything they lack."""
    lines = [{name: number(w) if isinstance(w, float) else w for name, w in one.words.items()} for one in skipped]
    parts = {name: dict.fromkeys(part for line in lines for part in str(line[name]).split(", ")) for name in lines[0]}
    return replace(skipped[0], words={name: ", ".join(several) for name, several in parts.items()})


def _show_cause(console: Console, finding: Finding, folded: dict[str, Finding], language: Language) -> None:
    say, texts = language.phrase, language.texts(finding.rule, finding.reading)
    since = finding.reading.since
    console.print()
    head = Text(f"{say(finding.severity)}: {texts.title}", COLOURS[finding.severity])
    if since is not None:
        head.append(f"  {say('since step')} {since}", "not bold")
    console.print(head)
    console.print(Padding(Text(texts.cause), (0, 2)))
    table = Table.grid(padding=(0, 2))
    lines = [
        (say("seen"), f"{number(finding.reading.seen)}  ({texts.healthy})"),
        (say("change"), texts.fix),
        (say("explains"), "; ".join(language.texts(folded[n].rule, folded[n].reading).title for n in finding.explains)),
        (say("look at"), ", ".join(_place(place, language) for place in finding.reading.evidence)),
        (say("source"), finding.rule.source),
    ]
    for name, text in lines:
        if text:
            table.add_row(Text(name, "dim"), Text(text))
    console.print(Padding(table, (0, 2)))


def _place(place: Evidence, language: Language) -> str:
    parts = {"step": place.step, "sample": place.sample, "token": place.start}
    return " · ".join(f"{language.phrase(name)} {at}" for name, at in parts.items() if at is not None)
