"""The assistant's turns of a conversation as sequences to learn, and the part of each that the model writes.

Each answer is learned from the rendering of the conversation up to and including it: this is what the model sees when
it gives the answer. Many templates render a longer conversation by continuing a shorter one, so one sequence has all
answers. Others rewrite earlier turns: they remove the reasoning before the last question (Qwen3, DeepSeek-R1), or end
an answer with another token when turns follow (gpt-oss). Answers that are rewritten are learned in their own sequences.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from cavesson.data.chat import Chat, Tools, Unrenderable, common_prefix
from cavesson.data.readings import CALLS, REASONING
from cavesson.data.special_tokens import Span, Written
from cavesson.data.types import Turn

REWRITES = "the chat template rewrites earlier turns: answers that it rewrites are learned in their own sequences"
OPENS = "the chat template asks for an answer in another way than it writes it: sampling sees a different prompt"
OMITS = "the chat template omits a part of an answer, which is not learned"
EMPTY = "an answer is empty: only its end is learned"
ENDLESS = "the chat template does not mark the end of an answer with {% generation %}: stopping is not learned"
PARTLY = "the chat template marks only a part of an answer with {% generation %}: the rest is not learned"
_OTHER = "\N{REPLACEMENT CHARACTER}"
"""An answer that has nothing in common with others."""
_TAG_OR_BREAK = re.compile(r"</?\w+>|\n")


class Rendered(NamedTuple):
    """A rendered conversation that ends with an answer, and the spans in it that are learned."""

    text: Written
    spans: tuple[Span, ...]

    @property
    def is_ended(self) -> bool:
        """Whether a special token ends the answer."""
        return any(last == self.spans[-1][1] for _, last in self.text.control)


class _Start(NamedTuple):
    """Where an answer begins, and remarks about it."""

    at: int
    remarks: list[str]


class Answers(NamedTuple):
    """The sequences of a conversation."""

    sequences: list[Rendered]
    remarks: list[str]


def answers(chat: Chat, turns: Sequence[Turn], first: int = 0, tools: Tools = ()) -> Answers:
    """Return the sequences in which the assistant's turns from turn number `first` on are learned.

    If the template has `{% generation %}`, its marks give the spans, and remarks say what they leave out. Otherwise a
    span begins where an answer would begin, and ends with the end token of the turn, or else with its last special
    token: a model that stops there does not generate what follows, such as the line break of ChatML.

    Raises:
        Unrenderable: the template cannot render these turns, or writes nothing of an answer.
        UserError: there is no template.
    """
    sequences: list[Rendered] = []
    remarks: dict[str, None] = {}
    learned = [n for n, turn in enumerate(turns) if n >= first and turn.role == "assistant" and turn.learn]
    for number in learned:
        own, found = _own(chat, turns[: number + 1], tools)
        own = own if own.is_ended else _ended_by_next(chat, own, turns, number, tools)
        remarks |= dict.fromkeys(found)
        if sequences and (continued := _continued(chat, sequences[-1], own.text)):
            sequences[-1] = continued._replace(spans=(*continued.spans, *own.spans))
        else:
            sequences.append(own)
    if len(sequences) > 1:
        remarks[REWRITES] = None
    if learned and learned[-1] < len(turns) - 1:
        sequences[-1] = _continued(chat, sequences[-1], chat.render(turns, tools)) or sequences[-1]
    return Answers(sequences, list(remarks))


def _own(chat: Chat, turns: Sequence[Turn], tools: Tools) -> tuple[Rendered, list[str]]:
    """Return the rendering of a conversation that ends with an answer, with the spans of that answer, and remarks."""
    if len(turns) == 1:
        raise Unrenderable("the assistant speaks first; there must be a turn before it")
    if chat.template(tools).marks_answers:
        text, spans = chat.answer(turns, tools)
        if not spans:
            raise Unrenderable("the chat template marks no part of an answer with {% generation %}")
        start, remarks = _start(chat, turns, tools, text)
        if not chat.template(tools).opens_answers:  # then the header of the turn is not part of what the model writes
            start = _first_difference(chat, turns, tools, text)
        remarks = [*remarks, *_unmarked(chat, text, spans, start)]
        return Rendered(text, tuple(spans)), _omissions(chat, turns, tools, text) + remarks
    text = chat.render(turns, tools)
    start, remarks = _start(chat, turns, tools, text)
    return Rendered(text, ((start, _end(chat, text, start)),)), _omissions(chat, turns, tools, text) + remarks


def _ended_by_next(chat: Chat, own: Rendered, turns: Sequence[Turn], number: int, tools: Tools) -> Rendered:
    """Return a rendering whose answer ends with the special token that begins the next turn, if there is one.

    GLM's template writes no other end: the model stops when it writes `<|user|>`, or `<|observation|>` after a call.
    """
    if chat.template(tools).marks_answers:
        return own
    before = [_without_reasoning(turn) for turn in turns[: number + 1]]  # which templates remove when turns follow
    is_call = any(name in before[-1].others for name in CALLS)
    after = turns[number + 1 : number + 2] or [Turn("tool" if is_call else "user", "?")]
    with suppress(Unrenderable):
        text, longer = chat.render(before, tools), chat.render([*before, *after], tools)
        token = next((longer[slice(*span)] for span in longer.control if span[0] == len(text)), None)
        if token is not None and longer.startswith(text):
            *others, (start, end) = own.spans
            last = end + len(token)
            return Rendered(Written(own.text[:end] + token, (*own.text.control, (end, last))), (*others, (start, last)))
    return own


def _without_reasoning(turn: Turn) -> Turn:
    return replace(turn, others={name: value for name, value in turn.others.items() if name not in REASONING})


def _start(chat: Chat, turns: Sequence[Turn], tools: Tools, text: Written) -> _Start:
    """Return where sampling would begin the last answer of a rendered conversation."""
    asked = chat.render(turns[:-1], tools, answer=True)
    if text.startswith(asked):
        return _Start(len(asked), [])
    start = _first_difference(chat, turns, tools, text)
    # Special tokens between the header and what differs are the answer's, such as those of gpt-oss' channels.
    header = asked.removeprefix(chat.render(turns[:-1], tools))
    after = text.rfind(header, 0, start) + len(header) if header and header in text[:start] else start
    between = [span for span in text.control if after <= span[0] < start]
    return _Start(after if sum(last - first for first, last in between) == start - after else start, [OPENS])


def _first_difference(chat: Chat, turns: Sequence[Turn], tools: Tools, text: Written) -> int:
    """Return where a conversation with another last answer begins to differ."""
    return common_prefix(text, chat.render([*turns[:-1], Turn("assistant", _OTHER)], tools))


def _end(chat: Chat, text: Written, start: int) -> int:
    """Return where an answer ends that begins at `start` and is the last of a rendered conversation.

    It ends with its end token, or else with the last special token, if only whitespace follows.
    """
    end = at = len(text.rstrip())
    for first, last in reversed(text.control):
        if first < start or text[last:at].strip():
            break
        # Some templates write the header of another answer after the last one, whether or not one is asked for.
        if text[first:last] == chat.tokenizer.eos_token:
            end = last
        at = first
    return end if _ends_at(chat, text, end) else len(text)


def _unmarked(chat: Chat, text: Written, spans: Sequence[Span], start: int) -> list[str]:
    """Return remarks about what `{% generation %}` does not mark of an answer that begins at `start`."""
    marked = spans[-1][1]
    has_end = marked >= _end(chat, text, start) or _ends_at(chat, text, len(text[:marked].rstrip()))
    edges = [start, *(edge for span in spans for edge in span)]
    left_out = [text[first:last] for first, last in zip(edges[::2], edges[1::2], strict=False)]
    left_out += _beside(text.control, text, marked)  # a missing end is said already, and the conversation's may follow
    return [*[PARTLY] * any(part.strip() for part in left_out), *[ENDLESS] * (not has_end)]


def _beside(control: Sequence[Span], text: str, start: int) -> list[str]:
    """Return what a text says beside control tokens from `start` on."""
    edges = [start, *(edge for span in control if span[0] >= start for edge in span), len(text)]
    return [text[first:last] for first, last in zip(edges[::2], edges[1::2], strict=True)]


def _ends_at(chat: Chat, text: Written, end: int) -> bool:
    """Return whether a special or added token ends there."""
    return any(last == end for _, last in text.control) or text[:end].endswith(chat.ordinary)


def _continued(chat: Chat, earlier: Rendered, text: Written) -> Rendered | None:
    """Return an earlier sequence with the text that continues it, or None if the text does not continue it."""
    end = earlier.spans[-1][1]
    if text.startswith(earlier.text) or (earlier.is_ended and text.startswith(earlier.text[:end])):
        return Rendered(text, earlier.spans)
    # Some templates, such as Phi-3's, write the end token only after the last turn, whose own end token comes before.
    closed = earlier.text.removesuffix(chat.tokenizer.eos_token or "")
    end = len(closed.rstrip())
    if not text.startswith(closed) or not _ends_at(chat, earlier.text, end):
        return None
    *others, (start, _) = earlier.spans
    return Rendered(text, (*others, (start, end)))


def _omissions(chat: Chat, turns: Sequence[Turn], tools: Tools, text: str) -> list[str]:
    """Return remarks about what the template omits of an answer.

    Raises:
        Unrenderable: the answer has no content, and the template writes none of its other fields.
    """
    *before, turn = turns
    if turn.text.strip():
        said = [part.strip() for part in _TAG_OR_BREAK.split(turn.text)]
        return [] if all(part in text for part in said) else [OMITS]
    if text != chat.render([*before, Turn("assistant", "")], tools):
        return []
    if turn.others:
        names = " and ".join(map(repr, turn.others))
        raise Unrenderable(f"the chat template does not write {names} of an answer that has no content")
    return [EMPTY]
