"""Settings: a TOML file and dotted flags become one frozen, strict object that is written into the run."""

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from dressage.errors import UserError


class Settings(BaseModel):
    """Base of every group of settings. The text under a field is its help."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _none_may_be_a_word(cls, values: Any) -> Any:
        """`--name none` means that there is nothing, except where "none" is one of a setting's words."""
        if not isinstance(values, dict):
            return values
        words = {name for name, field in cls.model_fields.items() if "none" in get_args(field.annotation)}
        return {name: "none" if value is None and name in words else value for name, value in values.items()}


S = TypeVar("S", bound=Settings)


def load(kind: type[S], recipe: Path | None, flags: Sequence[str]) -> S:
    """Read a recipe, lay the flags over it and check the result.

    Args:
        kind: the class of settings.
        recipe: a TOML file; None means nothing but defaults and flags.
        flags: `--a.b value` or `--a.b=value`; values are read as TOML, else as text.

    Raises:
        UserError: the file is missing or no TOML, a key is unknown (the message names the nearest), or a value is
            out of range.
    """
    values = _read(recipe) if recipe else {}
    for key, value in _parse_flags(flags):
        _set(values, key, value)
    return check(kind, values, str(recipe) if recipe else "the flags")


def check(kind: type[S], values: Mapping[str, Any], source: str) -> S:
    """Make settings of plain values; a mistake is one line that starts with the source."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise UserError("\n".join(_explain(kind, e, source) for e in error.errors()[:2])) from None


def describe(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Every field as (dotted name, type, default, help), groups flattened."""
    for name, field in kind.model_fields.items():
        group = _group(field.annotation)
        if group is not None and not field.is_required() and isinstance(field.default, BaseModel):
            yield from describe(group, f"{prefix}{name}.")
            continue
        default = "required" if field.is_required() else _show(field.get_default(call_default_factory=True))
        yield f"{prefix}{name}", _type_name(field.annotation), default, field.description or ""
        if group is not None:
            yield from describe(group, f"{prefix}{name}.")


def _read(recipe: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(recipe.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{recipe}: there is no such recipe") from None
    except IsADirectoryError:
        raise UserError(f"{recipe} is a folder; a recipe is a .toml file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{recipe} is not valid TOML: {error}") from None


def _parse_flags(flags: Sequence[str]) -> Iterator[tuple[str, Any]]:
    rest = iter(flags)
    for flag in rest:
        if not flag.startswith("--") or len(flag) == 2:
            raise UserError(f"{flag!r} is not understood; settings are given as --name.field value")
        key, equals, text = flag[2:].partition("=")
        if not equals:
            try:
                text = next(rest)
            except StopIteration:
                raise UserError(f"--{key} needs a value") from None
        yield key.replace("-", "_"), _parse_value(text)


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return None if text == "none" else text


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *groups, last = key.split(".")
    for group in groups:
        values = values.setdefault(group, {})
        if not isinstance(values, dict):
            raise UserError(f"--{key}: {group!r} is not a group of settings that a flag can reach into")
    values[last] = value


def _explain(kind: type[BaseModel], error: Any, source: str) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{source}: unknown setting {where!r}{_nearest(kind, where)}"
    if error["type"] == "missing":
        return f"{source}: {where!r} is missing; {_field_help(kind, where)}"
    message = error["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    given = "" if isinstance(error["input"], dict | BaseModel) else f", and not {error['input']!r}"
    return f"{source}: {where or 'the settings'}: {message}{given}"


def _nearest(kind: type[BaseModel], where: str) -> str:
    names = [name for name, *_ in describe(kind)]
    # A forgotten group first: `--stop` means `sampling.stop`, however much it looks like `steps`.
    same = [name for name in names if name.rsplit(".", 1)[-1] == where.rsplit(".", 1)[-1]]
    near = difflib.get_close_matches(where, same or names, n=1, cutoff=0.0 if same else 0.5)
    return f"; did you mean {near[0]!r}?" if near else "; --help lists them all"


def _field_help(kind: type[BaseModel], where: str) -> str:
    return next((text for name, _, _, text in describe(kind) if name == where), "it is required")


def _group(annotation: Any) -> type[BaseModel] | None:
    candidates = [annotation, *get_args(annotation)]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _type_name(annotation: Any) -> str:
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__name__
    return str(annotation).replace("typing.", "").replace("pathlib.", "").replace("NoneType", "None")


def _show(default: Any) -> str:
    if isinstance(default, tuple):
        return str(list(default))
    return "none" if default is None else str(default)
