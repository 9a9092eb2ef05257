"""One command: `dressage`."""

import os
import sys
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from dressage.algorithms import ALGORITHMS, Entry
from dressage.cli_board import board_app
from dressage.cli_check import check_app
from dressage.cli_doctor import doctor_app
from dressage.cli_flags import FLAGS, Help, console, explain, load, words_and_flags
from dressage.cli_record import RunPlace, record
from dressage.cli_tools import tools
from dressage.errors import UserError, is_disk_full

app = typer.Typer(
    help="Train language models with human feedback, with every token of every rollout on record.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_NEEDED_TO_TRAIN = {"torch", "transformers", "tokenizers", "peft", "accelerate", "jaxtyping", "vaderSentiment"}

app.add_typer(tools)
app.add_typer(record)
app.add_typer(board_app)
app.add_typer(doctor_app)
app.add_typer(check_app)

F = TypeVar("F")


def main() -> None:
    """Run the command; a user's mistake is one or two plain lines and exit code 2, a run that was stopped 3."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # libraries' progress bars make a log file unreadable
    try:
        app()
    except UserError as error:
        print(f"dressage: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED_TO_TRAIN:
            raise
        print(f"dressage: training needs {error.name}; install it with: pip install 'dressage[train]'", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"dressage: interrupted{_way_on(sys.argv[1:])}", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if not is_disk_full(error):
            raise
        print(f"dressage: the disk is full ({error}): free space{_way_on(sys.argv[1:])}", file=sys.stderr)
        sys.exit(2)


def _way_on(words: list[str]) -> str:
    """How what a command has begun is continued."""
    if words[:1] == ["align"]:
        return "; continue with the same command"
    return "; continue with --resume RUN" if set(words[:1]) & ALGORITHMS.keys() else ""


def _add_training(name: str, entry: Entry) -> None:
    """A command for an algorithm of the table."""

    @app.command(name, help=entry.help, context_settings=FLAGS, add_help_option=False)
    def command(
        context: typer.Context,
        resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Continue this run.")] = None,
        help: Help = False,
    ) -> None:
        if help:
            explain(context, entry.settings, "RECIPE.toml", "--resume RUN")
            return
        from dressage.train.run import resume as resume_run
        from dressage.train.run import train

        if resume is not None:
            if context.args:
                raise UserError("--resume continues a run with the settings it was started with; give nothing else")
            result = resume_run(resume, name)
        else:
            words, flags = words_and_flags(context.args, "[RECIPE.toml]")
            result = train(load(entry.settings, Path(words[0]) if words else None, flags))
        from dressage.record.show import headline

        print(f"run      {result.folder}\nmodel    {result.folder}/model\nnext     dressage show {result.folder}")
        print(f"learned  {headline(result.folder)}")


for _name, _entry in ALGORITHMS.items():
    _add_training(_name, _entry)


@app.command(context_settings=FLAGS, add_help_option=False)
def demo(
    context: typer.Context,
    run: Annotated[Path | None, typer.Option(help="Run folder; the first free of runs/demo, runs/demo-2, …")] = None,
    help: Help = False,
) -> None:
    """Train a real model by PPO in a few minutes and show what changed."""
    from dressage.algorithms.ppo import PPORun

    if help:
        explain(context, PPORun, "[--run RUN]")
        return
    from dressage.demo.run import demo as run_demo

    run_demo(run, context.args)


@app.command(context_settings=FLAGS, add_help_option=False)
def align(context: typer.Context, help: Help = False) -> None:
    """Do a whole recipe, stage after stage: dressage align recipe.toml. Called again, it goes on where it was."""
    if help:
        from dressage.align.recipe import AlignSettings

        explain(context, AlignSettings, "RECIPE.toml [--stage.setting value …]")
        return
    from dressage.align.run import align as run_align

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
    from dressage.record.show import show as show_run

    show_run(run, console(), step=step, sample=sample, limit=limit)


@app.command()
def export(
    run: RunPlace,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; it must be empty or absent.")],
    format: Annotated[str, typer.Option(help="What to write.")] = "rl-logging-board",
) -> None:
    """Write a run's record in another tool's format."""
    from dressage.exporters import EXPORTERS

    count = _known(EXPORTERS, format)(run, out)
    print(f"{count} rollouts written to {out}")


@app.command(name="import")
def import_(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Another tool's file or folder.")],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder to write; it must not exist.")],
    format: Annotated[str | None, typer.Option(help="What the source is; without it, it is recognised.")] = None,
    map: Annotated[list[str] | None, typer.Option(help="NAME=COLUMN: what the source calls a column.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Read on while files are written, until Ctrl-C.")] = False,
    until_idle: Annotated[float | None, typer.Option(help="With --follow: end after so many seconds without.")] = None,
) -> None:
    """Read another tool's rollouts into a run folder: dressage import SOURCE RUN."""
    from dressage.importers.command import run_import

    run_import(source, run, format, map or [], follow, until_idle)


def _known(table: dict[str, F], name: str) -> F:
    if name not in table:
        raise UserError(f"there is no format {name!r}; there is {', '.join(table)}")
    return table[name]
