"""One command: `dressage`."""

import os
import sys
from itertools import islice
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dressage.algorithms import ALGORITHMS, Entry
from dressage.config import describe, load
from dressage.errors import UserError, is_disk_full

app = typer.Typer(
    help="Train language models with human feedback, with every token of every rollout on record.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_NEEDED_TO_TRAIN = {"torch", "transformers", "tokenizers", "peft", "accelerate", "jaxtyping", "vaderSentiment"}
_TRAINING = {"allow_extra_args": True, "ignore_unknown_options": True}

F = TypeVar("F")
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]


def main() -> None:
    """Run the command; a user's mistake is one or two plain lines and exit code 2."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # libraries' progress bars make a log file unreadable
    try:
        app()
    except UserError as error:
        print(f"dressage: {error}", file=sys.stderr)
        sys.exit(2)
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED_TO_TRAIN:
            raise
        print(f"dressage: training needs {error.name}; install it with: pip install 'dressage[train]'", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("dressage: interrupted; continue with --resume RUN", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if not is_disk_full(error):
            raise
        print(f"dressage: the disk is full ({error}); free space, then continue with --resume RUN", file=sys.stderr)
        sys.exit(2)


def _add_training(name: str, entry: Entry) -> None:
    """A command for an algorithm of the table."""

    @app.command(name, help=entry.help, context_settings=_TRAINING, add_help_option=False)
    def command(
        context: typer.Context,
        resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Continue this run.")] = None,
        help: Annotated[bool, typer.Option("--help", help="Explain every setting.")] = False,
    ) -> None:
        if help:
            _explain(context, entry.settings, "RECIPE.toml", "--resume RUN")
            return
        from dressage.train.run import resume as resume_run
        from dressage.train.run import train

        if resume is not None:
            if context.args:
                raise UserError("--resume continues a run with the settings it was started with; give nothing else")
            result = resume_run(resume, name)
        else:
            result = train(load(entry.settings, *_recipe_and_flags(context.args)))
        from dressage.record.show import headline

        print(f"run      {result.folder}\nmodel    {result.folder}/model\nnext     dressage show {result.folder}")
        print(f"learned  {headline(result.folder)}")


for _name, _entry in ALGORITHMS.items():
    _add_training(_name, _entry)


@app.command(context_settings=_TRAINING, add_help_option=False)
def demo(
    context: typer.Context,
    run: Annotated[Path | None, typer.Option(help="Run folder; the first free of runs/demo, runs/demo-2, …")] = None,
    help: Annotated[bool, typer.Option("--help", help="Explain every setting.")] = False,
) -> None:
    """Train a real model by PPO in a few minutes and show what changed."""
    from dressage.algorithms.ppo import PPORun

    if help:
        _explain(context, PPORun, "[--run RUN]")
        return
    from dressage.demo.run import demo as run_demo

    run_demo(run, context.args)


@app.command(context_settings=_TRAINING, add_help_option=False)
def generate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A run, a model folder or a Hub name.")] = "",
    help: Annotated[bool, typer.Option("--help", help="Explain every setting.")] = False,
) -> None:
    """Sample responses: dressage generate MODEL --prompt "The hotel room"."""
    from dressage.sampling.generate import GenerateSettings, write
    from dressage.sampling.generate import generate as run_generate

    if help:
        _explain(context, GenerateSettings, "MODEL")
        return
    if not model or model.startswith("--"):
        raise UserError('name a model first: dressage generate MODEL --prompt "…"')
    settings = load(GenerateSettings, None, context.args)
    responses = run_generate(model, settings)
    if settings.out is not None:
        print(f"{write(responses, settings.out)} responses written to {settings.out}")
        return
    console = Console()
    for row in responses:
        console.print(Text(row["prompt"], style="dim") + Text(row["response"]), soft_wrap=True)
        console.print(Text(f"[{row['finish_reason']}]\n", style="dim"))


@app.command()
def show(
    run: RunFolder,
    step: Annotated[int | None, typer.Option(help="Show this step; with --sample one rollout of it.")] = None,
    sample: Annotated[int | None, typer.Option(help="Show this rollout token by token.")] = None,
    limit: Annotated[int, typer.Option(help="Responses per list.", min=1)] = 5,
) -> None:
    """Show a run: its steps, its best and worst responses, or one rollout token by token."""
    from dressage.record.show import show as show_run

    show_run(run, Console(), step=step, sample=sample, limit=limit)


@app.command()
def export(
    run: RunFolder,
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
    format: Annotated[str, typer.Option(help="What the source is.")] = "rl-logging-board",
) -> None:
    """Read another tool's rollouts into a run folder."""
    from dressage.importers import IMPORTERS

    count = _known(IMPORTERS, format)(source, run)
    print(f"{count} rollouts read into {run}\nnext     dressage show {run}")


def _known(table: dict[str, F], name: str) -> F:
    if name not in table:
        raise UserError(f"there is no format {name!r}; there is {', '.join(table)}")
    return table[name]


def _recipe_and_flags(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """The one argument that is neither a flag nor a flag's value is the recipe, wherever it stands."""
    recipe, flags, rest = None, [], iter(arguments)
    for argument in rest:
        if argument.startswith("--"):
            flags += [argument] if "=" in argument else [argument, *islice(rest, 1)]
        elif recipe is None:
            recipe = Path(argument)
        else:
            raise UserError(f"{argument!r} is one recipe too many; {recipe} is one already")
    return recipe, flags


def _explain(context: typer.Context, kind: type[BaseModel], arguments: str, *others: str) -> None:
    console = Console()
    console.print(Text(f"Usage: {context.command_path} {arguments} [--setting value …]"))
    for other in others:
        console.print(Text(f"       {context.command_path} {other}"))
    console.print(Text(f"\n{kind.__doc__}\n"))
    table = Table(box=None, pad_edge=False)
    for title in ("setting", "default", "what it does"):
        table.add_column(title, overflow="fold")
    for name, type_name, default, text in describe(kind):
        table.add_row(Text(f"--{name}"), Text(default), Text(f"{' '.join(text.split())} ({type_name})"))
    console.print(table)
