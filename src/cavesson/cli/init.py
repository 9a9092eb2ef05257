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
AGENT = ("recipe.toml", "calculator.py", "demonstrations.jsonl", "questions.jsonl", "held-out.jsonl", "template.jinja")
TEMPLATES = {
    "sft": ("demonstrations.toml", "demonstrations.jsonl"),
    "reward-model": PAIRS,
    "dpo": PAIRS,
    "kto": ("labelled.toml", "labelled.jsonl"),
    **dict.fromkeys(("ppo", "grpo", "rloo", "raft"), ROLLOUTS),
    "distill": ("distill.toml", *ROLLOUTS[1:]),
    "agent": tuple(f"agent/{name}" for name in AGENT),
}
"""Of every kind, the recipe and the files that it names, in the folder `templates`."""


@init_app.command()
def init(
    kind: Annotated[str, typer.Argument(help="sft, reward-model, dpo, kto, ppo, grpo, rloo, raft, distill or agent.")],
    folder: Annotated[Path, typer.Argument(help="Folder of the recipe; it is made if it does not exist.")] = Path("."),
) -> None:
    """Write a commented recipe that runs as it is, with its data and reward: cavesson init grpo mine."""
    if kind not in TEMPLATES:
        raise UserError(f"unknown template {kind!r}; choose one of {', '.join(TEMPLATES)}")
    names = {name: _name_of(name) for name in TEMPLATES[kind]}
    if there := next((folder / name for name in names.values() if (folder / name).exists()), None):
        raise UserError(f"{there} exists; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    values = {"command": kind, "about": ALGORITHMS[kind].help} if kind in ALGORITHMS else {}
    for source, name in names.items():
        text = files("cavesson").joinpath("templates", source).read_text(encoding="utf-8")
        (folder / name).write_text(Template(text).safe_substitute(values), encoding="utf-8")
    recipe = folder / "recipe.toml"
    check, train = command_line("check", recipe, "--command", kind), command_line(kind, recipe)
    console().print(
        f"wrote {', '.join(str(folder / name) for name in names.values())}\n"
        + (f"next: {check}\n      {train}" if values else f"next: {command_line('align', recipe)}"),
        highlight=False,
        soft_wrap=True,
    )


def _name_of(source: str) -> str:
    """Return the name in the new folder of a file among the templates."""
    return "recipe.toml" if source.endswith(".toml") else source.rpartition("/")[2]
