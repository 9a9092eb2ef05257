"""Calls of tools that a model writes as JSON, with a mark before them or as its whole turn."""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from cavesson.rollout.types import Call

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")
# Without a mark only JSON that has a name and arguments is a call; any other JSON is an answer.
_UNMARKED = re.compile(
    r'[\s;]*(?:<\|python_tag\|>\s*)?(?=(?:\[\s*)?\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?'
    r'"name"\s*:\s*"(?:[^"\\]|\\.)*"\s*,\s*"(?:parameters|arguments)"\s*:)'
)
_NAME = re.compile(r'"(?:tool_)?name"\s*:\s*"(?P<name>\w+)"')
# Mistral's newer form has the name before the JSON, which holds only the arguments.
_NAME_FIRST = re.compile(r"(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>\w+))?\[ARGS\]\s*")


class Parsed(NamedTuple):
    """A turn of the assistant: what it says besides calls, and the calls."""

    content: str
    """with the text of calls that cannot be parsed, because nothing else keeps it"""
    calls: list[Call]


class Read(NamedTuple):
    """The calls that JSON describes."""

    calls: list[Call]
    end: int
    """the position after them"""


class JsonCalls(NamedTuple):
    """A format in which calls are JSON objects, or lists of them, between two marks."""

    opening: str
    """before each; without one a turn with calls has nothing before them"""
    closing: str
    """after each, may be missing at the end of the turn"""

    def parse(self, text: str, start: int = 0) -> Parsed:
        """Return what a turn says and calls; what comes before position `start` has no calls."""
        calls: list[Call] = []
        said, at = [text[:start]], start
        while (mark := self._mark(text, at)) is not None:
            read = self._read(text, mark.end())
            said.append(text[at : mark.start()])
            if any(call.error for call in read.calls):
                said.append(text[mark.start() : read.end])
            calls += read.calls
            at = read.end
        return Parsed("".join([*said, text[at:]]).strip() if calls else text, calls)

    def _mark(self, text: str, at: int) -> re.Match[str] | None:
        if self.opening:
            return re.compile(re.escape(self.opening) + r"\s*").search(text, at)
        return _UNMARKED.match(text, at)

    def _read(self, text: str, at: int) -> Read:
        """Return the calls that follow a mark."""
        named = _NAME_FIRST.match(text, at)
        try:
            read = read_json(text, named.end() if named else at, named and named.groupdict())
            return read._replace(end=self._close(text, read.end))
        except (ValueError, RecursionError) as error:  # the latter if it is nested too deeply
            end = self._end_of_broken(text, at)
            name = named or _NAME.search(text, at, end)
            return Read([Call(name["name"] if name else "", {}, f"the call is not valid JSON: {error}")], end)

    def _close(self, text: str, end: int) -> int:
        """Return the position after the closing mark of JSON that ends here; raise ValueError if text comes before the
        mark.
        """
        found = _SPACE.match(text, end)
        after = found.end() if found else end
        if not self.closing or after == len(text):
            return end
        if not text.startswith(self.closing, after):
            raise ValueError(f"there is text between the JSON and {self.closing}")
        return after + len(self.closing)

    def _end_of_broken(self, text: str, at: int) -> int:
        """Return where a call ends that is not JSON: after the closing mark, or where the next call begins."""
        after = self._mark(text, at) if self.opening else None
        limit = after.start() if after else len(text)
        closed = text.find(self.closing, at, limit) if self.closing else -1
        return limit if closed < 0 else closed + len(self.closing)


def read_json(text: str, at: int, named: Mapping[str, Any] | None = None) -> Read:
    """Return the calls that the JSON at a position describes: an object, or a list of them.

    `named` has the name and identifier of the call if the JSON is its arguments only.

    Raises:
        ValueError: it is not JSON.
        RecursionError: it is nested too deeply.
    """
    value, end = _DECODER.raw_decode(text, at)
    if named is not None:
        value = {**named, "arguments": value}
    return Read([call_of(one) for one in (value if isinstance(value, list) else [value])], end)


def call_of(value: Any) -> Call:
    """Return the call that a JSON value describes, under any of the names that formats use for its parts."""
    function = value.get("function", value) if isinstance(value, Mapping) else value
    if not isinstance(function, Mapping):
        return Call("", {}, "a call must be a JSON object with a name and arguments")
    if not _is_writable(value):
        return Call("", {}, "the call contains NaN, Infinity or half of a surrogate pair")
    name = function.get("name", function.get("tool_name"))
    if not isinstance(name, str) or not name:
        return Call("", {}, "the call has no name")
    identifier = value.get("id", value.get("tool_call_id"))
    identifier = None if identifier is None else str(identifier)
    arguments = function.get("arguments", function.get("parameters"))
    if not isinstance(arguments, Mapping | None):
        return Call(name, {}, "the arguments are not a JSON object", identifier)
    return Call(name, dict(arguments or {}), id=identifier)


def _is_writable(value: Any) -> bool:
    """Return whether a value of Python's JSON decoder is JSON by its standard, in characters that Unicode has."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    return True
