"""The command `cavesson import`."""

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from cavesson.command_line import command_line
from cavesson.errors import UserError
from cavesson.importers import follow_run, import_run
from cavesson.importers.importing import Report
from cavesson.text.counting import counted
from cavesson.text.visible import visible


def run_import(
    source: Path, run: Path, format: str | None, maps: list[str], follow: bool, until_idle: float | None
) -> None:
    """Run the import and print its result."""
    columns = dict(map(_pair, maps))
    if not follow:
        if until_idle is not None:
            raise UserError("--until-idle says when --follow ends: give both")
        _print(import_run(source, run, format, columns), run)
        return
    console = Console(stderr=True)
    name = escape(visible(str(source)))
    with console.status(f"following {name}; Ctrl-C ends it") as status:

        def progress(rollouts: int, rejected: int) -> None:
            status.update(f"following {name}: {counted(rollouts, 'rollout')}, {rejected:,} rejected; Ctrl-C ends it")

        report = follow_run(source, run, format, columns, until_idle, progress)
    _print(report, run)


def _pair(text: str) -> tuple[str, str]:
    name, sign, column = text.partition("=")
    if not sign or not name or not column:
        raise UserError(f"--map {text}: expected NAME=COLUMN, as in --map response=answer")
    return name, column


def _print(report: Report, run: Path) -> None:
    console = Console(soft_wrap=True, highlight=False)
    lines = [f"{counted(report.rollouts, 'rollout')} of {report.format} read into {run}", *report.notes]
    if report.rejected:
        lines.append(f"{counted(report.rejected, 'broken record')}, kept in {run / 'rejected.jsonl'}:")
        lines += [f"  {quote}" for quote in report.quotes]
        if report.rejected > len(report.quotes):
            lines.append("  …")
    # Quotes and column names come from a file: as plain text with control characters shown as symbols, they are safe.
    console.print(Text(visible("\n".join([*lines, f"next     {command_line('show', run)}"]))))
