"""The command `cavesson`."""

import os
import signal
import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, TypeVar

import typer

import cavesson
from cavesson.cli.board import board_app
from cavesson.cli.check import check_app
from cavesson.cli.commands import Commands
from cavesson.cli.doctor import doctor_app
from cavesson.cli.flags import FLAGS, Help, console, load, words_and_flags
from cavesson.cli.help import explain
from cavesson.cli.record import RunPlace, record
from cavesson.cli.tools import tools
from cavesson.command_line import command_line
from cavesson.errors import TerminatedError, UserError, no_room, of_the_system, print_exception
from cavesson.handlers import handling
from cavesson.registry import ALGORITHMS, Entry
from cavesson.text.counting import counted
from cavesson.text.visible import visible

app = typer.Typer(
    cls=Commands,
    help="Train language models with human feedback, with every token of every rollout on record.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
DEMO = Path(__file__).parents[1] / "demo" / "demo.toml"
_NEEDED_TO_TRAIN = {
    "torch",
    "transformers",
    "tokenizers",
    "peft",
    "accelerate",
    "jaxtyping",
    "vaderSentiment",
    "httpx",
    "anyio",
    "tenacity",
}

app.add_typer(tools)
app.add_typer(record)
app.add_typer(board_app)
app.add_typer(doctor_app)
app.add_typer(check_app)

F = TypeVar("F")
RESUME = "Continue this run; with a recipe, start it if nothing was begun yet."


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"cavesson {cavesson.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command; a user error gives one or two plain lines and exit code 2, a stopped run exit code 3."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars of libraries make log files unreadable
    with handling(_terminate, signal.SIGTERM):
        _run_app()


def _run_app() -> None:
    try:
        app()
    except SystemExit as end:
        if end.code == 128 + signal.SIGINT:  # Typer converts Ctrl-C to this without a message
            _say("interrupted", _ctrl_c(end))
        raise
    except TerminatedError as error:
        _say("interrupted by SIGTERM", error)
        sys.exit(128 + signal.SIGTERM)
    except UserError as error:
        _print_traceback(error)
        _say(str(error), error)
        sys.exit(error.exit_code)
    except Exception as error:
        line = _explained(error)
        if line is None:
            raise
        _print_traceback(error)
        _say(line, error)
        sys.exit(2)


def _say(line: str, error: BaseException) -> None:
    """Print what ended the command, and how to continue."""
    print(f"cavesson: {visible('; '.join([line, *_way_on(error)]))}", file=sys.stderr)


def _ctrl_c(error: BaseException) -> BaseException:
    """Return the KeyboardInterrupt that caused an error."""
    while not isinstance(error, KeyboardInterrupt) and error.__context__ is not None:
        error = error.__context__
    return error


def _print_traceback(error: Exception) -> None:
    """Print the traceback of an error if the variable CAVESSON_TRACEBACK is set."""
    if os.environ.get("CAVESSON_TRACEBACK"):
        print_exception(error)


def _terminate(number: int, frame: FrameType | None) -> None:
    """End the command by an exception, so that it releases its resources."""
    raise TerminatedError


def _explained(error: Exception) -> str | None:
    """Return a message for an error of the installation or the operating system, or None for any other error."""
    if isinstance(error, ModuleNotFoundError) and error.name in _NEEDED_TO_TRAIN:
        return f"training needs {error.name}; install it with: pip install 'cavesson[train]'"
    return of_the_system(error)


def _way_on(error: BaseException) -> list[str]:
    """Return how to continue what the command has started, or nothing if it has not started anything."""
    notes: list[str] = getattr(error, "__notes__", [])
    if sys.argv[1:2] == ["demo"]:
        return []  # the demo always starts over
    is_end = isinstance(error, KeyboardInterrupt | TerminatedError) or no_room(error)
    if sys.argv[1:2] == ["align"] and (notes or is_end):
        return [f"continue with: {command_line(*sys.argv[1:])}"]
    return notes


def _add_training(name: str, entry: Entry) -> None:
    """Add the command of an algorithm."""

    @app.command(name, help=entry.help, context_settings=FLAGS, add_help_option=False)
    def command(
        context: typer.Context,
        resume: Annotated[Path | None, typer.Option(metavar="RUN", help=RESUME)] = None,
        help: Help = False,
    ) -> None:
        if help:
            explain(context, entry.settings, "RECIPE.toml", "--resume RUN")
            return
        from cavesson.train.run import resume as resume_run
        from cavesson.train.run import train

        words, flags = words_and_flags(context.args, "[RECIPE.toml]")
        if resume is not None and not words:
            result = resume_run(resume, name, flags)
        else:
            place = [] if resume is None else ["--run", str(resume)]
            settings = load(entry.settings, Path(words[0]) if words else None, [*flags, *place])
            result = train(settings, resume=resume is not None)
        from cavesson.record.show import headline

        print(
            f"run      {result.folder}\nmodel    {result.folder}/model\nnext     {command_line('show', result.folder)}"
        )
        print(f"result   {headline(result.folder)}")


for _name, _entry in ALGORITHMS.items():
    _add_training(_name, _entry)


@app.command(context_settings=FLAGS, add_help_option=False)
def demo(
    context: typer.Context,
    run: Annotated[Path | None, typer.Option(help="Run folder; the first free of runs/demo, runs/demo-2, …")] = None,
    help: Help = False,
) -> None:
    """Train a real model by PPO in a few minutes and show what changed."""
    from cavesson.algorithms.ppo import PPORun

    if help:
        explain(context, PPORun, "[--run RUN]", values=load(PPORun, DEMO, ["--run", "runs/demo"]))
        return
    from cavesson.demo.run import demo as run_demo

    run_demo(run, context.args)


@app.command(context_settings=FLAGS, add_help_option=False)
def align(context: typer.Context, help: Help = False) -> None:
    """Do a whole recipe, stage after stage: cavesson align recipe.toml. Called again, it goes on where it was."""
    if help:
        from cavesson.align.recipe import AlignSettings

        explain(context, AlignSettings, "RECIPE.toml [--stage.setting value …]")
        return
    from cavesson.align.run import align as run_align

    (recipe,), flags = words_and_flags(context.args, "RECIPE.toml")
    run_align(Path(recipe), flags)


@app.command()
def show(
    run: RunPlace,
    step: Annotated[int | None, typer.Option(help="Show this step; with --sample one rollout of it.")] = None,
    sample: Annotated[int | None, typer.Option(help="Show this rollout token by token.")] = None,
    limit: Annotated[int, typer.Option(help="Responses per list.", min=1)] = 5,
) -> None:
    """Show a run: its steps, its best and worst responses, or one rollout token by token."""
    from cavesson.record.show import show as show_run

    show_run(run, console(), step=step, sample=sample, limit=limit)


@app.command()
def export(
    run: RunPlace,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; it must be empty or absent.")],
    format: Annotated[
        str, typer.Option(help="What to write: csv, jsonl, parquet or rl-logging-board.")
    ] = "rl-logging-board",
    quote_formulas: Annotated[
        bool, typer.Option("--quote-formulas", help="In CSV, put ' before texts that spreadsheets take for formulas.")
    ] = False,
) -> None:
    """Write a run's record in another tool's format, or as tables: rows, tokens, steps and vocabulary."""
    from cavesson.exporters import EXPORTERS, tables

    if quote_formulas and format != "csv":
        raise UserError("--quote-formulas has an effect with --format csv only")
    write = partial(tables.export, format="csv", quote_formulas=True) if quote_formulas else _known(EXPORTERS, format)
    count = write(run, out)
    print(f"{counted(count, 'rollout')} written to {out}")


@app.command(name="import")
def import_(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Another tool's file or folder.")],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder to write; it must not exist.")],
    format: Annotated[str | None, typer.Option(help="What the source is; without it, it is recognised.")] = None,
    map: Annotated[list[str] | None, typer.Option(help="NAME=COLUMN: what the source calls a column.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Read on while files are written, until Ctrl-C.")] = False,
    until_idle: Annotated[float | None, typer.Option(help="With --follow: end after so many seconds without.")] = None,
) -> None:
    """Read another tool's rollouts into a run folder: cavesson import SOURCE RUN."""
    from cavesson.importers.command import run_import

    run_import(source, run, format, map or [], follow, until_idle)


def _known(table: dict[str, F], name: str) -> F:
    if name not in table:
        raise UserError(f"there is no format {name!r}; there is {', '.join(table)}")
    return table[name]
