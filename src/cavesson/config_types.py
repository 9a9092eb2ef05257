"""Names of the types of settings on help pages."""

from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

_WORDS: dict[Any, str] = {
    str: "text", int: "integer", float: "number", bool: "true|false", Path: "path", NoneType: "none", Any: "any value"
}  # fmt: skip


def type_name(annotation: Any) -> str:
    """Return a type in plain words: `a|b` for choices, `list of text`, `number or none`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(type_name, arguments)))
    if origin is tuple:
        return _tuple_name(arguments)
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "table"
    return _WORDS[annotation]


def _tuple_name(items: tuple[Any, ...]) -> str:
    if items[-1] is not ...:
        return f"[{', '.join(map(type_name, items))}]"
    name = type_name(items[0])
    return f"list of {'tables' if name == 'table' else name}"
