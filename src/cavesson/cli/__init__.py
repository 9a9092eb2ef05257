"""The command `cavesson`."""

import os
import signal
import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

import cavesson
from cavesson.cli.board import board_app
from cavesson.cli.check import check_app
from cavesson.cli.doctor import doctor_app
from cavesson.cli.environment import prepare
from cavesson.cli.flags import FLAGS, Commands, Help, console, explain, load, words_and_flags
from cavesson.cli.init import init_app
from cavesson.cli.launch import LAUNCHER, is_launcher, is_ray_launcher, launch, train_on_ray
from cavesson.cli.migration import migration_app
from cavesson.cli.plan import plan_app
from cavesson.cli.record import AllowRemote, RunPlace, record
from cavesson.cli.tools import tools
from cavesson.command_line import ACCEPT, STAGE, command_line, continuation, with_accepted
from cavesson.errors import (
    StoppedError,
    TerminatedError,
    UserCodeError,
    UserError,
    leave_for_launcher,
    lost_process,
    no_memory,
    no_room,
    of_the_system,
    print_error,
    print_exception,
)
from cavesson.handlers import handling
from cavesson.registry import ALGORITHMS, Entry, any_recipe
from cavesson.text.counting import counted
from cavesson.text.visible import visible

if TYPE_CHECKING:
    from cavesson.importers import ImportReport
    from cavesson.record.splits import Split

app = typer.Typer(
    cls=Commands,
    help="Train language models with human feedback, with every token of every rollout on record.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
NEEDS_TRAIN = {
    "accelerate", "anyio", "datasets", "gguf", "httpx", "huggingface_hub", "jaxtyping", "jinja2", "jsonschema",
    "markupsafe", "matplotlib", "peft", "psutil", "sacrebleu", "safetensors", "tenacity", "tokenizers", "torch",
    "transformers", "vaderSentiment", "xxhash", "yaml",
}  # fmt: skip
"""Modules that the extra `train` installs."""

app.add_typer(tools)
app.add_typer(record)
app.add_typer(board_app)
app.add_typer(doctor_app)
app.add_typer(check_app)
app.add_typer(plan_app)
app.add_typer(init_app)
app.add_typer(migration_app)

RESUME = "Resume this run; with a recipe, start it if it does not exist yet."
Accept = Annotated[bool, typer.Option(ACCEPT, help="Resume although rewards have changed, and record that.")]
Processes = Annotated[int, typer.Option(metavar="N", help="Train in N processes on this machine.")]
OnRay = Annotated[bool, typer.Option("--ray", help="Train on a Ray cluster; the settings in ray say how.")]


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
    sys.excepthook = lambda kind, error, traceback: print_exception(error)
    prepare()
    with handling(_terminate, signal.SIGTERM):
        _run_app()


def _run_app() -> None:
    try:
        app()
    except SystemExit as end:
        cause = _ctrl_c(end)
        if isinstance(cause, KeyboardInterrupt):  # Typer converts it to an exit code without a message
            _end("interrupted", cause, 128 + signal.SIGINT)
        raise
    except TerminatedError as error:
        _end("interrupted by SIGTERM", error, 128 + signal.SIGTERM)
    except UserError as error:
        _print_traceback(error)
        _end(str(error), error, error.exit_code)
    except Exception as error:
        line = _explained(error)
        if line is None:
            leave_for_launcher(f"{type(error).__name__}: {error}", 1)
            raise
        _print_traceback(error)
        _end(line, error, 2)


def _end(line: str, error: BaseException, exit_code: int) -> NoReturn:
    """Print what ended the command and how to continue, and exit."""
    said = visible("; ".join([line, *_resume_hint(error)]))
    # A launcher ends the other processes as soon as one has ended, and this line must still be printed.
    with handling(lambda number, frame: None, signal.SIGTERM):
        # First, because a launcher that restarts the process does not print the line.
        leave_for_launcher(said, exit_code)
        if isinstance(error, StoppedError):
            _print_once(f"cavesson: {said}")
        else:
            print_error(f"cavesson: {said}")
    sys.exit(exit_code)


def _print_once(line: str) -> None:
    """Print a line in the first of all processes, which stop at the same place; the others wait until it is printed."""
    from cavesson.processes import is_main, wait_for_all  # a run that has stopped has imported PyTorch already

    if is_main():
        print_error(line)
    wait_for_all()


def _ctrl_c(error: BaseException) -> BaseException:
    """Return the KeyboardInterrupt that caused an error, or the first of its causes if there is none."""
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
    """Return a message for an error of the installation or the machine, or None for any other error."""
    if isinstance(error, ModuleNotFoundError) and error.name in NEEDS_TRAIN:
        return f"this needs {error.name}; install it with: pip install 'cavesson[train]'"
    memory = no_memory(error)
    if memory is not None:
        return f"{memory}; use a smaller batch size or model, or free memory"
    return lost_process(error) or of_the_system(error)


def _resume_hint(error: BaseException) -> list[str]:
    """Return how to continue what the command has started, or nothing if it has not started anything."""
    notes: list[str] = getattr(error, "__notes__", [])
    if sys.argv[1:2] == ["demo"]:
        return []  # the demo always starts over
    is_end = isinstance(error, KeyboardInterrupt | TerminatedError) or no_room(error)
    if sys.argv[1:2] == ["align"] and (notes or is_end):
        way = command_line(*sys.argv[1:])
        return [f"continue with: {with_accepted(way) if isinstance(error, UserCodeError) else way}"]
    return notes


def _place(resume: Path | None, flags: list[str]) -> list[str]:
    """Return the flag for the folder that --resume names, if it does; --run must not name another one."""
    if resume is None:
        return []
    for given in (flag.removeprefix("--run=") for flag in flags if flag.startswith("--run=")):
        if Path(given.strip("\"'")).resolve() != resume.resolve():
            raise UserError(f"--run {given} has no effect with --resume {resume}: remove one of the two")
    return ["--run", str(resume)]


def _add_training(name: str, entry: Entry) -> None:
    """Add the command of an algorithm."""

    @app.command(name, help=entry.help, context_settings=FLAGS, add_help_option=False)
    def command(
        context: typer.Context,
        resume: Annotated[Path | None, typer.Option(metavar="RUN", help=RESUME)] = None,
        accept_changes: Accept = False,
        processes: Processes = 1,
        ray: OnRay = False,
        help: Help = False,
    ) -> None:
        if help:
            explain(
                context,
                entry.settings,
                "RECIPE.toml",
                "--resume RUN",
                f"--resume RUN {ACCEPT}",
                "… --processes N",
                "… --ray",
            )
            return
        words, flags = words_and_flags(entry.settings, context.args, "[RECIPE.toml]")
        if accept_changes and resume is None:
            raise UserError(f"{ACCEPT} has no effect without --resume RUN")
        if resume is not None and not words:
            from cavesson.train.resuming import settings_of

            settings = settings_of(resume, name, flags)
        else:
            settings = load(entry.settings, Path(words[0]) if words else None, [*flags, *_place(resume, flags)])
        if is_ray_launcher(ray, processes, flags):
            from cavesson.cluster.launcher import launch_on_ray

            launch_on_ray(settings, LAUNCHER, lambda: continuation(settings.run))
            return
        if is_launcher(processes):
            launch(processes, lambda: continuation(settings.run))
            return
        from cavesson.processes import is_main
        from cavesson.record.read.show import headline
        from cavesson.train.run import Training

        result = Training(settings, resume=resume is not None, accept_changes=accept_changes).run(keep_metrics=False)
        if is_main():
            print(f"run      {result.folder}\nmodel    {result.folder}/model")
            print(f"next     {command_line('show', settings.record_place)}\nresult   {headline(result.folder)}")


for _name, _entry in ALGORITHMS.items():
    _add_training(_name, _entry)


@app.command(context_settings=FLAGS, add_help_option=False)
def demo(
    context: typer.Context,
    run: Annotated[
        Path | None,
        typer.Option(help="Run folder. Default: the first of runs/demo, runs/demo-2, … that does not exist."),
    ] = None,
    help: Help = False,
) -> None:
    """Train a real model with PPO in a few minutes and show what changed."""
    from cavesson.demo.settings import demo_settings

    if help:
        settings = demo_settings(Path("runs/demo"))
        explain(context, type(settings), "[--run RUN]", values=settings)
        return
    settings = demo_settings(run, context.args)
    from cavesson.demo.run import demo as run_demo

    run_demo(settings)


@app.command(context_settings=FLAGS, add_help_option=False)
def align(
    context: typer.Context,
    accept_changes: Accept = False,
    processes: Processes = 1,
    ray: OnRay = False,
    help: Help = False,
) -> None:
    """Run all stages of a recipe: cavesson align recipe.toml. Run again, it resumes where it stopped."""
    from cavesson.align.recipe import AlignSettings, read_recipe

    if help:
        explain(
            context, AlignSettings, "RECIPE.toml [--stage.setting value …]", f"… {ACCEPT}", "… --processes N", "… --ray"
        )
        return
    (recipe,), flags = words_and_flags(any_recipe(), context.args, "RECIPE.toml")
    launches = is_ray_launcher(ray, processes, flags)
    if not ray and is_launcher(processes):
        launch(processes, lambda: command_line(*sys.argv[1:]))
        return
    stages = read_recipe(Path(recipe), flags)
    from cavesson.align.run import align as run_align
    from cavesson.align.run import run_stage

    if ray and not launches:
        run_stage(stages, os.environ[STAGE], accept_changes)
    else:
        run_align(stages, train_on_ray if launches else None, accept_changes)


@app.command()
def show(
    run: RunPlace,
    step: Annotated[int | None, typer.Option(help="Show this step, or with --sample one rollout of it.")] = None,
    sample: Annotated[int | None, typer.Option(help="Show this rollout token by token.")] = None,
    limit: Annotated[int, typer.Option(help="Responses per list.", min=1)] = 5,
    held_out: Annotated[bool, typer.Option("--held-out", help="Show held-out responses instead.")] = False,
    allow_remote: AllowRemote = False,
) -> None:
    """Show a run: its steps, its best and worst responses, or one rollout token by token."""
    from cavesson.record.read.show import show as show_run

    split: Split = "eval" if held_out else "train"
    show_run(run, console(), step=step, sample=sample, limit=limit, split=split, allow_remote=allow_remote)


@app.command()
def export(
    run: RunPlace,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write, empty or absent; or a file.")],
    format: Annotated[
        str, typer.Option(help="Format: csv, jsonl, openenv, parquet, preference, rl-logging-board, sft or trl.")
    ] = "rl-logging-board",
    quote_formulas: Annotated[
        bool, typer.Option("--quote-formulas", help="In CSV, put ' before texts that spreadsheets read as formulas.")
    ] = False,
    allow_remote: AllowRemote = False,
) -> None:
    """Write a run's record in another tool's format, as tables, or as data to train on.

    sft and preference are JSON Lines files that cavesson sft and cavesson dpo read: the responses that were trained on,
    and the pairs that were labelled on the board.
    """
    from cavesson.exporters import EXPORTERS, tables

    if quote_formulas and format != "csv":
        raise UserError("--quote-formulas has no effect without --format csv")
    if format not in EXPORTERS:
        raise UserError(f"there is no format {format!r}; formats are {', '.join(EXPORTERS)}")
    write = partial(tables.export, format="csv", quote_formulas=True) if quote_formulas else EXPORTERS[format]
    what = {"sft": "conversation", "preference": "pair"}.get(format, "rollout")
    print(f"{counted(write(run, out, allow_remote), what)} written to {out}")


@app.command(name="import")
def import_(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Another tool's file or folder.")],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder to write; it must not exist.")],
    format: Annotated[str | None, typer.Option(help="Format of the source. Default: detected.")] = None,
    maps: Annotated[list[str] | None, typer.Option("--map", help="NAME=COLUMN: the source's name of a column.")] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="All responses are to held-out prompts, not to those of training.")
    ] = False,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or Hub name of the model whose token ids the source has.")
    ] = None,
    metrics: Annotated[
        Path | None, typer.Option(help="What the trainer logged: .csv, .json, .jsonl or TensorBoard's events.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Keep reading while files are written, until Ctrl-C.")
    ] = False,
    until_idle: Annotated[float | None, typer.Option(help="With --follow: stop after N idle seconds.")] = None,
) -> None:
    """Read another tool's rollouts into a run folder: cavesson import SOURCE RUN."""
    from rich.markup import escape

    from cavesson.importers import follow_run, import_run

    columns = dict(map(_pair, maps or []))
    vocabulary = None
    if tokenizer is not None:
        from cavesson.tools.vocabulary import vocabulary_of

        vocabulary = vocabulary_of(tokenizer)
    if not follow:
        if until_idle is not None:
            raise UserError("--until-idle has no effect without --follow")
        _print_import(import_run(source, run, format, columns, held_out, vocabulary, metrics), run)
        return
    if metrics is not None:
        raise UserError("--metrics cannot be read with --follow: import the run again with --metrics when it has ended")
    name = escape(visible(str(source)))
    with console(stderr=True).status(f"following {name}; Ctrl-C stops it") as status:

        def progress(rollouts: int, rejected: int) -> None:
            status.update(f"following {name}: {counted(rollouts, 'rollout')}, {rejected:,} rejected; Ctrl-C stops it")

        report = follow_run(source, run, format, columns, held_out, vocabulary, until_idle, progress)
    _print_import(report, run)


def _pair(text: str) -> tuple[str, str]:
    name, sign, column = text.partition("=")
    if not sign or not name or not column:
        raise UserError(f"--map {text}: expected NAME=COLUMN, as in --map response=answer")
    return name, column


def _print_import(report: "ImportReport", run: Path) -> None:
    lines = [f"{counted(report.rollouts, 'rollout')} of {report.format} read into {run}", *report.notes]
    if report.rejected:
        lines.append(f"{counted(report.rejected, 'broken record')}, kept in {run / 'rejected.jsonl'}:")
        lines += [f"  {quote}" for quote in report.quotes]
        if report.rejected > len(report.quotes):
            lines.append("  …")
    # Quotes and column names come from a file: with control characters shown as symbols, they are safe.
    print(visible("\n".join([*lines, f"next     {command_line('show', run)}"])))
