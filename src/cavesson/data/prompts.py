"""Prompts as token ids, in an order that depends only on the seed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from cavesson.data.chat import Chat, Tools
from cavesson.data.encode import Asked, Encoder, Line, PromptLine, asked_of
from cavesson.data.extra import as_json
from cavesson.data.fields import Fields, Row
from cavesson.data.formats import convert, recognise
from cavesson.data.load import ARGUMENTS, load, split, with_tools
from cavesson.data.notes import Notes
from cavesson.data.order import Stream, passes_over
from cavesson.data.settings import PromptSettings
from cavesson.data.types import Answered, Content, Prompt
from cavesson.data.usage import Usage
from cavesson.errors import UserError
from cavesson.types import Batch


class Response(NamedTuple):
    """A response that the data give, as token ids after those of its prompt."""

    prompt: tuple[int, ...]
    """as in the line that a model would be fine-tuned on: a token that is part prompt, part response is not in it"""
    ids: tuple[int, ...]
    learn: tuple[bool, ...]
    """for each of the ids whether it is learned; the last one is"""

    @classmethod
    def of(cls, line: Line) -> Self | None:
        """Return the response in a line; None if no token of it can be learned."""
        learned = [place for place, learn in enumerate(line.learn) if learn and place]  # nothing predicts the first
        if not learned:
            return None
        start, end = learned[0], learned[-1] + 1
        return cls(line.ids[:start], line.ids[start:end], line.learn[start:end])


@dataclass(frozen=True)
class PromptSet:
    """Tokenized prompts with the other columns of their rows."""

    texts: tuple[str, ...]
    """what a sampler sees: of a conversation what the chat template writes, up to where the answer begins"""
    ids: tuple[tuple[int, ...], ...]
    columns: Mapping[str, tuple[Any, ...]]
    """all columns of the data under their own names, and those that the settings rename under both"""
    dropped: tuple[int, ...]
    """rows that are not used, counted from 0 among those that were read"""
    notes: tuple[str, ...] = ()
    """what was skipped while reading, in words"""
    usage: tuple[str, ...] = ()
    """what the columns are used for, in words"""
    messages: tuple[list[dict[str, Any]] | None, ...] = ()
    """the conversations that were rendered, as messages; None for a plain text, and nothing if all are plain texts"""
    unrendered: tuple[int, ...] = ()
    """dropped rows whose prompt the chat template cannot render; the others are too long"""
    sources: tuple[tuple[range, float], ...] = ()
    """of a mix the prompts of each source, and its weight"""
    responses: tuple[Response, ...] = ()
    """of each prompt the response that the data give, if they were asked for"""
    held_out: "PromptSet | None" = None
    """prompts that are only evaluated, with the same columns"""

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def overlong(self) -> list[int]:
        """The dropped rows whose prompt is too long."""
        return sorted(set(self.dropped) - set(self.unrendered))

    @cached_property
    def for_rewards(self) -> Mapping[str, Sequence[Any]]:
        """The columns that rewards get: those of the data, and the conversations as `messages` unless it has them."""
        return {"messages": self.messages, **self.columns} if self.messages else self.columns

    @cached_property
    def extra(self) -> tuple[str | None, ...]:
        """Of each prompt, the columns that have no column in the record, as a JSON object."""
        return tuple(as_json(extra) if (extra := self._extra(row)) else None for row in range(len(self)))

    def _extra(self, row: int) -> dict[str, Any]:
        # The column that the prompt was read from, unless it was rendered, is in the record already, as is the answer.
        recorded = {"prompt": self.texts[row], "text": self.texts[row]}
        values = {name: column[row] for name, column in self.columns.items()}
        if isinstance(truth := values.get("ground_truth"), str):
            recorded["ground_truth"] = truth
        return {
            name: value
            for name, value in values.items()
            if value is not None and not (isinstance(value, str) and value == recorded.get(name))
        }

    def holding_out(self, held_out: "PromptSet", source: str) -> "PromptSet":
        """Return these prompts with others that are held out, which messages call `source`.

        Raises:
            UserError: the held-out prompts lack a column that rewards get.
        """
        missing = sorted(set(self.columns) - set(held_out.columns))
        if missing:
            raise UserError(f"{source} have no column {missing[0]!r}, which rewards get of the other prompts; add it")
        return replace(self, held_out=held_out)

    def order(self, seed: int, shuffle: bool) -> Stream[int]:
        """Return a stream of prompt indices, in endless passes over the data."""
        sources = self.sources or ((range(len(self)), 1.0),)
        return passes_over([prompts for prompts, _ in sources], [w for _, w in sources], seed, shuffle=shuffle)


def padded_prompts(ids: Sequence[Sequence[int]]) -> Batch:
    """Return columns `prompt_ids` and `prompt_mask`, `[B, S]`, padded on the left.

    Padding is token 0, as everywhere: masks mark it, and a tokenizer's pad token need not have an embedding.
    """
    width = max(map(len, ids))
    return Batch(
        {
            "prompt_ids": torch.tensor([[0] * (width - len(row)) + list(row) for row in ids]),
            "prompt_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids]),
        }
    )


Offer = Callable[[Sequence[Prompt], str], list[Tools]]
"""Returns the tools that are offered with each of some rows of a source."""


def load_prompts(
    settings: PromptSettings,
    tokenizer: PreTrainedTokenizerBase,
    offer: Offer | None = None,
    kind: type[Prompt] = Prompt,
) -> PromptSet:
    """Read and tokenize the prompts of the settings, and those that are held out; with `Answered`, their responses too.

    `offer` returns the tools of a run; by default they are those that the data name.

    Raises:
        UserError: the file does not exist, its format has no prompts, or no prompt is usable.
    """
    if settings.stream:
        raise UserError("data.stream has no effect on prompts, which are kept in memory; limit them with data.max_rows")
    loaded = load(settings, kind)
    chat = Chat.of(settings, tokenizer)
    prompts = _prompt_set(loaded.train, chat, settings.max_prompt_tokens, settings.path or "the data", offer)
    ranges = _kept([len(list(source.rows)) for source in loaded.sources], prompts.dropped)
    sources = zip(ranges, (source.weight for source in loaded.sources), strict=True)
    notes = (*loaded.notes(), *prompts.notes)
    prompts = replace(prompts, notes=notes, usage=tuple(loaded.usage()), sources=tuple(sources))
    if not loaded.held_out:
        return prompts
    source = f"the held-out rows of {settings.validation_path or settings.path or 'the data'}"
    held_out = _prompt_set(loaded.held_out, chat, settings.max_prompt_tokens, source, offer)
    if not settings.has_held_out_source:  # rows of one source may have different columns
        nulls = dict.fromkeys(prompts.columns, (None,) * len(held_out))
        held_out = replace(held_out, columns={**nulls, **held_out.columns})
    return prompts.holding_out(held_out, source)


def _kept(sizes: Sequence[int], dropped: Sequence[int]) -> list[range]:
    """Return the range of each source's prompts after rows are dropped."""
    ends = np.cumsum(sizes)
    ends -= np.searchsorted(dropped, ends)
    return [range(int(first), int(end)) for first, end in zip([0, *ends[:-1]], ends, strict=True)]


def tokenize(
    prompts: Sequence[Any],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    *,
    columns: Mapping[str, Sequence[Any]] | None = None,
    source: str = "the prompts",
    chat: Chat | None = None,
) -> PromptSet:
    """Tokenize prompts and drop those over the limit.

    Args:
        prompts: texts, or conversations as lists of `{"role": …, "content": …}`.
        tokenizer: tokenizer of the model.
        max_tokens: maximum number of tokens of a prompt.
        columns: further columns for the rewards, with one value per prompt.
        source: name of the source, for messages.
        chat: renders conversations; None uses the tokenizer's chat template.

    Raises:
        UserError: a value is not a prompt, or no usable prompt is left.
    """
    columns = columns or {}
    rows = [
        Prompt(content_of(prompt, f"{source}: row {row + 1}"), {name: values[row] for name, values in columns.items()})
        for row, prompt in enumerate(prompts)
    ]
    return _prompt_set(rows, chat or Chat(tokenizer), max_tokens, source)


def given_prompts(
    given: Sequence[str] | Mapping[str, Sequence[Any]],
    settings: PromptSettings,
    tokenizer: PreTrainedTokenizerBase,
    offer: Offer | None = None,
    kind: type[Prompt] = Prompt,
) -> PromptSet:
    """Tokenize prompts that a Python caller gives, and hold out the last fraction of them that the settings ask for.

    They are texts, or columns by name, which are read as rows of the format `prompt`, or of `Answered` as those of a
    file; `offer` and `kind` are as in `load_prompts`.

    Raises:
        UserError: a value is not a prompt, no usable prompt is left, or a setting contradicts the given prompts.
    """
    if settings.has_held_out_source:
        raise UserError(
            "prompts= come without a source of held-out prompts; hold out some of them with data.validation"
        )
    columns = dict(given) if isinstance(given, Mapping) else {"prompt": given}
    if "prompt" not in columns:
        raise UserError(f"the prompts have no column 'prompt'; they have {', '.join(columns) or 'none'}")
    chat, usage = Chat.of(settings, tokenizer), Usage(kind, {})

    def some(rows: Sequence[int], source: str) -> PromptSet:
        read = [_given_row(columns, row, f"{source}: row {row + 1}", settings, usage, kind) for row in rows]
        if not isinstance(given, Mapping):
            read = [replace(one, columns={}) for one in read]
        return _prompt_set(read, chat, settings.max_prompt_tokens, source, offer)

    rows, last = split(list(range(len(columns["prompt"]))), settings.validation, "prompts=")
    prompts, source = some(rows, "the prompts"), "the held-out prompts"
    if isinstance(given, Mapping):
        prompts = replace(prompts, usage=(f"columns: {usage.line()}",))
    return prompts.holding_out(some(last, source), source) if last else prompts


def _given_row(
    columns: Mapping[str, Sequence[Any]],
    row: int,
    place: str,
    settings: PromptSettings,
    usage: Usage,
    kind: type[Prompt],
) -> Prompt:
    values = {name: column[row] for name, column in columns.items()}
    shown = {name: value for name, value in values.items() if name not in settings.ignore}
    fields = Fields(Row(place, shown, original=values), Notes(), chat=settings.chat)
    format = "prompt" if kind is Prompt else recognise(shown, kind, place)
    (prompt,) = convert(format, fields, kind)
    usage.add(fields)
    usage.check(fields, format)
    return with_tools(prompt, settings.tools, place, chat=settings.chat)


def content_of(prompt: Any, place: str) -> Content:
    """Return a prompt that is a text or a list of messages."""
    if isinstance(prompt, str):
        return prompt
    return Fields(Row(place, {"prompt": prompt}), Notes()).content("prompt")


def messages_of(prompt: Content, chat: Chat) -> list[dict[str, Any]] | None:
    """Return the conversation that is rendered of a prompt, or None if it stays a plain text."""
    content = chat.turns(prompt, "user")
    return None if isinstance(content, str) else [turn.message for turn in chat.opened(content)]


def _prompt_set(
    rows: Sequence[Prompt], chat: Chat, max_tokens: int, source: str, offer: Offer | None = None
) -> PromptSet:
    if not rows:
        raise UserError(f"{source}: there are no prompts")
    if offer is not None:
        rows = [replace(row, tools=tools) for row, tools in zip(rows, offer(rows, source), strict=True)]
    names = list(dict.fromkeys(name for row in rows for name in row.columns))
    if taken := sorted(set(ARGUMENTS) & set(names)):
        raise UserError(
            f"{source}: rename the column {taken[0]!r} (see data.columns); rewards get another argument of that name"
        )
    asked = [asked_of(row, f"{source}: row {number}") for number, row in enumerate(rows, start=1)]
    encoder, notes = Encoder(chat), Notes()
    for one in asked:
        notes.add_all(encoder.remarks(one), one.place)
    lines = list(encoder.prompts(asked))
    readable = _readable(asked, lines, notes)
    if not readable:
        raise UserError("; ".join([f"{source}: no prompt can be used", *notes.lines()]))
    kept = [row for row in readable if len(lines[row].ids) <= max_tokens]
    if not kept:
        raise UserError(f"{source}: every prompt is over {max_tokens} tokens; raise data.max_prompt_tokens")
    messages = [messages_of(asked[row].prompt, chat) for row in kept]
    return PromptSet(
        texts=tuple(lines[row].text for row in kept),
        ids=tuple(lines[row].ids for row in kept),
        columns={name: tuple(rows[row].columns.get(name) for row in kept) for name in names},
        dropped=tuple(sorted(set(range(len(rows))) - set(kept))),
        unrendered=tuple(sorted(set(range(len(rows))) - set(readable))),
        notes=tuple(notes.lines()),
        messages=tuple(messages) if any(messages) else (),
        responses=_responses([rows[row] for row in kept], [asked[row] for row in kept], encoder),
    )


def _responses(rows: Sequence[Prompt], asked: Sequence[Asked], encoder: Encoder) -> tuple[Response, ...]:
    """Return the responses that rows have; a UserError names one that cannot be learned from."""
    given = [
        one._replace(responses=(row.response,))
        for row, one in zip(rows, asked, strict=True)
        if isinstance(row, Answered)
    ]
    found = []
    for one, learned in zip(given, encoder.lines(given), strict=True):
        response = Response.of(learned.lines[-1]) if learned.lines else None
        if response is None:
            raise UserError("; ".join([f"{one.place}: the response cannot be learned from", *learned.remarks]))
        found.append(response)
    return tuple(found)


def _readable(asked: Sequence[Asked], lines: Sequence[PromptLine], notes: Notes) -> list[int]:
    """Return the rows whose prompt the chat template can render, and note the others; an empty prompt is an error."""
    for one, line in zip(asked, lines, strict=True):
        if line.problem is not None:
            notes.add(f"dropped: {line.problem}", one.place)
        elif not line.ids:
            raise UserError(f"{one.place} has an empty prompt; there must be a token to continue from")
    return [row for row, line in enumerate(lines) if line.problem is None]
