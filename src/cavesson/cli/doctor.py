"""The command that diagnoses a run."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from cavesson.cli.flags import Json, console, print_json
from cavesson.cli.record import AllowRemote, RunPlace
from cavesson.errors import UserError

doctor_app = typer.Typer()
EXIT_CODES = {"recovered": 0, "not recovered": 1, "cannot tell": 4}
"""Of --fix; 2 and 3 are those of errors and of runs that were stopped."""


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
    as_json: Json = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with charts and coloured tokens to this file.")
    ] = None,
    board: Annotated[
        str | None, typer.Option(help="Link the page to the board at this address, such as http://127.0.0.1:6008.")
    ] = None,
    language: Annotated[LanguageName | None, typer.Option(help="Default: from LANG.")] = None,
    every_failure: Annotated[
        bool, typer.Option("--all", help="List every failure that cannot be excluded, not only the three most likely.")
    ] = False,
    fail_on: Annotated[
        FailOn, typer.Option(help="Exit with code 1 if a finding has at least this severity.")
    ] = FailOn.never,
    rules: Annotated[list[Path] | None, typer.Option(help="A Python file with your own rules.")] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Train the run on with and without the proposed settings, and compare both.")
    ] = False,
    finding: Annotated[
        str | None,
        typer.Option(metavar="RULE", help="With --fix: what to fix. Default: the first with a setting."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="With --fix: steps to train. Default: to the end of the run.", min=1)
    ] = None,
    start: Annotated[
        int | None,
        typer.Option(
            "--from", help="With --fix: begin at this checkpoint, or at 0. Default: the last healthy one.", min=0
        ),
    ] = None,
    allow_remote: AllowRemote = False,
) -> None:
    """Diagnose a run: what is wrong, since when, why, and what to change: cavesson doctor RUN."""
    if fix:
        fails = None if fail_on is FailOn.never else fail_on
        _refuse("with --fix", {"--html": html, "--board": board, "--fail-on": fails, "--all": every_failure or None})
        _fix(run, as_json, language, rules or [], finding, steps, start, allow_remote)
    else:
        _refuse("without --fix", {"--finding": finding, "--steps": steps, "--from": start})
        _refuse("with --json, which has everything", {"--all": (every_failure and as_json) or None})
        _diagnose(run, as_json, html, board, language, every_failure, fail_on, rules or [], allow_remote)


def _refuse(why: str, options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if value is not None:
            raise UserError(f"{name} has no effect {why}")


def _diagnose(
    run: str,
    as_json: bool,
    html: Path | None,
    board: str | None,
    language: LanguageName | None,
    every_failure: bool,
    fail_on: FailOn,
    rules: list[Path],
    allow_remote: bool,
) -> None:
    from cavesson.doctor.data import RunData
    from cavesson.doctor.diagnosis import diagnose
    from cavesson.doctor.plugins import all_rules
    from cavesson.doctor.words import language as language_named
    from cavesson.findings.finding import SEVERITIES, worst
    from cavesson.process_limits import REUSED, small_process
    from cavesson.record import open as open_run
    from cavesson.record.files import write_text
    from cavesson.record.write.writable import check_file

    if board is not None and html is None:
        raise UserError("--board adds links to the page of --html; add --html FILE")
    if html is not None:
        check_file(html)
    small_process(REUSED)
    data = RunData(open_run(run, allow_remote))
    diagnosis = diagnose(data, all_rules(rules))
    words = language_named(language)
    if html is not None:
        from cavesson.doctor.report.page import page

        # The printed address of a board has its token, which the page must not have.
        write_text(html, page(data, diagnosis, words, board and board.partition("?")[0]))
    if as_json:
        from cavesson.doctor.report.plain import plain

        print_json(plain(data, diagnosis, words))
    else:
        from cavesson.doctor.report.terminal import show

        show(console(), data, diagnosis, words, every_failure)
    found = worst(one.severity for one in diagnosis.findings)
    if fail_on is not FailOn.never and found and SEVERITIES.index(found) <= SEVERITIES.index(fail_on.value):
        raise typer.Exit(1)


def _fix(
    run: str,
    as_json: bool,
    language: LanguageName | None,
    rules: list[Path],
    finding: str | None,
    steps: int | None,
    start: int | None,
    allow_remote: bool,
) -> NoReturn:
    from cavesson.doctor.plugins import all_rules
    from cavesson.doctor.words import language as language_named
    from cavesson.repair import verify
    from cavesson.repair.show import plain, show

    if "://" in run:
        raise UserError("--fix needs the folder of the run, which has its checkpoints, not the URL of its record")
    words = language_named(language)
    outcome = verify(
        Path(run),
        finding=finding,
        steps=steps,
        start=start,
        rules=all_rules(rules),
        words=words,
        allow_remote=allow_remote,
    )
    if as_json:
        print_json(plain(outcome))
    else:
        show(console(), outcome, words)
    raise typer.Exit(EXIT_CODES[outcome.verdict])
