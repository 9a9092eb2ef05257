"""The commands that work on the record of a run."""

from typing import Annotated

import typer

from dressage.cli_flags import console

record = typer.Typer()
RunPlace = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or a URL such as s3://bucket/run.")]


@record.command()
def compact(run: RunPlace) -> None:
    """Merge the small files of a run into few large ones; nothing else about it changes."""
    import dressage
    from dressage.record import compaction

    files = dressage.open(run).storage
    written = compaction.may_be_written(files)
    count = compaction.compact(files, ended=not written)
    print(f"{count} segments merged" if count else "there was nothing to merge")
    if written:
        print("written within the last hour: its newest step stays apart, and the next compact deletes what was merged")


@record.command()
def sql(
    run: RunPlace,
    query: Annotated[str, typer.Argument(help="One SELECT over rows, tokens, steps, rollups and vocabulary.")],
    seconds: Annotated[float, typer.Option(help="How long the query may take.", min=0)] = 60.0,
    memory: Annotated[int, typer.Option(help="How many MB it may use.", min=16)] = 2048,
    limit: Annotated[int, typer.Option(help="How many lines to print at most.", min=1)] = 1000,
) -> None:
    """Ask a run by SQL, read-only: dressage sql RUN "select step, avg(reward) from rows group by step"."""
    import dressage
    from dressage.record.query import query as run_query
    from dressage.record.show import show_answer

    answer = run_query(dressage.open(run), query, seconds=seconds, memory=memory << 20, limit=limit)
    terminal = console()
    show_answer(answer.columns, answer.rows, terminal)
    more = f", of more: --limit {2 * limit} shows twice as many" if answer.truncated else ""
    terminal.print(f"{len(answer.rows)} lines{more}", highlight=False)
