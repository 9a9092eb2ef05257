"""The command that predicts memory and time of a run."""

import json
from pathlib import Path
from typing import Annotated

import typer

from cavesson.cli.flags import FLAGS, console, words_and_flags
from cavesson.registry import any_recipe
from cavesson.text.visible import safe_json

plan_app = typer.Typer()


@plan_app.command(context_settings=FLAGS)
def plan(
    context: typer.Context,
    gpus: Annotated[int, typer.Option(help="Devices that train, one process each.", min=1)] = 1,
    gpu: Annotated[
        str, typer.Option(help="Kind of device: h100, h200, b200, a100, l40s, a6000, or cpu for this machine.")
    ] = "h100",
    command: Annotated[str | None, typer.Option(help="Command of the recipe, if it fits several.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict memory and step time on given devices: cavesson plan RECIPE.toml --gpus 64 --gpu h200."""
    from cavesson.plan.devices import device_of
    from cavesson.plan.predict import Predictor
    from cavesson.plan.recipe import planned
    from cavesson.plan.report import Plan, plain, show

    (recipe,), flags = words_and_flags(any_recipe(), context.args, "RECIPE.toml")
    device = device_of(gpu, gpus)
    shown = []
    for run in planned(Path(recipe), flags, command):
        predictor = Predictor(run, device, gpus)
        prediction = predictor.predict(run.settings)
        variants = list(predictor.variants(run.settings))
        one = Plan(run.name, run.command, device, gpus, prediction, variants)
        if as_json:
            shown.append(plain(one))
        else:
            show(console(), one)
    if as_json:
        print(safe_json(json.dumps(shown, ensure_ascii=False, indent=1)))
