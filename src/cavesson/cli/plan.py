"""The command that predicts memory and time of a run."""

import gc
from pathlib import Path
from typing import Annotated

import typer

from cavesson.cli.flags import FLAGS, Json, RecipeCommand, console, print_json, words_and_flags
from cavesson.registry import any_recipe

plan_app = typer.Typer()


@plan_app.command(context_settings=FLAGS)
def plan(
    context: typer.Context,
    gpus: Annotated[int, typer.Option(help="GPUs that train, one process each.", min=1)] = 1,
    gpu: Annotated[str, typer.Option(help="Kind of GPU: h100, h200, b200, a100, l40s or a6000.")] = "h100",
    command: RecipeCommand = None,
    as_json: Json = False,
) -> None:
    """Predict memory and step time on given GPUs: cavesson plan RECIPE.toml --gpus 64 --gpu h200."""
    from cavesson.plan.devices import device_of
    from cavesson.plan.recipe import planned

    (recipe,), flags = words_and_flags(any_recipe(), context.args, "RECIPE.toml")
    device = device_of(gpu, gpus)
    runs = planned(Path(recipe), flags, command)
    from cavesson.plan.predict import Predictor
    from cavesson.plan.report import Plan, plain, show

    gc.freeze()  # a prediction looks for what earlier ones have left, and not again among all that is imported
    shown = []
    for run in runs:
        predictor = Predictor(run, device, gpus)
        prediction = predictor.predict(run.settings)
        variants = list(predictor.variants(run.settings))
        one = Plan(run.name, run.command, device, gpus, prediction, variants)
        if as_json:
            shown.append(plain(one))
        else:
            show(console(), one)
    if as_json:
        print_json(shown)
