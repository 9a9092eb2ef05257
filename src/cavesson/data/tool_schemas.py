"""Schemas of tools, as chat templates take them: made of a function's type hints and its docstring."""

import inspect
from collections.abc import Callable
from typing import Any

from cavesson.errors import UserError, in_a_line
from cavesson.functions import line_of, load_function

METHODS = ("reset", "get_reward", "user_reply")
"""The public methods of an environment that are not tools."""
RESERVED = (*METHODS, "done", "turn_rewards")
"""Names that an environment gives to what is not a tool."""
_NEEDS = "a tool needs type hints, and a docstring that describes it and, under `Args:`, each of its arguments"


def schemas_named(name: str) -> list[dict[str, Any]]:
    """Return the schemas of a function, or of the tools of an environment, given as "file.py:name" or "module:name".

    Raises:
        UserError: it does not exist or cannot be a tool.
    """
    found = load_function(name, "tool")
    if not isinstance(found, type):
        return [schema_of(found)]
    methods = [inspect.getattr_static(found, one).__get__(object(), found) for one in tool_methods(found)]
    if not methods:
        raise UserError(f"tool {name!r}: the class has no public methods, which would be its tools")
    return [schema_of(method) for method in methods]


def tool_methods(kind: type) -> list[str]:
    """Return the names of an environment's tools: its public methods in the order of their names, which is TRL's."""
    names = [name for name, _ in inspect.getmembers(kind, inspect.isfunction)]
    return [name for name in names if name not in METHODS and not name.startswith("_")]


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return `{"type": "function", "function": {"name": …, "description": …, "parameters": …}}`.

    Raises:
        UserError: the function cannot be a tool.
    """
    from jsonschema import Draft202012Validator, SchemaError
    from transformers.utils.chat_template_utils import get_json_schema

    name = getattr(function, "__name__", "")
    if isinstance(function, type) or not callable(function) or not name.isidentifier():
        raise UserError(f"{function!r} cannot be a tool: it is not a function with a name")
    if name in RESERVED:
        raise UserError(
            f"the tool {name}{line_of(function)}: the name is reserved for environments, in which it is not a tool; "
            "rename the tool"
        )
    try:
        reason = _reason(function)
        if reason is None:
            schema: dict[str, Any] = get_json_schema(function)
            Draft202012Validator.check_schema(standard(schema["function"]["parameters"]))
            return schema
    except SchemaError as error:
        reason = f"a model cannot write an argument of the type {error.instance!r}"
    except Exception as error:  # of transformers' own classes; reading type hints runs the user's code
        reason = in_a_line(error)
    raise UserError(f"the tool {name}{line_of(function)}: {reason}; {_NEEDS}")


def standard(schema: Any) -> Any:
    """Return a schema with `nullable`, which is OpenAPI's word and not JSON Schema's, written as a choice of null."""
    if isinstance(schema, list):
        return [standard(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {name: standard(one) for name, one in schema.items() if name != "nullable"}
    return {"anyOf": [plain, {"type": "null"}]} if schema.get("nullable") is True else plain


def _reason(function: Callable[..., Any]) -> str | None:
    """Return why no schema can be made of a function, or None if nothing is known yet."""
    if not inspect.getdoc(function):
        return "it has no docstring"
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            return f"a model names every argument, and {parameter.name!r} cannot be named"
        if parameter.annotation is parameter.empty:
            return f"its argument {parameter.name!r} has no type hint"
    return None
