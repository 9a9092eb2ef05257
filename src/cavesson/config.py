"""Settings: a TOML file and dotted flags become one frozen, strictly validated object that is written into the run."""

import difflib
import tomllib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from cavesson.config_paths import in_folder
from cavesson.errors import UserError
from cavesson.text.masking import masked, place_of_secret

_WORDS: dict[Any, str] = {
    str: "text", int: "integer", float: "number", bool: "true|false", Path: "path", NoneType: "none", Any: "any value"
}  # fmt: skip
"""Types of settings in plain words, for help pages."""

ONE_OR_SEVERAL = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
"""Annotates a list of texts, for which a single text may be given."""


class SettingsError(UserError, ValueError):
    """Values that a class of settings rejects."""


class Settings(BaseModel):
    """Base of every group of settings. The text under a field is its help."""

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise SettingsError(_explained(type(self), error, type(self).__name__)) from None
        _refuse_secrets(values, type(self).__name__)

    # Nested groups are validated together with the outer one, not by calling the method above.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _none_may_be_a_word(cls, values: Any) -> Any:
        """Convert None back to "none" for settings that have "none" among their choices.

        A flag `--name none` is read as None.
        """
        if not isinstance(values, dict):
            return values
        words = {name for name, field in cls.model_fields.items() if "none" in get_args(field.annotation)}
        return {name: "none" if value is None and name in words else value for name, value in values.items()}

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """Yield what `repr` shows: required settings, and those that differ from their defaults."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if field.is_required() or value != field.get_default(call_default_factory=True):
                yield name, value
        yield from (self.model_extra or {}).items()

    def refuse(self, name: str, why: str) -> None:
        """Reject a setting that has no effect in combination with the others, unless it or its group has its default.

        Args:
            name: dotted name of the setting.
            why: when it has no effect; the end of the message.

        Raises:
            SettingsError: the setting differs from its default.
        """
        *groups, last = name.split(".")
        owner = reduce(lambda group, part: group and getattr(group, part), groups, self)
        if owner is not None and getattr(owner, last) != type(owner).model_fields[last].default:
            raise SettingsError(f"{name} has no effect {why}")


S = TypeVar("S", bound=Settings)


def load(kind: type[S], recipe: Path | None, flags: Sequence[str]) -> S:
    """Read a recipe, apply the flags on top of it and validate the result.

    Args:
        kind: the class of settings.
        recipe: a TOML file; None means only defaults and flags.
        flags: `--a.b value` or `--a.b=value`; values are parsed as TOML, or taken as text if that fails. `--a.b` alone
            sets a true|false setting.

    Raises:
        UserError: the file is missing or not valid TOML, a key is unknown (the message names the closest match), or a
            value is out of range.
    """
    given = _read(recipe) if recipe else {}
    _refuse_secrets(given, str(recipe))
    values = overlaid(kind, in_folder(given, recipe.parent) if recipe else {}, flags)
    return check(kind, values, str(recipe) if recipe else "the flags")


def overlaid(kind: type[Settings], values: dict[str, Any], flags: Sequence[str]) -> dict[str, Any]:
    """Apply flags to the plain values of a class of settings, in place, and return the values."""
    words, given = separate(kind, flags)
    if words:
        raise UserError(f"unexpected argument {words[0]!r}; settings are given as --name.field value")
    for name, text in given:
        value = _parse_value(text)
        _refuse_secrets({name: value}, "the flags")
        _set(values, name, value)
    return values


def separate(kind: Any, arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Separate positional arguments from the flags of a class of settings, or a union of several, in any order.

    Returns:
        The positional arguments, and the flags as (dotted name, value).

    Raises:
        UserError: the class has no such setting, or a flag has no value.
    """
    words: list[str] = []
    flags: list[tuple[str, str]] = []
    rest = deque(arguments)
    while rest:
        argument = rest.popleft()
        if not argument.startswith("--") or argument == "--":
            words.append(argument)
            continue
        flag, equals, text = argument.partition("=")
        name = flag[2:].replace("-", "_")
        types = list(_types(kind, name.split(".")))
        if not types and isinstance(kind, type):
            raise UserError(f"the flags: unknown setting {name!r}{_nearest(kind, name)}")
        if not equals and bool in types:
            text = rest.popleft() if rest and rest[0] in ("true", "false") else "true"
        elif not equals:
            if not rest:
                raise UserError(f"{flag} needs a value")
            text = rest.popleft()
        flags.append((name, text))
    return words, flags


def check(kind: type[S], values: Mapping[str, Any], source: str) -> S:
    """Validate plain values as settings.

    Args:
        kind: the class of settings.
        values: the values by name, with nested mappings for groups.
        source: where the values come from; the message of an error begins with it.

    Raises:
        UserError: a value is not valid.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise UserError(_explained(kind, error, source)) from None


def _refuse_secrets(values: Mapping[str, Any], source: str) -> None:
    """Raise SettingsError if one of the given values looks like a secret: settings are recorded and shown.

    What an older run has recorded is not checked: it is masked where it is shown.
    """
    place = place_of_secret(values)
    if place is not None:
        raise SettingsError(
            f"{source}: {place} has what looks like a password, token or key, and settings are recorded and shown: "
            "keep it in an environment variable or a file (docs/secrets.md)"
        )


def _explained(kind: type[BaseModel], error: ValidationError, source: str) -> str:
    return masked("\n".join(_explain(kind, one, source) for one in error.errors()[:2]))  # type: ignore[no-any-return]


def describe(
    kind: type[BaseModel], prefix: str = "", values: BaseModel | None = None
) -> Iterator[tuple[str, str, str, str]]:
    """Yield every field as (dotted name, type, default, help), with groups flattened.

    Args:
        kind: the class of settings.
        prefix: prefix of the names.
        values: settings whose values are shown as the defaults; None = the defaults of the class.
    """
    for name, field in kind.model_fields.items():
        value = field.get_default(call_default_factory=True) if values is None else getattr(values, name)
        if isinstance(value, BaseModel):
            yield from describe(type(value), f"{prefix}{name}.", value)
            continue
        default = "required" if values is None and field.is_required() else _show(value)
        yield f"{prefix}{name}", _type_name(field.annotation), default, field.description or ""
        group = _group(field.annotation)
        if group is not None:
            yield from describe(group, f"{prefix}{name}.")


def groups(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every group of settings as (dotted name, help), outer groups before nested ones."""
    for name, field in kind.model_fields.items():
        group = _group(field.annotation)
        if group is not None:
            yield f"{prefix}{name}", field.description or ""
            yield from groups(group, f"{prefix}{name}.")


def _read(recipe: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(recipe.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"{recipe}: there is no such recipe") from None
    except IsADirectoryError:
        raise UserError(f"{recipe} is a folder; a recipe is a .toml file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{recipe} is not UTF-8 (byte {error.start + 1}): save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{recipe} is not valid TOML: {error}") from None


def _types(kind: Any, names: Sequence[str]) -> Iterator[Any]:
    """Yield the types that a nested setting may have: none if it is unknown, `Any` where every name is allowed."""
    if not names:
        yield kind
        return
    for part in (kind, *get_args(kind)):
        if get_origin(part) is dict:
            yield from _types(get_args(part)[1], names[1:])
        elif isinstance(part, type) and issubclass(part, BaseModel):
            field = part.model_fields.get(names[0])
            if field is not None:
                yield from _types(field.annotation, names[1:])
            elif part.model_config.get("extra") == "allow":
                yield Any


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
    if error["type"] == "tuple_type" and (group := _group_of_list(kind, error["loc"])) is not None:
        return f"{source}: {where!r} is a list of tables: {_written_out(where, group, error['input'])}"
    message = error["msg"].removeprefix("Value error, ")
    if not message[1:2].isupper():  # not of an abbreviation, such as PPO
        message = message[0].lower() + message[1:]
    given = "" if isinstance(error["input"], dict | BaseModel) else f", and not {error['input']!r}"
    return f"{source}: {where or 'the settings'}: {message}{given}"


def _group_of_list(kind: type[BaseModel], place: Sequence[int | str]) -> type[BaseModel] | None:
    """Return the class of the list items of a setting, or None if it is not a list of groups."""
    found = next(_types(kind, [str(part) for part in place]), None)
    return _group(found) if get_origin(found) is tuple else None


def _written_out(where: str, group: type[BaseModel], given: Any) -> str:
    if isinstance(given, dict):
        return f"write [[{where}]], with two brackets, in a recipe"
    first = next(iter(group.model_fields))
    return f"write [[{where}]] and {first} = {given!r} in a recipe, or --{where} '[{{{first} = \"{given}\"}}]'"


def _nearest(kind: type[BaseModel], where: str) -> str:
    names = [name for name, *_ in describe(kind)]
    # A missing group prefix takes precedence: `--stop` means `sampling.stop`, although it resembles `steps`.
    same = [name for name in names if name.rsplit(".", 1)[-1] == where.rsplit(".", 1)[-1]]
    # Unless its own group has almost that name: `sampling.max_tokens` means `sampling.max_new_tokens`.
    group = where.rpartition(".")[0]
    within = [name for name in names if group and name.rpartition(".")[0] == group]
    near = difflib.get_close_matches(where, within, n=1, cutoff=0.75)
    near = near or difflib.get_close_matches(where, same or names, n=1, cutoff=0.0 if same else 0.5)
    return f"; did you mean {near[0]!r}?" if near else "; --help lists them all"


def _field_help(kind: type[BaseModel], where: str) -> str:
    return next((text for name, _, _, text in describe(kind) if name == where), "it is required")


def _group(annotation: Any) -> type[BaseModel] | None:
    candidates = [annotation, *get_args(annotation)]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _type_name(annotation: Any) -> str:
    """Return a type in plain words: `a|b` for choices, `list of text`, `number or none`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_type_name, arguments)))
    if origin is tuple:
        return _tuple_name(arguments)
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "table"
    return _WORDS[annotation]


def _tuple_name(items: tuple[Any, ...]) -> str:
    if items[-1] is not ...:
        return f"[{', '.join(map(_type_name, items))}]"
    name = _type_name(items[0])
    return f"list of {'tables' if name == 'table' else name}"


def _show(default: Any) -> str:
    """Return a value as it is written in a recipe, except for the quotes around a text."""
    if isinstance(default, tuple):
        return f"[{', '.join(map(_show, default))}]"
    if isinstance(default, BaseModel):
        given = ((name, getattr(default, name)) for name in default.model_fields_set)
        return f"{{{', '.join(f'{name} = {_show(value)}' for name, value in given)}}}"
    if isinstance(default, bool):
        return str(default).lower()
    return "none" if default is None else masked(str(default))
