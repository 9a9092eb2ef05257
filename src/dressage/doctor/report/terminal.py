"""A diagnosis in the terminal."""

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dressage.doctor.data import RunData
from dressage.doctor.diagnosis import Diagnosis, Finding
from dressage.doctor.report.plain import view
from dressage.doctor.words import Language, number

COLOURS = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}


def show(console: Console, data: RunData, diagnosis: Diagnosis, language: Language) -> None:
    """Prints the causes with what they explain, then what is healthy, then what was skipped."""
    say = language.phrase
    steps = data.rows.steps
    where = f"{say('steps')} {steps[0]}–{steps[-1]}, " if len(steps) else ""
    console.print(f"[bold]{data.run.folder}[/]  {where}{len(data.rows)} {say('rollouts')}", highlight=False)
    if not diagnosis.findings:
        console.print(Text(say("Nothing was found wrong."), "bold green"))
    folded = {finding.rule.name: finding for finding in diagnosis.findings if not finding.cause}
    for finding in diagnosis.causes:
        _show_cause(console, finding, folded, language)
    _show_healthy(console, diagnosis, language)
    if diagnosis.skipped:
        console.print(f"\n[bold]{say('Not looked at')}[/]")
        for one in diagnosis.skipped:
            console.print(Text.assemble("  ", (one.rule, "dim"), f"  {language.reason(one)}"))


def _show_cause(console: Console, finding: Finding, folded: dict[str, Finding], language: Language) -> None:
    say, texts = language.phrase, language.said(finding.rule, finding.reading)
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
        (say("explains"), ", ".join(language.said(folded[n].rule, folded[n].reading).title for n in finding.explains)),
        (say("look at"), "  ".join(view(place) for place in finding.reading.evidence)),
        (say("source"), finding.rule.source),
    ]
    for name, text in lines:
        if text:
            table.add_row(Text(name, "dim"), Text(text))
    console.print(Padding(table, (0, 2)))


def _show_healthy(console: Console, diagnosis: Diagnosis, language: Language) -> None:
    if not diagnosis.healthy:
        return
    console.print(f"\n[bold]{language.phrase('Healthy')}[/]")
    table = Table.grid(padding=(0, 2))
    for rule, reading in diagnosis.healthy:
        meaning = Text(language.healthy(rule), "dim")
        table.add_row(Text(f"  {rule.name}", "green"), Text(number(reading.seen), justify="right"), meaning)
    console.print(table)
