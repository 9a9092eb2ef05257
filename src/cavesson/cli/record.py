"""The commands that use the record of a run."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cavesson.cli.flags import console, write_data
from cavesson.errors import UserError
from cavesson.text.counting import counted
from cavesson.text.visible import visible

if TYPE_CHECKING:
    from cavesson.record.read.query import Answer

record = typer.Typer()
ALL = 2**53
"""Lines that no answer has."""
RunPlace = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or a URL such as s3://bucket/run.")]
AllowRemote = Annotated[
    bool, typer.Option("--allow-remote", help="The record may be in object storage, if the folder says so.")
]


@record.command()
def compact(run: RunPlace, allow_remote: AllowRemote = False) -> None:
    """Merge the small files of a run into few large ones; nothing else about it changes."""
    from cavesson.record import Lock, LockedError
    from cavesson.record import open as open_run
    from cavesson.record.maintain import compaction

    files = open_run(run, allow_remote).storage
    try:
        with Lock(files):
            count, written = compaction.compact(files), None
    except LockedError as error:
        count, written = compaction.compact(files, ended=False), error
    print(f"{counted(count, 'segment')} merged" if count else "nothing to merge")
    if written:
        print(f"{written}\nThe newest step is not merged, and the next compact deletes the merged files")


@record.command()
def sql(
    run: RunPlace,
    query: Annotated[
        str, typer.Argument(help="One SELECT over rows, tokens, turns, steps, rollups, vocabulary and rescored.")
    ],
    seconds: Annotated[float, typer.Option(help="Time limit in seconds.", min=0)] = 60.0,
    memory: Annotated[int, typer.Option(help="Memory limit in MB.", min=16)] = 2048,
    limit: Annotated[
        int | None,
        typer.Option(help="Maximum number of lines to print. Default: 1000, or all with --csv and --json.", min=1),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print all lines as CSV.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all lines as a JSON array of objects.")] = False,
    allow_remote: AllowRemote = False,
) -> None:
    """Query a run with SQL, read-only: cavesson sql RUN "select step, avg(reward) from rows group by step"."""
    from cavesson.record import open as open_run
    from cavesson.record.read.query import query as run_query
    from cavesson.record.read.query_output import to_csv, to_json
    from cavesson.record.read.show import show_answer

    if as_csv and as_json:
        raise UserError("give --csv or --json, not both")
    opened = open_run(run, allow_remote)
    if as_csv or as_json:
        answer = run_query(opened, query, seconds=seconds, memory=memory << 20, limit=limit or ALL)
        _print_plain(answer, to_csv(answer) if as_csv else to_json(answer))
        return
    limit = limit or 1000
    answer = run_query(opened, query, seconds=seconds, memory=memory << 20, limit=limit)
    terminal = console()
    show_answer(answer.columns, answer.rows, terminal)
    more = f", and there are more: --limit {2 * limit} shows twice as many" if answer.truncated else ""
    terminal.print(f"{counted(len(answer.rows), 'line')}{more}", highlight=False)


@record.command("push-to-hub")
def push_to_hub(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    repo: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository on the Hugging Face Hub.")],
    public: Annotated[bool, typer.Option("--public", help="Create a repository that everybody can read.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the files and the model card.")] = False,
    allow_remote: AllowRemote = False,
) -> None:
    """Push a run's model to the Hugging Face Hub, with a card of its data, algorithm, settings and figures."""
    from cavesson.exporters import hub

    what = hub.prepare(run, repo, allow_remote)
    if dry_run:
        for name, path in what.files.items():
            print(f"{path.stat().st_size:>12,} bytes  {name}")
        print(f"\nREADME.md\n\n{visible(what.card)}")
        return
    print(f"pushed   {hub.push(what, repo, private=not public)}")


def _print_plain(answer: "Answer", text: str) -> None:
    """Print text for programs unchanged; on a terminal, control characters are made visible."""
    write_data(visible(text) if sys.stdout.isatty() else text)
    if answer.truncated:
        print(f"only the first {counted(len(answer.rows), 'line')}, because of --limit", file=sys.stderr)
