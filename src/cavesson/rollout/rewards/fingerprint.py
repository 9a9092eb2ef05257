"""Hashes that tell the rewards of a run apart: of the source they are written in, and of the files of their models."""

import ast
import hashlib
import importlib.util
import inspect
import json
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

from cavesson.models.load import model_folder, resolve
from cavesson.rollout.rewards.settings import RewardSettings
from cavesson.rollout.rewards.table import MODELS, Reward

_INSTALLED = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib"))
_MODEL_FILES = (".safetensors", ".bin", ".gguf", ".json", ".jinja", ".model")
_ENDS = 2**20
"""Bytes at both ends of a model's file that are compared; whole files may have many gigabytes."""


def settings_fingerprints(settings: Sequence[RewardSettings]) -> dict[str, str]:
    """Return a hash for each reward of a recipe that can change while its settings stay the same.

    These are functions in files and modules, with the modules of the user that they import, and models in local
    folders. Built-in functions and services are told apart by their settings alone. Nothing is imported.
    """
    found = {}
    for one in settings:
        source = of_source(one.use)
        if source is not None:
            found[one.label] = source
        elif one.use in MODELS and "path" in one.options:
            found[one.label] = _digest(_model_files(str(one.options["path"])))
    return found


def object_fingerprints(rewards: Sequence[Reward]) -> dict[str, str]:
    """Return a hash for each reward that was passed as an object, with the functions and constants that it uses."""
    return {one.name: of_object(one.function) for one in rewards}


def of_source(use: str) -> str | None:
    """Return a hash of the file of "file.py:name" or "module:name", and of what it imports; None without a source."""
    file = _source_of(use)
    return None if file is None else _digest(_texts(file, set()))


def of_object(value: Any) -> str:
    """Return a hash of a function, class or object, and of the functions, classes and constants that it uses."""
    return _digest(_used(value, set()))


def _digest(parts: Iterator[str]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(f"{len(part)}:{part}".encode(errors="surrogatepass"))
    return whole.hexdigest()


def _source_of(use: str) -> Path | None:
    """Return the file of a reward "file.py:function" or "module:function"; None if it has no source."""
    place, colon, _ = use.rpartition(":")
    if not colon:
        return None
    if place.endswith(".py"):
        return Path(place).resolve()
    return next((file for file in _files(_folder(place), place.split(".")) if file.is_file()), None)


def _texts(file: Path, seen: set[Path]) -> Iterator[str]:
    """Yield the source of a file and of the user's modules that it imports, without comments and formatting."""
    if file in seen or not file.is_file():
        return
    seen.add(file)
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # of another version of Python, perhaps
        yield hashlib.sha256(file.read_bytes()).hexdigest()
        return
    yield ast.unparse(tree)
    for imported in _imported(tree, file):
        yield from _texts(imported, seen)


def _imported(tree: ast.Module, file: Path) -> Iterator[Path]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(_root(alias.name), alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            parts = node.module.split(".") if node.module else []
            root = file.parents[min(node.level, len(file.parents)) - 1] if node.level else _root(parts[0])
            yield from _files(root, parts)
            for alias in node.names:  # each may be a module
                yield from _files(root, [*parts, alias.name])


def _root(name: str) -> Path | None:
    """Return the folder from which a module of the user is imported; None if it is installed, built in, or missing."""
    folder = _folder(name)
    is_installed = folder is not None and any(folder.is_relative_to(root) for root in _INSTALLED)
    return None if is_installed or name.partition(".")[0] == "cavesson" else folder


def _folder(name: str) -> Path | None:
    """Return the folder from which a module is imported; None if it is built in or missing."""
    spec = None
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name.partition(".")[0])  # of a package inside, this would import the package
    if spec is None:
        return None
    place = next(iter(spec.submodule_search_locations or ()), spec.origin if spec.has_location else None)
    return None if place is None else Path(place).resolve().parent


def _files(root: Path | None, parts: Sequence[str]) -> Iterator[Path]:
    if root is not None:
        place = root.joinpath(*parts)
        yield from (place.with_name(f"{place.name}.py"), place / "__init__.py")


def _model_files(path: str) -> Iterator[str]:
    """Yield the names, sizes and ends of the files of a model in a local folder, or its name."""
    folder = Path(resolve(model_folder(path)))
    if not folder.is_dir():
        yield path
        return
    for file in sorted(one for one in folder.iterdir() if one.suffix in _MODEL_FILES and one.is_file()):
        size = file.stat().st_size
        with file.open("rb") as opened:
            ends = hashlib.sha256(opened.read(_ENDS))
            opened.seek(max(0, size - _ENDS))
            ends.update(opened.read(_ENDS))
        yield f"{file.name} {size} {ends.hexdigest()}"


def _used(value: Any, seen: set[int]) -> Iterator[str]:
    """Yield the sources of a function or object, and of the functions, classes and constants that it names."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, type):
        yield _source(value, None)
        for member in vars(value).values():
            if hasattr(member, "__code__"):
                yield from _used(member, seen)
        return
    if isinstance(value, partial):
        yield _constants({"": value.args, **value.keywords})
        yield from _used(value.func, seen)
        return
    function = inspect.unwrap(value) if callable(value) else value
    code = getattr(function, "__code__", None)
    if code is None or inspect.ismethod(function):
        owner = getattr(function, "__self__", function)
        yield from _used(type(owner), seen)
        yield _constants(getattr(owner, "__dict__", {}))
    if code is not None:
        yield _source(function, code)
        yield _constants({"defaults": function.__defaults__, **(function.__kwdefaults__ or {})})
        yield from _named(function, code, seen)


def _named(function: Any, code: CodeType, seen: set[int]) -> Iterator[str]:
    """Yield what the names in a function stand for: the source of what its own module defines, and constants."""
    space = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    named = {name: space[name] for name in _names(code) if name in space}
    for value in named.values():
        if callable(value) and getattr(value, "__module__", None) == function.__module__:
            yield from _used(value, seen)
    yield _constants(named)


def _names(code: CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_freevars)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _source(value: Callable[..., Any] | type, code: CodeType | None) -> str:
    """Return the source of a function or class, without comments; where none is known, its compiled code."""
    is_lambda = code is not None and code.co_name == "<lambda>"  # whose lines may hold others
    with suppress(OSError, TypeError, SyntaxError):
        if not is_lambda:
            return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(value))))
    return value.__qualname__ if code is None else "".join(_compiled(code))


def _compiled(code: CodeType) -> Iterator[str]:
    yield repr((code.co_code, code.co_names, [one for one in code.co_consts if not isinstance(one, CodeType)]))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _compiled(inner)


def _constants(values: Mapping[str, Any]) -> str:
    """Return the numbers, texts, and lists of these as text; other objects change while they are used."""
    kept = {name: value for name, value in values.items() if isinstance(value, str | int | float | list | tuple | None)}
    return json.dumps(kept, sort_keys=True, default=lambda other: type(other).__qualname__)
