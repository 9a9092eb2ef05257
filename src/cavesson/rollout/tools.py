"""Tools: functions that a model may call, with the JSON schema that it reads of each."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.exceptions import best_match

from cavesson.errors import UserError, in_a_line
from cavesson.rewards.arguments import line_of

RESERVED = ("reset", "get_reward", "user_reply", "done", "turn_rewards")
"""Names that an environment gives to what is not a tool."""
_NEEDS = "a tool needs type hints, and a docstring that describes it and, under `Args:`, each of its arguments"
_LONGEST = 300
"""Characters of a message that quotes what a model wrote."""


class Tool(NamedTuple):
    """A function that a model may call."""

    name: str
    schema: dict[str, Any]
    """What a chat template gets: `{"type": "function", "function": {"name": …, "parameters": …}}`"""
    function: Callable[..., Any]
    """It may be `async`."""


def tools_of(functions: Iterable[Callable[..., Any]]) -> dict[str, Tool]:
    """Return tools by name, in the order of their functions.

    Args:
        functions: with type hints and a Google-style docstring, from which the schemas are made.

    Raises:
        UserError: one cannot be a tool, or two have the same name.
    """
    tools: dict[str, Tool] = {}
    for function in functions:
        tool = _tool(function)
        if tool.name in tools:
            places = f"{line_of(tools[tool.name].function)} and{line_of(function)}"
            raise UserError(f"two tools are called {tool.name!r}:{places}; rename one of them")
        tools[tool.name] = tool
    return tools


def problem_of(tools: Mapping[str, Tool], name: str, arguments: Mapping[str, Any]) -> str | None:
    """Return why a tool cannot be called with these arguments, in the words that the model reads, or None if it can."""
    if name not in tools:
        there = f"the tools are {', '.join(tools)}" if tools else "this conversation has no tools"
        return _shortened(f"unknown tool {name!r}; {there}")
    parameters = tools[name].schema["function"]["parameters"]
    known = parameters["properties"]
    for one in arguments:
        if one not in known:
            takes = f"the arguments of {name} are {', '.join(known)}" if known else f"{name} takes no arguments"
            return _shortened(f"unexpected argument {one!r}; {takes}")
    for one in parameters.get("required", ()):
        if one not in arguments:
            return f"the argument {one!r} of {name} is missing"
    for one, value in arguments.items():
        error = best_match(Draft202012Validator(_standard(known[one])).iter_errors(value))
        if error is not None:
            return f"the argument {one!r} of {name}: {_shortened(error.message)}"
    return None


def _tool(function: Callable[..., Any]) -> Tool:
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
            schema = get_json_schema(function)
            Draft202012Validator.check_schema(_standard(schema["function"]["parameters"]))
            return Tool(name, schema, function)
    except SchemaError as error:
        reason = f"a model cannot write an argument of the type {error.instance!r}"
    except Exception as error:  # of transformers' own classes; reading type hints runs the user's code
        reason = in_a_line(error)
    raise UserError(f"the tool {name}{line_of(function)}: {reason}; {_NEEDS}")


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


def _standard(schema: Any) -> Any:
    """Return a schema with `nullable`, which is OpenAPI's word and not JSON Schema's, written as a choice of null."""
    if isinstance(schema, list):
        return [_standard(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {name: _standard(one) for name, one in schema.items() if name != "nullable"}
    return {"anyOf": [plain, {"type": "null"}]} if schema.get("nullable") is True else plain


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
