"""How a model writes calls of tools: as its tokenizer says, or as its chat template writes one."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from cavesson.data.chat import Chat, Tools, common_prefix
from cavesson.data.special_tokens import Written
from cavesson.data.types import Turn
from cavesson.errors import UserError, first_line
from cavesson.rollout.json_calls import JsonCalls, Parsed, call_of, read_json
from cavesson.rollout.types import Call

CallFormatName = Literal["hermes", "llama3", "mistral"]

NAMED: dict[CallFormatName, JsonCalls] = {
    "hermes": JsonCalls("<tool_call>", "</tool_call>"),
    "llama3": JsonCalls("", ""),
    "mistral": JsonCalls("[TOOL_CALLS]", ""),
}
_THINK, _THOUGHT = "<think>", "</think>"
_ASKED = Turn("user", "?")
_OTHER = "\N{REPLACEMENT CHARACTER}"
"""An answer that has nothing in common with a call."""
_CALLED = Call("probe", {"text": "probe", "list": [1, {"deep": None}]}, id="probe0000")
_QUOTED = 100


@dataclass(frozen=True)
class CallFormat:
    """Reads the calls in what a model has sampled."""

    tokenizer: PreTrainedTokenizerBase
    read: Callable[[str], Parsed]
    """reads the text of a turn, with its special tokens"""

    @classmethod
    def of(cls, chat: Chat, tools: Tools, name: CallFormatName | None = None) -> "CallFormat":
        """Return the format in which a model calls these tools, of which there must be one at least.

        A `name` decides. Otherwise it is the tokenizer's own response template (transformers 5.13 and later), or else
        the format in which the chat template writes a call.

        Raises:
            UserError: the chat template does not write tools, or how it writes calls cannot be determined.
        """
        tokenizer = chat.tokenizer
        header = chat.render([_ASKED], tools, answer=True)
        if header == chat.render([_ASKED], answer=True):
            raise UserError(
                "the chat template does not write tools, so the model would not know them; "
                "set data.template to one that does (chat: --template)"
            )
        if name is None and "tool_calls" in (getattr(tokenizer, "response_template", None) or {}).get("fields", {}):
            return cls(tokenizer, _ResponseTemplate(tokenizer, header, tools))
        form = NAMED[name] if name else _found(chat, tools)
        return cls(tokenizer, _Turn(form, header.rstrip().endswith(_THINK), tuple(chat.special.names)))

    def parse(self, said: str | Sequence[int]) -> Parsed:
        """Return what a sampled turn says besides calls, and its calls.

        The turn is given by its tokens, or by their text with its special tokens; the end token may be missing.
        """
        if not isinstance(said, str):
            said = str(self.tokenizer.decode(list(said), clean_up_tokenization_spaces=False))
        return self.read(said)


@dataclass(frozen=True)
class _Turn:
    """Reads turns in which calls are JSON. What is written while thinking is not a call."""

    form: JsonCalls
    thinks_first: bool
    """whether the chat template opens the reasoning, so that a turn begins in it"""
    ends: tuple[str, ...]
    """tokens that can end a turn, the longest first"""

    def __call__(self, text: str) -> Parsed:
        closed = text.rstrip()
        end = next((end for end in self.ends if closed.endswith(end)), None)
        text = text if end is None else closed.removesuffix(end)
        start = 0
        if self.thinks_first or text.lstrip().startswith(_THINK):
            thought = text.find(_THOUGHT)
            start = len(text) if thought < 0 else thought + len(_THOUGHT)
        return self.form.parse(text, start)


@dataclass(frozen=True)
class _ResponseTemplate:
    """Reads turns as the tokenizer's response template says; the content does not include the reasoning."""

    tokenizer: PreTrainedTokenizerBase
    header: str
    """what comes before a turn, which may open the reasoning"""
    tools: Tools

    def __call__(self, text: str) -> Parsed:
        parse: Any = self.tokenizer.parse_response
        # Only transformers 5.15 and later take the tools, by which texts are read as numbers where these are expected.
        tools = {"tools": list(self.tools)} if "tools" in inspect.signature(parse).parameters else {}
        try:
            message = parse(text, prefix=self.header, **tools)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            return Parsed(text, [Call("", {}, f"the response cannot be parsed: {first_line(error)}")])
        return Parsed(message.get("content") or "", [call_of(one) for one in message.get("tool_calls") or ()])


def _found(chat: Chat, tools: Tools) -> JsonCalls:
    """Return the format in which the chat template writes a call; raise UserError if it cannot be determined."""
    function = {"name": _CALLED.name, "arguments": _CALLED.arguments}
    call = {"id": _CALLED.id, "type": "function", "function": function}
    whole = chat.render([_ASKED, Turn("assistant", None, {"tool_calls": [call]})], tools)
    start = common_prefix(whole, chat.render([_ASKED, Turn("assistant", _OTHER)], tools))
    start = next((first for first, last in whole.control if first < start < last), start)
    for form in [*NAMED.values(), *_marks(whole, start)]:
        if [made[:3] for made in form.parse(whole, start).calls] == [_CALLED[:3]]:
            return form
    if _CALLED.name not in whole[start:]:
        problem = "the chat template does not write calls of tools"
    else:
        problem = f"calls of tools as the chat template writes them cannot be read, {whole[start:][:_QUOTED]!r}"
    raise UserError(
        f"{problem}; use a tokenizer that has a response template, or set environment.call_format to one of "
        f"{', '.join(NAMED)}"
    )


def _marks(whole: Written, start: int) -> list[JsonCalls]:
    """Return the marks around the JSON of the call that a template has written from position `start` on."""
    for at in (at for at in range(start, len(whole)) if whole[at] in "[{"):
        with suppress(ValueError):  # it is not JSON
            read = read_json(whole, at)
            if [made[:3] for made in read.calls] == [_CALLED[:3]]:
                return [JsonCalls(_before(whole, start, at), _after(whole, read.end))]
    return []


def _before(whole: Written, start: int, at: int) -> str:
    """Return the special tokens that come right before a position, or else the text since `start`."""
    begin = at
    for first, last in reversed(whole.control):
        if start <= first and last <= begin and not whole[last:begin].strip():
            begin = first
    return whole[start if begin == at else begin : at].strip()


def _after(whole: Written, end: int) -> str:
    """Return the text between a position and the next special token, or that token if there is none."""
    for first, last in whole.control:
        if first >= end:
            return whole[end:first].strip() or whole[first:last]
    return whole[end:].strip()
