"""What a chat template adds between two turns of the assistant, as tokens.

What a model has sampled is never tokenized again. The template writes a small conversation in which an answer is
followed by the messages to add, and what comes after the answer follows the sampled tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from typing import Any, Literal, NamedTuple

from cavesson.data.chat import Chat, Tools, Unrenderable
from cavesson.data.special_tokens import Span, Written
from cavesson.data.types import Turn
from cavesson.errors import UserError

Source = Literal["template", "tool", "user"]

REWRITES = "the chat template rewrites earlier turns of the assistant; in episodes they stay as they were sampled"

_QUESTION, _ANSWER, _REPLY, _REASONING = "question-8c1f", "answer-8c1f", "reply-8c1f", "reasoning-8c1f"
"""Texts of the small conversation that no template, tool or model writes."""
_IDENTIFIER = "call{:05d}"  # Mistral's templates refuse identifiers that do not have nine letters and digits


class Suffix(NamedTuple):
    """Tokens between two turns of the assistant."""

    ids: list[int]
    sources: list[Source]
    """who wrote each of them: the template, a tool or the user"""
    owners: list[int | None]
    """the message that each of them is a part of, by its place among the messages; None for the template's"""


class Slot(NamedTuple):
    """A message without its content."""

    role: Literal["tool", "user"]
    name: str = ""
    """of the tool"""
    identifier: str | None = None
    """of the call that it answers"""

    def turn(self, content: str) -> Turn:
        """Return the message with this content."""
        others = {"name": self.name, "tool_call_id": self.identifier} if self.role == "tool" else {}
        return Turn(self.role, content, others)

    def call(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the call that it answers."""
        function = {"name": self.name, "arguments": dict(arguments)}
        return {"id": self.identifier, "type": "function", "function": function}


class _Shape(NamedTuple):
    """How a template writes certain messages after an answer."""

    tools: Tools
    before: tuple[Turn, Turn]
    """a question and the answer"""
    slots: tuple[Slot, ...]
    closing: str
    """how the template finishes the answer after its last words, such as the rest of a call"""
    end: str
    """the token that ends the answer's turn when messages follow, with the whitespace before it; may be missing"""
    pieces: tuple[str, ...]
    """the texts before, between and after the contents of the messages"""

    def after_answer(self, whole: str) -> int:
        """Return where the answer ends in a rendered conversation."""
        return _after(whole, _ANSWER) + len(self.closing)


@dataclass(frozen=True)
class Continuation:
    """Writes the messages that follow a sampled turn, and the beginning of the next one."""

    chat: Chat
    shape: Callable[[tuple[Slot, ...]], _Shape]
    note: str | None
    """what is said when a run starts; None if the template continues every conversation as it was"""

    @classmethod
    def of(cls, chat: Chat, tools: Tools = (), *, replies: bool = False) -> "Continuation":
        """Check that the template and its tokenizer can continue conversations.

        What `tools` return follows a turn that calls them; with `replies`, the user replies to turns without a call.

        Raises:
            UserError: they cannot.
        """
        if not chat.tokenizer.is_fast:
            raise UserError("episodes of several turns need a fast tokenizer (one with a tokenizer.json)")
        chat = replace(chat, special_tokens="text")  # whatever tools and users say, it has no control tokens
        continuation = cls(chat, lru_cache(maxsize=64)(partial(_shape, chat, tools)), None)
        tool = Slot("tool", "probe")
        expected = [*[(tool,), (tool, tool)] * bool(tools), *[(Slot("user"),)] * replies]
        shapes = [continuation.shape(slots) for slots in expected]
        for shape in shapes:
            _check_tokens(chat, shape)
        is_rewritten = any(shape.tools != tools or _is_rewritten(chat, shape) for shape in shapes)
        return replace(continuation, note=REWRITES if is_rewritten else None)

    def suffix(self, messages: Sequence[Mapping[str, Any]], *, end: int | None) -> Suffix:
        """Return the tokens that follow a sampled turn, up to where the next one begins.

        `messages` are what the tools return (`role`, `content`, `name`, and `tool_call_id` if the call had one), or a
        reply of the user. `end` is the end token that the policy sampled last; None if the turn was cut, so that the
        template ends it.
        """
        shape = self.shape(tuple(_slot(message) for message in messages))
        contents = [str(message["content"]) for message in messages]
        added = [slot.turn(content) for slot, content in zip(shape.slots, contents, strict=True)]
        whole = self.chat.render([*shape.before, *added], shape.tools, answer=True)
        start = shape.after_answer(whole)
        spans = _contents(whole, start, shape.pieces, contents)
        first = start if end is None else self._after_end(whole, start, shape.end, end)
        ids, places = _tokens(self.chat, whole, first)
        owners = [_owner(place, spans) for place in places]
        sources: list[Source] = ["template" if one is None else shape.slots[one].role for one in owners]
        return Suffix(ids, sources, owners)

    def _after_end(self, whole: Written, start: int, own: str, sampled: int) -> int:
        """Return where a turn that the policy has ended itself is continued.

        The policy may have sampled the first token of what follows (GLM ends a turn by the header of the next one), or
        an end token that the template does not write there, which replaces the template's.
        """
        name, at = str(self.chat.tokenizer.decode([sampled])), start
        for first, last in whole.control:
            if first >= start:
                if whole[at:first].strip():
                    break
                if whole[first:last] == name:
                    return last
                at = last
        return start + len(own)


def _slot(message: Mapping[str, Any]) -> Slot:
    if message["role"] != "tool":
        return Slot("user")
    return Slot("tool", str(message.get("name") or ""), message.get("tool_call_id"))


def _shape(chat: Chat, tools: Tools, slots: tuple[Slot, ...]) -> _Shape:
    """Return how the template writes messages after an answer; raise UserError if it cannot, or leaves out what they
    say.
    """
    problem = ""
    for offered, (answer, named) in product([tools, *[()] * bool(tools)], _answers(slots)):
        try:
            return _written(chat, offered, answer, named)
        except Unrenderable as error:
            problem = str(error)  # the last one is about the plainest answer
    said = "what a tool returns" if slots[0].role == "tool" else "a reply of the user to an answer"
    raise UserError(f"the chat template cannot write {said}: {problem}; set data.template to one that can")


def _answers(slots: tuple[Slot, ...]) -> Iterator[tuple[Turn, tuple[Slot, ...]]]:
    """Yield answers that such messages can follow, the most usual one first, with the messages' identifiers."""
    own = tuple(
        slot._replace(identifier=slot.identifier or _IDENTIFIER.format(number)) for number, slot in enumerate(slots)
    )
    ours = tuple(slot._replace(identifier=_IDENTIFIER.format(number)) for number, slot in enumerate(slots))
    if slots[0].role == "tool":
        for named in (own, ours):
            # Some templates take a single call.
            for count in dict.fromkeys((0, len(slots) - 1)):
                calls = [*(slot.call({}) for slot in named[count:-1]), named[-1].call({"text": _ANSWER})]
                yield Turn("assistant", None, {"tool_calls": calls}), named
    yield Turn("assistant", _ANSWER), own


def _written(chat: Chat, tools: Tools, answer: Turn, slots: tuple[Slot, ...]) -> _Shape:
    """Return how the template writes messages after this answer; raise Unrenderable if it leaves them out."""
    before = (Turn("user", _QUESTION), answer)
    asked = chat.render(before[:1], tools, answer=True)
    alone = chat.render(before, tools)
    whole = chat.render([*before, *(slot.turn(_REPLY) for slot in slots)], tools, answer=True)
    if _ANSWER not in alone or _ANSWER not in whole:
        raise Unrenderable("it does not write the answer before")
    if not whole.startswith(asked[: _after(asked, _QUESTION)]):
        raise Unrenderable("it rewrites the question")
    closing = _closing(chat, tools, answer, alone)
    start = _after(whole, _ANSWER) + len(closing)
    pieces = whole[start:].split(_REPLY)
    if not whole[:start].endswith(closing) or len(pieces) != len(slots) + 1:
        raise Unrenderable("it leaves out messages" if len(pieces) <= len(slots) else "it rewrites the answer")
    ends_alone = _end(alone, _after(alone, _ANSWER) + len(closing))
    end = _end(whole, start) if ends_alone else ""
    return _Shape(tools, before, slots, closing, end, tuple(pieces))


def _closing(chat: Chat, tools: Tools, answer: Turn, alone: Written) -> str:
    """Return what finishes an answer after its last words, without the end of the turn."""
    if answer.content is not None:
        return ""
    rest = alone[_after(alone, _ANSWER) :].rstrip()
    plain = chat.render([Turn("user", _QUESTION), Turn("assistant", _ANSWER)], tools)
    turn_end = plain[_after(plain, _ANSWER) :].strip()
    if rest.endswith(turn_end):
        return rest.removesuffix(turn_end)
    # A turn with calls ends in another way: with the tokenizer's end token, or the last token of all.
    offset = len(alone) - len(alone[_after(alone, _ANSWER) :])
    ends = [first - offset for first, _ in alone.control if first >= offset]
    eos = rest.find(chat.tokenizer.eos_token or "\0")
    return rest[: eos if eos >= 0 else ends[-1]] if ends else rest


def _end(whole: Written, start: int) -> str:
    """Return the special token at a position with the whitespace before it, or "" if there is none."""
    spans = (span for span in whole.control if span[0] >= start)
    first, last = next(spans, (start, start))
    return "" if whole[start:first].strip() else whole[start:last]


def _is_rewritten(chat: Chat, shape: _Shape) -> bool:
    """Return whether an answer is written in another way when messages follow than it was asked for and written."""
    question, answer = shape.before
    asked = chat.render([question], shape.tools, answer=True)
    for reasoning in ({}, {"reasoning_content": _REASONING}):
        said = [question, replace(answer, others={**answer.others, **reasoning})]
        alone = chat.render(said, shape.tools)
        end = shape.after_answer(alone)
        kept = alone[: end + len(_end(alone, end))] if shape.end else alone[:end]
        whole = chat.render([*said, *(slot.turn(_REPLY) for slot in shape.slots)], shape.tools, answer=True)
        if not (alone.startswith(asked) and whole.startswith(kept)):
            return True
    return False


def _check_tokens(chat: Chat, shape: _Shape) -> None:
    """Raise UserError if the tokenizer makes one token of the end of an answer and what follows it."""
    turns = [*shape.before, *(slot.turn(_REPLY) for slot in shape.slots)]
    whole = chat.render(turns, shape.tools, answer=True)
    start = shape.after_answer(whole)
    for first in (start, start + len(shape.end)):
        ids, _ = _tokens(chat, whole, first)
        complete, alone = (_encoded(chat, _cut(whole, 0, end))[0] for end in (len(whole), first))
        if complete != [*alone, *ids]:
            raise UserError(
                "the tokenizer makes one token of the end of an answer and what the chat template writes after it; "
                "set data.template to one that ends an answer with a special token"
            )


def _tokens(chat: Chat, whole: Written, first: int) -> tuple[list[int], list[Span]]:
    """Return the tokens of a text from a position on, and where they stand in it."""
    begin = _after(whole, _ANSWER) - len(_ANSWER)
    ids, offsets = _encoded(chat, _cut(whole, begin, len(whole)))
    places = [(start + begin, end + begin) for start, end in offsets]
    # Some tokenizers exclude a token's leading space from its offsets, although tokens leave no gaps.
    count = sum(end <= first for _, end in places)
    return ids[count:], places[count:]


def _encoded(chat: Chat, text: Written) -> tuple[list[int], list[Span]]:
    (encoded,) = chat.special.encode([text], add=False)
    return encoded.ids, encoded.offsets


def _cut(text: Written, start: int, end: int) -> Written:
    """Return a part of a text with the control tokens in it."""
    control = [(first - start, last - start) for first, last in text.control if first >= start and last <= end]
    return Written(text[start:end], control)


def _contents(whole: str, start: int, pieces: Sequence[str], contents: Sequence[str]) -> list[Span]:
    """Return where the contents of messages stand between the texts that a template writes around them."""
    spans, at = [], start + len(pieces[0])
    for content, piece in zip(contents, pieces[1:-1], strict=False):
        end = whole.find(piece, at + len(content.strip()))
        if end < 0:
            return []
        spans.append((at, end))
        at = end + len(piece)
    return [*spans, (at, len(whole) - len(pieces[-1]))]


def _owner(place: Span, spans: Sequence[Span]) -> int | None:
    """Return the message that a token is a part of, or None if there is none."""
    found = (number for number, (first, last) in enumerate(spans) if place[0] < last and place[1] > first)
    return next(found, None)


def _after(whole: str, said: str) -> int:
    return whole.index(said) + len(said)
