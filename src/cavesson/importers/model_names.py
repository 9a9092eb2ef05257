"""The name of the model or tokenizer that a log or the configuration beside it carries.

It is a suggestion for the user, written by whoever wrote the log: nothing is loaded by it.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

_YAML = (".yaml", ".yml")
MAX_BYTES = 1 << 20
MAX_FILES = 30
FOLDERS_ABOVE = 3
"""Folders above the source in which a trainer may keep its configuration, as in ``outputs/configs``."""
_DEPTH = 6
_KEY = re.compile(r"(?i)(?:hf_)?(?:(?P<tokenizer>tokenizer)|model|base_model|pretrain)(?:_(?:name|path|name_or_path))?")
_INSIDE = ("name", "path", "value", "name_or_path")
"""Keys inside of an object called as above; ``value`` is that of Weights & Biases."""
_NAME = re.compile(r"(?=.*[A-Za-z])[\w.~/][\w.~/+-]{0,200}", re.ASCII)
"""The name of a model on the Hub, or a path: text that is safe on a command line."""
_LINE = re.compile(r"""\s*(?P<key>[\w.-]+):\s*(?P<value>"[^"]*"|'[^']*'|[^\s#]*)\s*(?:#.*)?""")


class Named(NamedTuple):
    """A name and its origin."""

    name: str
    origin: str
    is_tokenizer: bool


def model_named(source: Path, records: Iterable[Mapping[str, Any]]) -> Named | None:
    """Return the tokenizer that the first records or the configuration of a source name, else the model; or None."""
    found = [Named(name, "the log", is_tokenizer) for one in records for name, is_tokenizer in _in_values(one)]
    for path in islice(_configs(source if source.is_dir() else source.parent), MAX_FILES):
        found += [Named(name, path.name, is_tokenizer) for name, is_tokenizer in _in_file(path)]
    return next((one for one in found if one.is_tokenizer), next(iter(found), None))


def _in_values(values: Any, called: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, bool]]:
    """Yield the names in nested values, and whether each is that of a tokenizer."""
    if isinstance(values, list):
        values = {called: values[-1]} if values else {}
    if not isinstance(values, Mapping) or not depth:
        return
    for key, value in values.items():
        if isinstance(value, str):
            yield from _named(key, called, value)
        else:
            yield from _in_values(value, str(key), depth - 1)


def _in_file(path: Path) -> Iterator[tuple[str, bool]]:
    text = _beginning(path)
    if path.suffix in _YAML:
        yield from _in_lines(text)
        return
    try:
        if path.suffix == ".toml":
            yield from _in_values(tomllib.loads(text))
        else:
            yield from _in_values(json.loads(text.splitlines()[0] if path.suffix == ".jsonl" else text))
    except (ValueError, IndexError, RecursionError):
        return  # not a configuration


def _in_lines(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the names in YAML, which has one key in a line."""
    inside = ""
    for entry in filter(None, map(_LINE.fullmatch, text.splitlines())):
        if not entry["value"]:
            inside = entry["key"]
        yield from _named(entry["key"], inside, entry["value"].strip("\"'"))


def _named(key: str, inside: str, value: str) -> Iterator[tuple[str, bool]]:
    called = _KEY.fullmatch(inside if key in _INSIDE else key)
    if called and _NAME.fullmatch(value) and value.lower() not in ("none", "null", "true", "false"):
        yield value, called["tokenizer"] is not None


def _configs(folder: Path) -> Iterator[Path]:
    """Yield the configuration files in a folder, the least nested ones first, then those of the folders above."""
    inside = filter(_is_config, folder.rglob("*"))
    yield from sorted(islice(inside, 10 * MAX_FILES), key=lambda path: (len(path.parts), path))
    for above in [*folder.resolve().parents][:FOLDERS_ABOVE]:
        for place in (above, above / "config", above / "configs"):
            yield from sorted(filter(_is_config, place.glob("*")))


def _is_config(path: Path) -> bool:
    kind = ".jsonl" if "metadata" in path.name else ".json"
    return path.suffix in (".toml", ".json", kind, *_YAML) and path.is_file()


def _beginning(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""
