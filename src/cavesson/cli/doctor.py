"""The command that diagnoses a run."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cavesson.cli.flags import console
from cavesson.cli.record import RunPlace
from cavesson.errors import UserError

doctor_app = typer.Typer()


class FailOn(StrEnum):
    """The lowest severity for which the exit code is 1."""

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
    run: RunPlace,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with charts and coloured tokens to this file.")
    ] = None,
    board: Annotated[
        str | None, typer.Option(help="Link the page to the board at this address, such as http://127.0.0.1:6008.")
    ] = None,
    language: Annotated[LanguageName | None, typer.Option(help="Default: from LANG.")] = None,
    fail_on: Annotated[
        FailOn, typer.Option(help="Exit with code 1 if a finding has at least this severity.")
    ] = FailOn.never,
    rules: Annotated[list[Path] | None, typer.Option(help="A Python file with your own rules.")] = None,
) -> None:
    """Diagnose a run: what is wrong, since when, why, and what to change: cavesson doctor RUN."""
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
        raise UserError("--board adds links to the page of --html; add --html FILE")
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
