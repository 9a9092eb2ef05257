"""Tools: functions that a model may call, with the JSON schema that it reads of each."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from cavesson.data.tool_schemas import schema_of, standard
from cavesson.errors import UserError
from cavesson.functions import line_of
from cavesson.text.visible import shortened

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
        schema = schema_of(function)
        tool = Tool(schema["function"]["name"], schema, function)
        if tool.name in tools:
            places = f"{line_of(tools[tool.name].function)} and{line_of(function)}"
            raise UserError(f"two tools are called {tool.name!r}:{places}; rename one of them")
        tools[tool.name] = tool
    return tools


def problem_of(tools: Mapping[str, Tool], name: str, arguments: Mapping[str, Any]) -> str | None:
    """Return why a tool cannot be called with these arguments, in the words that the model reads, or None if it can."""
    if name not in tools:
        there = f"the tools are {', '.join(tools)}" if tools else "this conversation has no tools"
        return shortened(f"unknown tool {name!r}; {there}", _LONGEST)
    parameters = tools[name].schema["function"]["parameters"]
    known = parameters["properties"]
    for one in arguments:
        if one not in known:
            takes = f"the arguments of {name} are {', '.join(known)}" if known else f"{name} takes no arguments"
            return shortened(f"unexpected argument {one!r}; {takes}", _LONGEST)
    for one in parameters.get("required", ()):
        if one not in arguments:
            return f"the argument {one!r} of {name} is missing"
    for one, value in arguments.items():
        error = best_match(Draft202012Validator(standard(known[one])).iter_errors(value))
        if error is not None:
            return f"the argument {one!r} of {name}: {shortened(error.message, _LONGEST)}"
    return None
