"""Turns of an episode, from the chat messages after its first prompt and from which of its tokens were sampled."""

import ast
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from cavesson.importers.fields import content_text, is_messages, message_text, to_json
from cavesson.importers.packing import is_text

Turn = dict[str, Any]
"""Columns of ``TURN_COLUMNS`` that are known, without those that say where the turn belongs."""


class Span(NamedTuple):
    """Where the tokens of a message are."""

    first: int
    size: int


def turns_of(messages: Any, spans: Sequence[Span | None] | None = None) -> list[Turn]:
    """Return the turns of chat messages, in their order; nothing for what is not a list of messages.

    A tool's message gets the name and the arguments of the call that it answers, found by the identifier of the call,
    or as the first one of this name that was not answered yet.

    Args:
        messages: Those after the first prompt.
        spans: Where the tokens of each message are; None = unknown.
    """
    if not is_messages(messages):
        return []
    found, waiting = [], list[Mapping[str, Any]]()
    for message, span in zip(messages, spans or [None] * len(messages), strict=True):
        role = str(message.get("role") or "")
        turn: Turn = {"role": role}
        if role == "tool":
            turn |= _result(message, _answered(message, waiting))
        else:
            waiting += _calls(message) if role == "assistant" else []
            turn["text"] = message_text(message).partition("\n")[2]
        if span is not None:
            turn |= {"first_token": span.first, "tokens": span.size}
        found.append({name: _encodable(value) for name, value in turn.items()})
    return found


def spans_of(messages: Any, sampled: Sequence[bool]) -> list[Span | None]:
    """Return where the tokens of each message are, if that follows from which tokens were sampled.

    Every message of the assistant is one run of sampled tokens, and what comes between is the run of the others. Of
    several messages in one run, the places are unknown; if runs and messages do not match, those of all are.

    Args:
        messages: Those after the first prompt.
        sampled: [T] whether the policy sampled each token after the first prompt.
    """
    blocks = _blocks(messages)
    runs = [(is_sampled, sum(1 for _ in run)) for is_sampled, run in groupby(sampled)]
    if [is_sampled for is_sampled, _ in runs] != [is_assistant for is_assistant, _ in blocks]:
        return [None] * len(messages)
    spans: list[Span | None] = []
    first = 0
    for (_, count), (_, block) in zip(runs, blocks, strict=True):
        spans += [Span(first, count)] if len(block) == 1 else [None] * len(block)
        first += count
    return spans


def sources_of(messages: Any, sampled: Sequence[bool]) -> list[str | None]:
    """Return [T] the source of each token; None where only its not being sampled is known.

    What the chat template adds around a result or a reply counts as a part of it: the log does not tell them apart.
    """
    blocks = _blocks(messages)
    runs = [(is_sampled, sum(1 for _ in run)) for is_sampled, run in groupby(sampled)]
    matches = [is_sampled for is_sampled, _ in runs] == [is_assistant for is_assistant, _ in blocks]
    sources: list[str | None] = []
    for place, (is_sampled, count) in enumerate(runs):
        roles = {message.get("role") for message in blocks[place][1]} if matches else set()
        sources += [source_of(roles.pop() if len(roles) == 1 else None, is_sampled)] * count
    return sources


def source_of(role: Any, is_sampled: bool) -> str | None:
    """Return the source of a token in a message of some role."""
    return "sampled" if is_sampled else role if role in ("tool", "user") else None


def _blocks(messages: Any) -> list[tuple[bool, list[Mapping[str, Any]]]]:
    """Return every message of the assistant alone, and the messages between them together."""
    if not is_messages(messages):
        return []
    found: list[tuple[bool, list[Mapping[str, Any]]]] = []
    for message in messages:
        is_assistant = message.get("role") == "assistant"
        if found and not is_assistant and not found[-1][0]:
            found[-1][1].append(message)
        else:
            found.append((is_assistant, [message]))
    return found


def _calls(message: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []


def _answered(message: Mapping[str, Any], waiting: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the call that a tool's message answers, and remove it from those that wait for an answer."""
    key, name = message.get("tool_call_id"), message.get("name")
    chosen = [call for call in waiting if key is not None and call.get("id") == key]
    chosen = chosen or [call for call in waiting if name is None or _function(call).get("name") == name]
    if not chosen:
        return {}
    waiting.remove(chosen[0])
    return _function(chosen[0])


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function", call)
    return function if isinstance(function, Mapping) else {}


def _result(message: Mapping[str, Any], call: Mapping[str, Any]) -> Turn:
    arguments, text = call.get("arguments"), content_text(message.get("content"))
    name = message.get("name") or call.get("name")
    return {
        "name": None if name is None else str(name),
        "arguments": arguments if arguments is None or isinstance(arguments, str) else to_json(arguments),
        "text": text,
        "error": _error_in(text),
    }


def _error_in(text: str) -> str | None:
    """Return the error of a result that is ``{"error": …}``, as JSON or as Python writes it, and nothing else."""
    if not text.lstrip().startswith("{") or "error" not in text:
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(found, dict) and found.keys() == {"error"} and found["error"] is not None:
            return str(found["error"])
    return None


def _encodable(value: Any) -> Any:
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) and not is_text(value) else value
