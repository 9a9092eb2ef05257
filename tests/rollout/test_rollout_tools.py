import enum
import math
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cavesson.data.tool_schemas import RESERVED
from cavesson.errors import UserError
from cavesson.rollout.tools import problem_of, tools_of


class Unit(enum.Enum):
    KELVIN = "K"
    CELSIUS = "C"


def search(query: str, limit: int = 3, exact: bool | None = None) -> list[str]:
    """Search the books.

    Args:
        query: what to look for
        limit: most results
        exact: whether the words must stand together
    """
    return [query] * limit


async def convert(value: float, unit: Unit, names: list[str], kind: Literal["a", "b"] = "a", more: Any = None) -> float:
    """Convert a temperature.

    Args:
        value: the temperature
        unit: its unit
        names: of the sensors
        kind: of the scale
        more: anything
    """
    return value


TOOLS = tools_of([search, convert])


def test_a_schema_is_made_of_type_hints_and_docstring():
    assert list(TOOLS) == ["search", "convert"]
    assert TOOLS["search"].function is search
    assert TOOLS["search"].schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the books.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "what to look for"},
                    "limit": {"type": "integer", "description": "most results"},
                    "exact": {
                        "type": "boolean",
                        "nullable": True,
                        "description": "whether the words must stand together",
                    },
                },
                "required": ["query"],
            },
            "return": {"type": "array", "items": {"type": "string"}},
        },
    }


@pytest.mark.parametrize(
    "arguments",
    [
        {"query": "x"},
        {"query": "", "limit": -2},
        {"query": "x", "exact": None},
        {"limit": 1, "exact": True, "query": "x"},
    ],
)
def test_arguments_that_fit(arguments):
    assert problem_of(TOOLS, "search", arguments) is None
    assert set(arguments) <= {"query", "limit", "exact"}


def test_arguments_of_nested_types_that_fit():
    assert (
        problem_of(TOOLS, "convert", {"value": 3, "unit": "K", "names": ["a"], "kind": "b", "more": {"x": []}}) is None
    )


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("seek", {}, ["unknown tool 'seek'", "search, convert"]),
        ("", {}, ["unknown tool ''"]),
        ("search", {}, ["'query'", "missing"]),
        ("search", {"query": "x", "top": 1}, ["unexpected argument 'top'", "query, limit, exact"]),
        ("search", {"query": 1}, ["'query'", "1 is not of type 'string'"]),
        ("search", {"query": None}, ["'query'", "None is not of type 'string'"]),
        ("search", {"query": "x", "limit": "3"}, ["'limit'", "'3' is not of type 'integer'"]),
        ("search", {"query": "x", "limit": True}, ["'limit'", "True is not of type 'integer'"]),
        ("search", {"query": "x", "limit": 2.5}, ["'limit'", "2.5 is not of type 'integer'"]),
        ("search", {"query": "x", "limit": None}, ["'limit'"]),
        ("search", {"query": "x", "exact": "yes"}, ["'exact'"]),
        ("convert", {"value": 1, "unit": "F", "names": []}, ["'unit'", "'F' is not one of ['K', 'C']"]),
        ("convert", {"value": 1, "unit": "K", "names": ["a", 2]}, ["'names'", "2 is not of type 'string'"]),
        ("convert", {"value": 1, "unit": "K", "names": [], "kind": "c"}, ["'kind'", "'c' is not one of ['a', 'b']"]),
    ],
)
def test_arguments_that_do_not_fit(name, arguments, words):
    problem = problem_of(TOOLS, name, arguments)
    assert problem is not None
    assert all(word in problem for word in words), problem


def test_a_long_argument_is_not_repeated_to_the_model():
    for problem in (
        problem_of(TOOLS, "search", {"query": "x", "limit": "3" * 10_000}),
        problem_of(TOOLS, "x" * 10_000, {}),
        problem_of(TOOLS, "search", {"y" * 10_000: 1}),
    ):
        assert len(problem) < 400


def test_without_tools_every_call_is_wrong():
    assert problem_of({}, "search", {"query": "x"}) == "unknown tool 'search'; this conversation has no tools"


def nullable(nullable: int) -> int:
    """Return it.

    Args:
        nullable: a number
    """
    return nullable


def test_an_argument_may_be_called_nullable():
    tools = tools_of([nullable])
    assert problem_of(tools, "nullable", {"nullable": 1}) is None
    assert "'x' is not of type" in problem_of(tools, "nullable", {"nullable": "x"})


@given(st.dictionaries(st.text(), st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists)))
def test_any_arguments_give_a_problem_or_fit(arguments):
    fits = (
        isinstance(arguments.get("query"), str)
        and set(arguments) <= {"query", "limit", "exact"}
        and (isinstance(arguments.get("exact"), bool | None))
        and ("limit" not in arguments or (type(arguments["limit"]) is float and arguments["limit"].is_integer()))
    )
    assert (problem_of(TOOLS, "search", arguments) is None) == fits


def no_hint(a) -> int:
    """Return it.

    Args:
        a: a number
    """
    return a


def no_docstring(a: int) -> int:
    return a


def no_description(a: int) -> int:
    """Return it."""
    return a


def stars(*values: int) -> int:
    """Add numbers.

    Args:
        values: the numbers
    """
    return sum(values)


def keywords(**values: int) -> int:
    """Add numbers.

    Args:
        values: the numbers
    """
    return sum(values.values())


def by_place(a: int, /) -> int:
    """Return it.

    Args:
        a: a number
    """
    return a


def own_class(a: object) -> int:
    """Return it.

    Args:
        a: something
    """
    return 1


def unknown_name(a: "Nowhere") -> int:  # noqa: F821
    """Return it.

    Args:
        a: something
    """
    return 1


def sound(a: torch.Tensor) -> int:
    """Return it.

    Args:
        a: something that a model cannot write
    """
    return 1


@pytest.mark.parametrize(
    ("function", "word"),
    [
        (no_hint, "'a' has no type hint"),
        (no_docstring, "no docstring"),
        (no_description, "'a'"),
        (stars, "'values' cannot be named"),
        (keywords, "'values' cannot be named"),
        (by_place, "'a' cannot be named"),
        (own_class, "object"),
        (unknown_name, "Nowhere"),
        (sound, "'audio'"),
    ],
)
def test_what_cannot_be_a_tool_is_one_line_with_its_place(function, word):
    with pytest.raises(UserError) as error:
        tools_of([search, function])
    line = str(error.value)
    assert "\n" not in line
    assert f"the tool {function.__name__} ({__file__}, line {function.__code__.co_firstlineno}): " in line
    assert word in line


@pytest.mark.parametrize("thing", [lambda a: a, Unit, "search", 3])
def test_what_is_not_a_function_with_a_name(thing):
    with pytest.raises(UserError, match="cannot be a tool: it is not a function with a name"):
        tools_of([thing])


def test_a_function_of_c_without_hints():
    with pytest.raises(UserError, match="the tool hypot"):
        tools_of([math.hypot])


@pytest.mark.parametrize("name", RESERVED)
def test_a_reserved_name(name):
    function = tools_of([search])["search"].function
    renamed = type(function)(function.__code__, {}, name)
    with pytest.raises(UserError, match=f"the tool {name} .*reserved"):
        tools_of([renamed])


def test_two_tools_of_one_name():
    with pytest.raises(UserError, match="two tools are called 'search'") as error:
        tools_of([search, convert, search])
    assert str(error.value).count(__file__) == 2
