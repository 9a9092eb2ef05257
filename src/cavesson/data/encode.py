"""Prompts and responses as token ids: what the sampler would see, and where the response begins."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from cavesson.data.answers import REWRITES, Answers, Rendered, answers
from cavesson.data.chat import Chat, Tools, Unrenderable
from cavesson.data.special_tokens import Around, Encoded, Span, Written
from cavesson.data.types import AnyRow, Content, Demonstration, Labelled, Pair, Prompt, Turn
from cavesson.data.unused import Unused
from cavesson.errors import UserError
from cavesson.text.visible import shortened

T = TypeVar("T")
_AT_ONCE = 1000  # larger batches would use too much memory for the tokenizer's output
LAST = "the chat template rewrites earlier turns: only the last answer of each response is compared"
_HALF_PAIR = re.compile("[\ud800-\udfff]")


class Asked(NamedTuple):
    """A prompt and its responses, if any; they are either all texts or all turns."""

    place: str
    """where it stands, for messages"""
    prompt: Content
    responses: tuple[Content, ...] = ()
    tools: Tools = ()


def _quote(text: str) -> str:
    return json.dumps(shortened(text, 100), ensure_ascii=False)


class PromptLine(NamedTuple):
    """A prompt as the sampler sees it."""

    text: Written
    ids: tuple[int, ...]
    problem: str | None = None
    """why the chat template cannot render the conversation, which then has neither text nor ids"""


class Line(NamedTuple):
    """A prompt with one of its responses."""

    ids: tuple[int, ...]
    learn: tuple[bool, ...]
    spans_prompt: bool
    """whether a token is part prompt, part response"""


class Learned(NamedTuple):
    """What is learned of a row."""

    lines: list[Line]
    """of a pair, one per response; of a demonstration, one or more; none if the row cannot be learned from"""
    remarks: list[str]


class _Text(NamedTuple):
    place: str
    text: Written


def asked_of(row: AnyRow, place: str) -> Asked:
    """Convert a row to the encoder's input."""
    match row:
        case Pair():
            return Asked(place, row.prompt, (row.chosen, row.rejected), row.tools)
        case Demonstration() | Labelled():
            return Asked(place, row.prompt, (row.response,), row.tools)
        case Prompt():
            return Asked(place, row.prompt, (), row.tools)


@dataclass(frozen=True)
class Encoder:
    """Converts prompts and responses to token ids, in batches.

    Plain texts get the special tokens that the tokenizer adds; conversations get those that the chat template writes.
    A UserError names the place if a line starts with two BOS tokens or the template does not fit.
    """

    chat: Chat
    learn_all: bool = False
    """learn prompts too"""

    def remarks(self, one: Asked) -> list[str]:
        """Return remarks on how a row is read, and on what the chat template does not use."""
        found = self.chat.special.within(text for content in (one.prompt, *one.responses) for text in _texts(content))
        way_out = 'text; set data.special_tokens = "control" to read it as a control token'
        read_as = "a control token" if self.chat.special_tokens == "control" else way_out
        remarks = [f"{found[0]} in the data is read as {read_as}"] if found else []
        if isinstance((asked := self._asked(one)).prompt, str):
            remarks += ["tools are not used, because this is plain text; set data.chat"] * bool(one.tools)
            return remarks + self._on_template(asked)
        prompt = self.chat.opened(_turns(asked.prompt))
        with _at(one.place):
            for response in asked.responses or ((),):
                remarks += self._unused.remarks((*prompt, *_turns(response)), one.tools)
        return list(dict.fromkeys(remarks))

    def _on_template(self, plain: Asked) -> list[str]:
        """Return a remark on a plain prompt if there is a chat template; it quotes the first such prompt."""
        if not (plain.prompt and self.chat.has_template) or self.chat.stays_plain:
            return []
        if self.chat.special_tokens == "control":
            return []  # a template may be written by hand
        if not self._quoted:
            with suppress(UserError):  # some templates refuse what others need
                turns = self.chat.opened((Turn("user", str(plain.prompt)),))
                self._quoted.append(
                    f"the tokenizer has a chat template, but the prompt is read as plain text, "
                    f"{_quote(str(plain.prompt))}; with data.chat = true, it would be read as "
                    f"{_quote(self.chat.render(turns, plain.tools, answer=True))}; set data.chat to one of the two"
                )
        return self._quoted

    @cached_property
    def _quoted(self) -> list[str]:
        return []

    @cached_property
    def _unused(self) -> Unused:
        return Unused(self.chat)

    def prompts(self, asked: Iterable[Asked]) -> Iterator[PromptLine]:
        """Encode prompts without responses; a conversation ends where the answer begins."""
        return _each_kind(map(self._asked, asked), self._plain_prompts, self._chat_prompts)

    def lines(self, asked: Iterable[Asked]) -> Iterator[Learned]:
        """Encode every prompt with each of its responses.

        In a plain text, the learned part begins where the ids first differ from those of the prompt alone, at the same
        token for all responses to a prompt. It ends with the end token, which is added if the tokenizer has one. For
        conversations, see `answers`; of several sequences of a pair's response, the last one is used. A token that is
        part prompt, part response is learned. The first token of a line is never learned, because no token precedes it.
        """
        return _each_kind(map(self._asked, asked), self._plain_lines, self._chat_lines)

    def _asked(self, one: Asked) -> Asked:
        responses = tuple(self.chat.turns(response, "assistant") for response in one.responses)
        return one._replace(prompt=self.chat.turns(one.prompt, "user"), responses=responses)

    def _plain_prompts(self, asked: Sequence[Asked]) -> list[PromptLine]:
        texts = [_Text(one.place, self.chat.plain(str(one.prompt))) for one in asked]
        return [PromptLine(text, tuple(ids)) for (_, text), ids in zip(texts, self._plain_ids(texts), strict=True)]

    def _plain_lines(self, asked: Sequence[Asked]) -> list[Learned]:
        prompts = self._plain_ids([_Text(one.place, self.chat.plain(str(one.prompt))) for one in asked])
        wholes = [
            _Text(one.place, self.chat.plain(f"{one.prompt}{content}")) for one in asked for content in one.responses
        ]
        ids = iter(self._plain_ids(wholes))
        return [
            Learned(self._begun(prompt, [self._ended(next(ids)) for _ in one.responses]), [])
            for one, prompt in zip(asked, prompts, strict=True)
        ]

    def _begun(self, prompt: list[int], wholes: list[list[int]]) -> list[Line]:
        start = min(_common_prefix(prompt, ids) for ids in wholes)
        learned = 0 if self.learn_all else start
        return [_line(ids, np.arange(len(ids)) >= learned, start < len(prompt)) for ids in wholes]

    def _ended(self, ids: list[int]) -> list[int]:
        end = self.chat.tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]

    def _plain_ids(self, texts: Sequence[_Text]) -> list[list[int]]:
        unused = [*["system"] * (self.chat.system is not None), *["template_options"] * bool(self.chat.options)]
        if texts and unused:
            raise UserError(f"{texts[0].place}: this is plain text; data.{unused[0]} is for conversations")
        ids = [one.ids for one in self._tokenized(texts, add=True)]
        # A prompt is not finished, so an end token that the tokenizer adds to every text is removed.
        ids = [line[:-1] for line in ids] if self._adds_end else ids
        self._check_bos(texts, ids, "the tokenizer adds one, so remove the one in the text")
        return ids

    @cached_property
    def _adds_end(self) -> bool:
        end = self.chat.tokenizer.eos_token_id
        return end is not None and Around.of(self.chat.tokenizer).end[-1:] == (end,)

    def _chat_prompts(self, asked: Sequence[Asked]) -> list[PromptLine]:
        lines: dict[int, PromptLine] = {}
        texts: dict[int, _Text] = {}
        for number, one in enumerate(asked):
            with _at(one.place):
                try:
                    turns = self.chat.opened(_turns(one.prompt))
                    texts[number] = _Text(one.place, self.chat.render(turns, one.tools, answer=True))
                except Unrenderable as error:
                    lines[number] = PromptLine(Written(""), (), str(error))
        for (number, (_, text)), encoded in zip(texts.items(), self._chat_ids([*texts.values()]), strict=True):
            lines[number] = PromptLine(text, tuple(encoded.ids))
        return [lines[number] for number in range(len(asked))]

    def _chat_lines(self, asked: Sequence[Asked]) -> list[Learned]:
        found = [self._written(one) for one in asked]
        sequences = [sequence for one in found for sequence in one.sequences]
        places = [one.place for one, written in zip(asked, found, strict=True) for _ in written.sequences]
        if sequences and not self.chat.tokenizer.is_fast:
            raise UserError("finding the assistant's tokens needs a fast tokenizer (one with a tokenizer.json)")
        encoded = self._chat_ids([_Text(place, one.text) for place, one in zip(places, sequences, strict=True)])
        lines = iter([_marked(ids, one.spans) for ids, one in zip(encoded, sequences, strict=True)])
        return [Learned([next(lines) for _ in one.sequences], one.remarks) for one in found]

    def _written(self, one: Asked) -> Answers:
        """Return the sequences of all responses to a prompt; none if one of them cannot be learned from."""
        with _at(one.place):
            try:
                found = [self._answers(one, _turns(response)) for response in one.responses]
            except Unrenderable as error:
                return Answers([], [f"dropped: {error}"])
        remarks = list(dict.fromkeys(remark for answers in found for remark in answers.remarks))
        if not all(answers.sequences for answers in found):
            return Answers([], [*remarks, "dropped: there is no turn of the assistant that may be learned"])
        if len(found) == 1:
            return Answers(found[0].sequences, remarks)
        return Answers([one.sequences[-1] for one in found], [LAST if text == REWRITES else text for text in remarks])

    def _answers(self, one: Asked, response: Sequence[Turn]) -> Answers:
        prompt = self.chat.opened(_turns(one.prompt))
        turns = (*prompt, *response)
        if not self.learn_all:
            return answers(self.chat, turns, len(prompt), one.tools)
        if not all(turn.learn for turn in turns):
            raise UserError('data.learn = "all" contradicts a turn that is marked as not learned; remove one of them')
        text = self.chat.render(turns, one.tools)
        return Answers([Rendered(text, ((0, len(text)),))], [])

    def _chat_ids(self, texts: Sequence[_Text]) -> list[Encoded]:
        encoded = self._tokenized(texts, add=False)
        self._check_bos(texts, [one.ids for one in encoded], "remove one from the chat template or the first turn")
        return encoded

    def _tokenized(self, texts: Sequence[_Text], *, add: bool) -> list[Encoded]:
        broken = next((place for place, text in texts if _HALF_PAIR.search(text)), None)
        if broken is not None:
            raise UserError(f"{broken}: the text contains half of a surrogate pair, which is not a character")
        return self.chat.special.encode([text for _, text in texts], add=add) if texts else []

    def _check_bos(self, texts: Sequence[_Text], lines: Sequence[list[int]], way_out: str) -> None:
        bos = self.chat.tokenizer.bos_token_id
        twice = next((text.place for text, ids in zip(texts, lines, strict=True) if ids[:2] == [bos, bos]), None)
        if twice is not None:
            raise UserError(
                f"{twice}: the text begins with two BOS tokens ({self.chat.tokenizer.bos_token}); {way_out}"
            )


def _each_kind(
    asked: Iterable[Asked], plain: Callable[[list[Asked]], list[T]], chat: Callable[[list[Asked]], list[T]]
) -> Iterator[T]:
    """Yield the results of `plain` for texts and of `chat` for conversations, in the order of `asked`."""
    rest = iter(asked)
    while part := list(islice(rest, _AT_ONCE)):
        texts = [one for one in part if isinstance(one.prompt, str)]
        conversations = [one for one in part if not isinstance(one.prompt, str)]
        plains, chats = iter(plain(texts) if texts else []), iter(chat(conversations) if conversations else [])
        yield from (next(plains if isinstance(one.prompt, str) else chats) for one in part)


def _marked(encoded: Encoded, spans: Sequence[Span]) -> Line:
    """Return a line in which every token that overlaps a span is learned."""
    ids, offsets = encoded
    end = np.array([end for _, end in offsets], dtype=np.int64)
    # Some tokenizers exclude a token's leading space from its offsets, although tokens leave no gaps.
    start = np.minimum([start for start, _ in offsets], np.concatenate([[0], end[:-1]]))
    learn = np.zeros(len(ids), dtype=bool)
    spans_prompt = False
    for first, last in spans:
        learn |= (start < last) & (end > first)
        spans_prompt |= bool(np.any((start < first) & (end > first)))
    return _line(ids, learn, spans_prompt)


def _line(ids: list[int], learn: NDArray[np.bool_], spans_prompt: bool) -> Line:
    return Line(tuple(ids), (False, *learn[1:].tolist())[: len(ids)], spans_prompt)


def _common_prefix(a: list[int], b: list[int]) -> int:
    if b[: len(a)] == a:
        return len(a)
    return next((i for i, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), len(b))


def _texts(content: Content) -> list[str]:
    return [content] if isinstance(content, str) else [text for turn in content for text in turn.texts()]


def _turns(content: Content) -> tuple[Turn, ...]:
    assert not isinstance(content, str)
    return content


@contextmanager
def _at(place: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
