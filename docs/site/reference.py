"""The pages of the reference that are made from the code: settings, command line and Python API."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from docutils import nodes
from pydantic import BaseModel
from sphinx import addnodes
from sphinx.application import Sphinx
from typer.testing import CliRunner

import cavesson
from cavesson.cli import app as commands
from cavesson.config import describe, groups
from cavesson.registry import ALGORITHMS

FOLDER = Path("docs", "reference")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", _write_pages)
    app.connect("doctree-read", _without_folders)
    return {"parallel_read_safe": True}


def _write_pages(app: Sphinx) -> None:
    folder = Path(app.srcdir, FOLDER)
    (folder / "settings").mkdir(parents=True, exist_ok=True)
    pages = {f"settings/{name}.md": _settings_page(name, entry.settings) for name, entry in ALGORITHMS.items()}
    pages |= {"index.md": _index_page(), "command-line.md": _command_page(), "api.md": _api_page()}
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:  # Sphinx reads changed files only
            path.write_text(text, encoding="utf-8")


def _index_page() -> str:
    links = [f"- [cavesson {name}](settings/{name}.md): {entry.help}" for name, entry in ALGORITHMS.items()]
    tree = "\n".join(["```{toctree}", ":hidden:", "", *(f"settings/{name}" for name in ALGORITHMS), "```", ""])
    head = "# Settings\n\nFor everybody who writes a recipe: each command that trains has a page of its settings.\n"
    return "\n".join([head, *links, "", tree])


def _settings_page(command: str, settings: type[BaseModel]) -> str:
    titles = {"": settings.__doc__ or "", **dict(groups(settings))}
    sections = [
        f"# Settings of {command}\n",
        f"For everybody who writes a recipe or flags for `cavesson {command}`.\n",
    ]
    described = list(describe(settings))
    for group, title in titles.items():
        own = [one for one in described if one[0].rpartition(".")[0] == group or (group and one[0] == group)]
        if not own:
            continue
        rows = [
            f"| `{setting}` | `{default}` | {_cell(text)} *({_cell(type_)})* |" for setting, type_, default, text in own
        ]
        heading = f"## {group or 'The run'}\n\n{' '.join(title.split())}\n"
        sections.append("\n".join([heading, "| setting | default | what it does |", "|---|---|---|", *rows, ""]))
    return "\n".join(sections)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _command_page() -> str:
    sections = [
        "# Command line\n",
        "For everybody who calls `cavesson`: what `--help` prints of every command. Commands that train have "
        "[pages of their settings](index.md).\n",
    ]
    for name, help_ in _helps(typer.main.get_command(commands)):
        sections.append(f"## cavesson {name}\n\n```text\n{help_}\n```\n")
    return "\n".join(sections)


def _helps(group: Any) -> Iterator[tuple[str, str]]:
    runner = CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"})
    for name in group.list_commands(None):
        if not group.commands[name].hidden:
            result = runner.invoke(commands, [name, "--help"], prog_name="cavesson")
            assert result.exit_code == 0, (name, result.output)
            yield name, "\n".join(line.rstrip() for line in result.output.strip().splitlines())


def _api_page() -> str:
    names = [name for name in cavesson.__all__ if not name.startswith("_")]
    settings = [name for name in names if isinstance(getattr(cavesson, name), type(BaseModel))]
    sections = [
        "# Python API\n",
        "For everybody who uses Cavesson from Python. Names are imported from `cavesson`. The classes of settings are "
        f"explained by [their pages](index.md): {', '.join(f'`{name}`' for name in settings)}.\n",
    ]
    for name in names:
        if name not in settings:
            thing = getattr(cavesson, name)
            kind = "autoclass" if isinstance(thing, type) else "autofunction"
            options = "\n   :members:\n   :undoc-members:" if kind == "autoclass" else ""
            target = (
                f"{thing.__module__}.{thing.__qualname__}" if hasattr(thing, "__qualname__") else f"cavesson.{name}"
            )
            sections.append(f"## {name}\n\n```{{eval-rst}}\n.. {kind}:: {target}{options}\n```\n")
    return "\n".join(sections)


def _without_folders(app: Sphinx, document: nodes.document) -> None:
    """Show links to folders of the repository, which the site does not have, as their text."""
    for link in list(document.findall(addnodes.pending_xref)):
        target = Path(app.env.doc2path(app.env.docname)).parent / link["reftarget"]
        if link["reftype"] == "myst" and target.is_dir():
            link.replace_self(link.children)
