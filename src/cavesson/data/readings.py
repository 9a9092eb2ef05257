"""The forms in which chat templates expect a message: templates differ in how they write calls, parts and null.

Most templates (Qwen, Llama 3, Hermes, gpt-oss, Mistral) write the arguments of a call with `tojson`, so they need an
object; DeepSeek's appends them to a text, so it needs JSON text. Some templates write parts one by one, others need one
text. Some test whether the content is null, others would write the word "None".
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from cavesson.data.types import texts_in
from cavesson.text.reach import parsed

Message = dict[str, Any]
CALLS = ("tool_calls", "function_call")
"""Fields of a message that hold calls of tools."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message that hold reasoning."""


class Reading(NamedTuple):
    """Messages in one of the forms."""

    messages: list[Message]
    literals: tuple[str, ...]
    """what Python would write of their objects; a text that contains one comes from a template for another form"""

    def misfit(self, text: str, write: Callable[[list[Message]], str]) -> str | None:
        """Return why a template, which wrote this text of the messages, needs another form, or None if it does not.

        `write` writes other messages.
        """
        contents = [message["content"] for message in self.messages]
        if any(literal in text for literal in self.literals):
            return "it writes objects where there should be text"
        if None in contents and "None" in text:
            other = write([_with_empty(message) for message in self.messages])
            # With an empty content some leave out the line break before it too.
            if text != other and text.replace("None", "").split() == other.replace("None", "").split():
                return "it writes null as a word"
        foreign = [part for content in contents if isinstance(content, list) for part in content if not _is_text(part)]
        if foreign and text == write([_with_texts_only(message) for message in self.messages]):
            return f"it does not write a part of type {foreign[0].get('type')!r}"
        return None


def readings(messages: Sequence[Mapping[str, Any]]) -> Iterator[Reading]:
    """Yield the messages in every form, the preferred one first: objects as objects, parts as parts, null as null."""
    whole = [_with_calls(_with_reasoning(dict(message))) for message in messages]
    forms: list[tuple[Callable[[Message], Message], ...]] = []
    # The last one varies first: a template may write a call only where the content is null.
    if any(message["content"] is None for message in whole):
        forms.append((dict, _with_empty))
    if any(_is_text_in_parts(message["content"]) for message in whole):
        forms.append((dict, _with_text))
    if any(name in message for message in whole for name in CALLS):
        forms.append((_with_objects, _with_json))
    for chosen in product(*forms):
        made = whole
        for form in chosen:
            made = [form(message) for message in made]
        yield Reading(made, tuple(_literals(made)))


def _is_text(part: Mapping[str, Any]) -> bool:
    return isinstance(part.get("text"), str)


def _is_text_in_parts(content: Any) -> bool:
    return isinstance(content, list) and all(map(_is_text, content))


def _with_reasoning(message: Message) -> Message:
    """Give the reasoning the names that templates read, as newer versions of transformers do."""
    thought = next((message[name] for name in REASONING if name in message), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


def _with_calls(message: Message) -> Message:
    """Parse calls that are JSON texts, and remove their fields that are null, but none of the arguments."""
    return message | {name: _sparse(parsed(message[name])) for name in CALLS if name in message}


def _sparse(value: Any) -> Any:
    if isinstance(value, dict):
        present = {name: one for name, one in value.items() if one is not None}
        return {name: one if name == "arguments" else _sparse(one) for name, one in present.items()}
    return [_sparse(one) for one in value] if isinstance(value, list) else value


def _with_objects(message: Message) -> Message:
    def change(arguments: Any) -> Any:
        return found if isinstance(found := parsed(arguments), dict) else arguments

    return _with_arguments(message, change)


def _with_json(message: Message) -> Message:
    def change(arguments: Any) -> Any:
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)

    return _with_arguments(message, change)


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: change(one) if name == "arguments" else changed(one) for name, one in value.items()}
        return [changed(one) for one in value] if isinstance(value, list) else value

    return message | {name: changed(message[name]) for name in CALLS if name in message}


def _with_text(message: Message) -> Message:
    content = message["content"]
    return message | {"content": "".join(part["text"] for part in content)} if _is_text_in_parts(content) else message


def _with_empty(message: Message) -> Message:
    return message | {"content": ""} if message["content"] is None else message


def _with_texts_only(message: Message) -> Message:
    content = message["content"]
    return message | {"content": [*filter(_is_text, content)]} if isinstance(content, list) else message


def _literals(messages: Sequence[Message]) -> Iterator[str]:
    said = "\0".join(texts_in(messages))
    objects = [message["content"] for message in messages]
    for message in messages:
        _with_arguments(message, objects.append)  # for the sake of the arguments
    texts = ((str(one), json.dumps(one, ensure_ascii=False)) for one in objects if isinstance(one, dict | list) and one)
    yield from (text for text, as_json in texts if text not in said and text != as_json)
