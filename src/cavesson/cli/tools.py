"""The commands that inspect data and use trained models."""

from pathlib import Path
from typing import Annotated

import typer

from cavesson.cli.flags import FLAGS, Commands, Help, S, arguments, console, explain, load, words_and_flags, write_data
from cavesson.registry import any_recipe
from cavesson.text.counting import counted
from cavesson.text.visible import visible

tools = typer.Typer()
data = typer.Typer(cls=Commands, help="Look at data as a run reads it.", no_args_is_help=True)
tools.add_typer(data, name="data")


@tools.command(context_settings=FLAGS, add_help_option=False)
def generate(
    context: typer.Context,
    chat: Annotated[bool, typer.Option("--chat", help="Chat with the model in the terminal.")] = False,
    help: Help = False,
) -> None:
    """Sample responses: cavesson generate MODEL --prompt "The hotel room", or chat: cavesson generate MODEL --chat."""
    from rich.text import Text

    from cavesson.tools.settings import GenerateSettings, TalkSettings

    if chat:
        (model,), conversation = arguments(context, help, TalkSettings, "MODEL", others=["MODEL --chat"])
        from cavesson.tools.chat import chat as talk

        talk(model, conversation)
        return
    (model,), settings = arguments(context, help, GenerateSettings, "MODEL", others=["MODEL --chat"])
    from cavesson.tools.generate import generate as sample
    from cavesson.tools.generate import said, write

    responses = sample(model, settings)
    if settings.out is not None:
        print(f"{counted(write(responses, settings.out), 'response')} written to {settings.out}")
        return
    terminal = console()
    for row in responses:
        if not terminal.is_terminal:  # files and programs get the exact text
            write_data(f"{row['prompt']}{said(row)}\n[{row['finish_reason']}]\n\n")
            continue
        terminal.print(Text(visible(row["prompt"]), style="dim") + Text(visible(said(row))), soft_wrap=True)
        terminal.print(Text(f"[{row['finish_reason']}]\n", style="dim"))


@tools.command(context_settings=FLAGS, add_help_option=False)
def merge(context: typer.Context, help: Help = False) -> None:
    """Merge an adapter into its base model: cavesson merge ADAPTER OUT."""
    from cavesson.models.settings import MergeSettings

    (adapter, out), settings = arguments(context, help, MergeSettings, "ADAPTER", "OUT")
    from cavesson.models.merge import merge as run_merge

    print(run_merge(adapter, Path(out), settings))


@tools.command(context_settings=FLAGS, add_help_option=False)
def score(context: typer.Context, help: Help = False) -> None:
    """Score the responses in a file with a reward model or any other reward: cavesson score FILE --rewards RUN."""
    from cavesson.tools.settings import ScoreSettings

    (path,), settings = arguments(context, help, ScoreSettings, "FILE")
    from cavesson.tools.score import score as run_score

    print(visible(str(run_score(path, settings))))


@tools.command(context_settings=FLAGS, add_help_option=False)
def rescore(context: typer.Context, help: Help = False) -> None:
    """Compute the rewards of a recorded run again with other rewards: cavesson rescore RUN --rewards FILE.py:NAME."""
    from cavesson.tools.settings import RescoreSettings

    (run,), settings = arguments(context, help, RescoreSettings, "RUN")
    from cavesson.tools.rescore import rescore as run_rescore
    from cavesson.tools.rescored_report import show_report

    show_report(run_rescore(run, settings), console())


@tools.command(context_settings=FLAGS, add_help_option=False)
def compare(context: typer.Context, help: Help = False) -> None:
    """Compare models on the same prompts with the same random numbers: cavesson compare A B --prompts FILE."""
    from cavesson.tools.settings import CompareSettings

    models, settings = arguments(context, help, CompareSettings, "MODEL", "MODEL…")
    from cavesson.tools.compare import compare as run_compare
    from cavesson.tools.compare import show

    show(run_compare(models, settings), console(), settings.show)


@tools.command(context_settings=FLAGS, add_help_option=False)
def evaluate(context: typer.Context, help: Help = False) -> None:
    """Measure perplexity on a text, rewards of sampled responses, or both: cavesson evaluate MODEL --text.path FILE."""
    from cavesson.tools.settings import EvaluateSettings

    (model,), settings = arguments(context, help, EvaluateSettings, "MODEL")
    from cavesson.tools.evaluate import evaluate as run_evaluate

    print(visible(str(run_evaluate(model, settings))))


@data.command("show", context_settings=FLAGS, add_help_option=False)
def data_show(context: typer.Context, help: Help = False) -> None:
    """Show a row token by token, marking learned tokens: cavesson data show FILE --tokenizer MODEL, or a recipe."""
    from cavesson.data.settings import ShowSettings

    if help:
        explain(
            context, ShowSettings, "[FILE]", "RECIPE.toml [--row N] [--kind KIND] [--setting-of-the-recipe value …]"
        )
        return
    words, flags = words_and_flags(any_recipe(), context.args, "[FILE]")
    if words and words[0].endswith(".toml"):
        from cavesson.tools.show_recipe import show_recipe

        show_recipe(Path(words[0]), flags, console())
        return
    settings = _with_path(context, help, ShowSettings)
    from cavesson.data.show import show_data

    show_data(settings, console())


@data.command("lengths", context_settings=FLAGS, add_help_option=False)
def data_lengths(context: typer.Context, help: Help = False) -> None:
    """Count tokens and the rows that the limits would drop: cavesson data lengths FILE --tokenizer MODEL."""
    from cavesson.data.settings import LengthSettings

    settings = _with_path(context, help, LengthSettings)
    from cavesson.data.lengths import show_lengths

    show_lengths(settings, console())


@data.command("duplicates", context_settings=FLAGS, add_help_option=False)
def data_duplicates(context: typer.Context, help: Help = False) -> None:
    """Find duplicate rows and held-out rows that are trained on: cavesson data duplicates FILE."""
    from cavesson.data.settings import ViewSettings

    settings = _with_path(context, help, ViewSettings)
    from cavesson.data.duplicates import duplicates, print_duplicates
    from cavesson.data.load import load as load_rows
    from cavesson.data.view import recognised

    rows = load_rows(settings.data, recognised(settings).kind)
    for line in rows.usage():
        print(visible(line))
    print_duplicates(duplicates(rows.train, rows.held_out), console())


def _with_path(context: typer.Context, help: bool, kind: type[S]) -> S:
    """Read settings from the flags, with the positional file, if any, as `--data.path`; or explain them and exit."""
    if help:
        explain(context, kind, "[FILE]")
        raise typer.Exit
    words, flags = words_and_flags(kind, context.args, "[FILE]")
    return load(kind, None, [*flags, *(f"--data.path={word}" for word in words)])
