"""What documents and messages refer to is there: files and names in the code, extras, ports, links, commands, flags."""

import ast
import inspect
import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from cavesson.cli import app
from cavesson.cli.board import board
from cavesson.config import Settings
from cavesson.registry import ALGORITHMS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "cavesson"
REFERENCE = ROOT / "docs" / "reference"
"""Pages that `make docs` makes, which checks the links to them."""
WRITTEN = set((ROOT / "docs").rglob("*.md")) - set(REFERENCE.rglob("*.md"))
PAGES = sorted({*ROOT.glob("*.md"), *WRITTEN, *(ROOT / "benchmarks").glob("*.md")})
MESSAGES = sorted(SOURCE.rglob("*.py"))
FILE = re.compile(r"[\w/]+\.(py|tsx?)")
OTHERS = {
    "--api-key", "--apply_chat_template", "--megabytes", "--peak", "--peers-python", "--save-debug-rollout-data"
}  # fmt: skip
"""Flags of other programs, and of the benchmarks."""
NAME = re.compile(r"[A-Za-z_][\w.]*")


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def code_references(page: Path) -> Iterator[tuple[Path, str]]:
    """The names after every *Code:*, each with the file named before it; at first the page's own algorithm."""
    for found in re.finditer(r"\*Code:\*(.*?)(?=\*\w[^*\n]*:\*|\n\n|\n\d+\. |\Z)", read(page), re.DOTALL):
        file = SOURCE / "algorithms" / f"{page.stem.removesuffix('-details').replace('-', '_')}.py"
        for word in re.findall(r"`([^`]+)`", found[1]):
            if FILE.fullmatch(word):
                file = SOURCE / word
                yield file, ""
            elif NAME.fullmatch(word):
                yield file, word


def defines(text: str, name: str) -> bool:
    return re.search(rf"\b(def|class) {name}\b|^ *{name} *[:=]", text, re.MULTILINE) is not None


def test_code_is_where_documents_say() -> None:
    references = [(page.name, file, name) for page in PAGES for file, name in code_references(page)]
    assert len(references) > 150
    for page, file, name in references:
        assert file.is_file(), f"{page}: {file}"
        for part in name.split(".") if name else ():
            assert defines(read(file), part), f"{page}: {file.name} has no {name}"


def test_modules_are_where_documents_say() -> None:
    for page in PAGES:
        for dotted in re.findall(r"(?:from|import) (cavesson[\w.]*)", read(page)):
            place = SOURCE.parent / dotted.replace(".", "/")
            assert place.is_dir() or place.with_suffix(".py").is_file(), f"{page.name}: {dotted}"


def test_benchmarks_and_examples_import_what_is_there() -> None:
    files = [file for folder in ("benchmarks", "examples") for file in (ROOT / folder).rglob("*.py")]
    imports = [(file.name, node) for file in files for node in ast.walk(ast.parse(read(file)))]
    for file, node in imports:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "cavesson":
            module = import_module(str(node.module))
            folder = SOURCE.parent / str(node.module).replace(".", "/")
            for name in (one.name for one in node.names):
                assert hasattr(module, name) or (folder / f"{name}.py").is_file(), f"{file}: {node.module}.{name}"


def test_linked_files_are_there() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", read(page)):
            path = (page.parent / target).resolve()
            if "://" not in target and not target.startswith("mailto:") and not path.is_relative_to(REFERENCE):
                assert path.exists(), f"{page.name}: {target}"


def test_extras_are_declared() -> None:
    declared = set(tomllib.loads(read(ROOT / "pyproject.toml"))["project"]["optional-dependencies"])
    mentioned = {
        extra
        for path in [*PAGES, *MESSAGES]
        for extras in re.findall(r"cavesson\[([\w,]+)\]", read(path))
        for extra in extras.split(",")
    }
    assert "s3" in mentioned and mentioned <= declared


def test_the_port_is_the_boards() -> None:
    port = inspect.signature(board).parameters["port"].default
    mentioned = {
        found
        for path in [*PAGES, *MESSAGES]
        for found in re.findall(r"(?:127\.0\.0\.1|localhost):(6\d{3})", read(path))
    }
    assert mentioned == {str(port)}


def commands(page: Path) -> Iterator[list[str]]:
    """What follows `cavesson` in every line of shell, by words."""
    for block in re.findall(r"```(?:sh|bash|console)\n(.*?)```", read(page), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for called in re.findall(r"(?:^|&& |; |\| )(?:\$ )?cavesson ([^|;&#]*)", line.strip()):
                yield shlex.split(called)


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that words call, and the rest of them."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands") and words and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    return command, words


def test_commands_and_their_flags_are_there() -> None:
    called = [(page.name, words) for page in PAGES for words in commands(page)]
    assert len(called) > 60
    for page, words in called:
        command, rest = command_of(words)
        assert not hasattr(command, "commands") or not words, f"{page}: {words}"
        if command.context_settings.get("ignore_unknown_options"):
            continue  # these flags are settings, which tests of the recipes and of the settings cover
        known = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}
        given = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert given <= known | {"--help"}, f"{page}: {words}"


def options(command: Any) -> set[str]:
    """The flags of a command and of all below it."""
    own = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}
    return own.union(*(options(below) for below in getattr(command, "commands", {}).values()))


def fields(group: type[Settings]) -> set[str]:
    """The names of the settings of a group and of all that extend it."""
    return set(group.model_fields).union(*map(fields, group.__subclasses__()))


def test_flags_in_sentences_are_there() -> None:
    modules = {entry.module for entry in ALGORITHMS.values()}
    tools = {f"cavesson.tools.{path.stem}" for path in (SOURCE / "tools").glob("*.py")}
    for module in modules | tools | {"cavesson.align.recipe"}:
        import_module(module)  # its settings are known from then on
    flags, settings = options(typer.main.get_command(app)) | OTHERS, fields(Settings)
    for page in PAGES:
        if page.parent.name == "benchmarks":
            continue  # its flags are those of scripts
        for flag in re.findall(r"`(--[\w.-]+)", read(page)):
            parts = flag.removeprefix("--").split(".")
            assert flag in flags or set(parts) <= settings, f"{page.name}: {flag}"
