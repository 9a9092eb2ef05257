"""The command that writes a first recipe."""

from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from cavesson.cli.flags import console
from cavesson.command_line import command_line
from cavesson.errors import UserError
from cavesson.registry import ALGORITHMS

init_app = typer.Typer()
PAIRS, ROLLOUTS = ("pairs.toml", "pairs.jsonl"), ("rollouts.toml", "prompts.jsonl", "reward.py")
TEMPLATES = {
    "sft": ("demonstrations.toml", "demonstrations.jsonl"),
    "reward-model": PAIRS,
    "dpo": PAIRS,
    "kto": ("labelled.toml", "labelled.jsonl"),
    **dict.fromkeys(("ppo", "grpo", "rloo", "raft"), ROLLOUTS),
    "distill": ("distill.toml", *ROLLOUTS[1:]),
}
"""Of every command, the recipe and the files that it names, in the folder `templates`."""


@init_app.command()
def init(
    algorithm: Annotated[str, typer.Argument(help="sft, reward-model, dpo, kto, ppo, grpo, rloo, raft or distill.")],
    folder: Annotated[Path, typer.Argument(help="Folder of the recipe; it is made if it does not exist.")] = Path("."),
) -> None:
    """Write a commented recipe that runs as it is, with its data and reward: cavesson init grpo mine."""
    if algorithm not in TEMPLATES:
        raise UserError(f"there is no template {algorithm!r}: {', '.join(TEMPLATES)}")
    names = {name: "recipe.toml" if name.endswith(".toml") else name for name in TEMPLATES[algorithm]}
    if there := next((folder / name for name in names.values() if (folder / name).exists()), None):
        raise UserError(f"{there} exists; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    values = {"command": algorithm, "about": ALGORITHMS[algorithm].help}
    for source, name in names.items():
        text = files("cavesson").joinpath("templates", source).read_text(encoding="utf-8")
        (folder / name).write_text(Template(text).safe_substitute(values), encoding="utf-8")
    recipe = folder / "recipe.toml"
    console().print(
        f"wrote {', '.join(str(folder / name) for name in names.values())}\n"
        f"next: {command_line('check', recipe, '--command', algorithm)}\n"
        f"      {command_line(algorithm, recipe)}",
        highlight=False,
        soft_wrap=True,
    )
