"""Demonstrations and pairs as token ids, with a mask of the learned tokens."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import tee
from typing import Literal, TypeVar

from pydantic import Field
from transformers import PreTrainedTokenizerBase

from cavesson.data.chat import Chat, ChatSettings
from cavesson.data.encode import Asked, Encoder, Line, asked_of
from cavesson.data.notes import Notes, Reading
from cavesson.data.types import Demonstration, Pair

R = TypeVar("R", Demonstration, Pair)


class PairSettings(ChatSettings):
    """Pairs of responses as tokens."""

    max_length: int = Field(1024, ge=2)
    """tokens of prompt and response together"""
    overlong: Literal["truncate", "drop"] = "truncate"
    """what happens to longer ones: cut off their end, or drop them; either way they are counted"""


class TextSettings(PairSettings):
    """Texts and conversations as tokens."""

    learn: Literal["response", "all"] = "response"
    """which tokens are learned: response = those after the prompt, and of a conversation only the assistant's, end
    tokens included; all = every token but the first, which nothing comes before"""


@dataclass(frozen=True)
class Tokens:
    """One example."""

    ids: tuple[int, ...]
    learn: tuple[bool, ...]
    """for each id whether it is learned; never the first, which nothing comes before"""


@dataclass(frozen=True)
class PairTokens:
    """Two responses to one prompt; only the response tokens are learned."""

    chosen: Tokens
    rejected: Tokens
    margin: float | None = None
    """by how much the first was preferred, where the data says so"""
    reference: tuple[float, float] | None = None
    """log-probabilities of the two responses under the reference, once they are known"""


def tokenize_demonstrations(
    rows: Iterable[Demonstration], tokenizer: PreTrainedTokenizerBase, settings: TextSettings
) -> Reading[Tokens]:
    """Tokenize every prompt and its response as one text; see `Encoder.lines` for which tokens are learned.

    Args:
        rows: texts or conversations.
        tokenizer: must have a chat template for conversations, unless the settings give one.
        settings: which tokens are learned, and the length limit.

    Returns:
        The examples, tokenized again in every iteration, with notes about rows that are dropped, cut or look odd.
        Iteration raises a UserError if a text starts with two BOS tokens or the chat template does not fit a
        conversation.
    """
    encoder = Encoder(Chat.of(settings, tokenizer), learn_all=settings.learn == "all")

    def read(notes: Notes) -> Iterator[Tokens]:
        return (Tokens(line.ids, line.learn) for _, (line,) in _encoded(rows, encoder, settings, notes))

    return Reading(read)


def tokenize_pairs(
    rows: Iterable[Pair], tokenizer: PreTrainedTokenizerBase, settings: PairSettings
) -> Reading[PairTokens]:
    """Tokenize every prompt with each of its two responses, in the same way as `tokenize_demonstrations`."""
    encoder = Encoder(Chat.of(settings, tokenizer))

    def read(notes: Notes) -> Iterator[PairTokens]:
        return (
            PairTokens(Tokens(chosen.ids, chosen.learn), Tokens(rejected.ids, rejected.learn), row.margin)
            for row, (chosen, rejected) in _encoded(rows, encoder, settings, notes)
        )

    return Reading(read)


def _encoded(
    rows: Iterable[R], encoder: Encoder, settings: PairSettings, notes: Notes
) -> Iterator[tuple[R, list[Line]]]:
    """Yield each row that is kept, with one line per response."""
    rows, again = tee(rows)
    source = settings.path or "the data"

    def noted(one: Asked) -> Asked:
        if remark := encoder.remark(one):
            notes.add(remark, one.place)
        return one

    asked = (noted(asked_of(row, f"{source}: row {number}")) for number, row in enumerate(again, start=1))
    for number, (row, lines) in enumerate(zip(rows, encoder.lines(asked), strict=True), start=1):
        kept, found = fitted(lines, settings)
        for remark in found:
            notes.add(remark, f"{source}: row {number}")
        if kept:
            yield row, kept


def fitted(lines: Sequence[Line], settings: PairSettings) -> tuple[list[Line], list[str]]:
    """Apply the length limit to the lines of one row.

    Returns:
        The lines, cut where necessary, or an empty list if the row is dropped; and remarks about them.
    """
    limit = settings.max_length
    over = f"longer than data.max_length = {limit} tokens"
    remarks = []
    if any(len(line.ids) > limit for line in lines):
        if settings.overlong == "drop":
            return [], [f"{over}, and dropped"]
        remarks.append(f"{over}, and cut there")
    kept = [Line(line.ids[:limit], line.learn[:limit], line.straddles) for line in lines]
    if not all(any(line.learn) for line in kept):
        return [], [f"dropped: no token of a response is within data.max_length = {limit}"]
    if len(kept) > 1 and kept[0].ids == kept[1].ids:
        return [], [*remarks, "dropped: chosen and rejected are the same tokens"]
    if any(line.straddles for line in kept):
        remarks.append("a token is part prompt, part response: it is learned, and a sampler sees another prompt")
    return kept, remarks
