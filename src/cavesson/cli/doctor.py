"""The command that diagnoses a run."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cavesson.cli.flags import console
from cavesson.errors import UserError

doctor_app = typer.Typer()


class FailOn(StrEnum):
    """The severity from which the exit code is 1."""

    error = "error"
    warning = "warning"
    note = "note"
    never = "never"


class LanguageName(StrEnum):
    """The language of a diagnosis."""

    en = "en"
    zh = "zh"
    vi = "vi"


@doctor_app.command()
def doctor(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or a URL such as s3://bucket/run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with charts and coloured tokens to this file.")
    ] = None,
    board: Annotated[
        str | None, typer.Option(help="Link the page into the board at this address: http://127.0.0.1:6008.")
    ] = None,
    language: Annotated[LanguageName | None, typer.Option(help="By LANG where not given.")] = None,
    fail_on: Annotated[FailOn, typer.Option(help="Exit with 1 from this severity on.")] = FailOn.never,
    rules: Annotated[list[Path] | None, typer.Option(help="A Python file with rules of your own.")] = None,
) -> None:
    """Say what is wrong with a run, since when, why, and what to change: cavesson doctor RUN."""
    from cavesson.doctor.data import RunData
    from cavesson.doctor.diagnosis import SEVERITIES, diagnose, worst
    from cavesson.doctor.own import all_rules
    from cavesson.doctor.report.page import page
    from cavesson.doctor.report.plain import plain
    from cavesson.doctor.report.terminal import show
    from cavesson.doctor.words import language as language_named
    from cavesson.record import open as open_run
    from cavesson.record.background import small_process
    from cavesson.record.files import write_text
    from cavesson.record.writable import check_file
    from cavesson.text.visible import safe_json

    if board is not None and html is None:
        raise UserError("--board links the page into the board: give --html FILE, too")
    if html is not None:
        check_file(html)
    small_process()
    data = RunData(open_run(run))
    diagnosis = diagnose(data, all_rules(rules or []))
    words = language_named(language)
    if html is not None:
        write_text(html, page(data, diagnosis, words, board))
    if as_json:
        print(safe_json(json.dumps(plain(data, diagnosis, words), ensure_ascii=False, indent=1)))
    else:
        show(console(), data, diagnosis, words)
    found = worst(diagnosis.findings)
    if fail_on is not FailOn.never and found and SEVERITIES.index(found) <= SEVERITIES.index(fail_on.value):
        raise typer.Exit(1)
