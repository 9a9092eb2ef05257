"""Tokenized examples for training: slices of an endless stream, collated to padded columns."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Generic, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cavesson.data.load import Loaded, load
from cavesson.data.notes import Reading
from cavesson.data.order import Stream, passes_over
from cavesson.data.tokens import (
    PairSettings,
    PairTokens,
    TextSettings,
    Tokens,
    tokenize_demonstrations,
    tokenize_pairs,
)
from cavesson.data.types import Demonstration, Pair
from cavesson.errors import UserError
from cavesson.types import Batch

T = TypeVar("T")
E = TypeVar("E", Tokens, PairTokens)
R = TypeVar("R", Demonstration, Pair)


@dataclass(frozen=True)
class Examples(Generic[T]):
    """The examples that are trained on and those that are held out."""

    train: Stream[T]
    held_out: Sequence[T]
    collate: Callable[[Sequence[T]], Batch]
    notes: Callable[[], list[str]]
    """says what was dropped or cut; when streaming, in one pass as far as it has come"""

    def with_data(self, train: Stream[T], held_out: Sequence[T]) -> "Examples[T]":
        return replace(self, train=train, held_out=held_out)


def load_demonstrations(settings: TextSettings, tokenizer: PreTrainedTokenizerBase, seed: int) -> Examples[Tokens]:
    """Read and tokenize the demonstrations for `cavesson sft`.

    Raises:
        UserError: the data does not exist or contains nothing usable.
    """
    loaded = load(settings, Demonstration)
    return _examples(loaded, lambda rows: tokenize_demonstrations(rows, tokenizer, settings), collate, seed)


def load_texts(settings: TextSettings) -> Iterator[str]:
    """Yield every text that `load_demonstrations` would tokenize, for building a tokenizer from them."""
    loaded = load(settings, Demonstration)
    for row in chain(*(source.rows for source in loaded.sources), loaded.held_out):
        for said in (row.prompt, row.response):
            yield said if isinstance(said, str) else "".join(turn.content for turn in said)


def load_pairs(settings: PairSettings, tokenizer: PreTrainedTokenizerBase, seed: int) -> Examples[PairTokens]:
    """Read and tokenize pairs of a better and a worse response.

    Raises:
        UserError: the data does not exist or contains nothing usable.
    """
    loaded = load(settings, Pair)
    return _examples(loaded, lambda rows: tokenize_pairs(rows, tokenizer, settings), collate_pairs, seed)


def _examples(
    loaded: Loaded[R], tokenize: Callable[[Iterable[R]], Reading[E]], put: Callable[[Sequence[E]], Batch], seed: int
) -> Examples[E]:
    settings, held_out = loaded.settings, tokenize(loaded.held_out)
    parts: list[Reading[E]] = [tokenize(source.rows) for source in loaded.sources]

    def notes() -> list[str]:
        apart: list[str] = [f"held out: {note}" for note in held_out.notes()]
        return [*loaded.notes(), *apart, *(note for part in parts for note in part.notes())]

    kept = list(held_out)
    sources: list[Iterable[E]] = [part if settings.stream else list(part) for part in parts]
    if [] in sources:
        raise UserError("; ".join(["there is no example left to learn from", *notes()]))
    weights = [source.weight for source in loaded.sources]
    train = passes_over(sources, weights, seed, shuffle=settings.shuffle, buffer=settings.shuffle_buffer)
    # Computed now, so that the notes do not keep the texts of tokenized examples in memory.
    noted = notes()
    return Examples(train, kept, put, notes if settings.stream else lambda: noted)


def collate(examples: Sequence[Tokens]) -> Batch:
    """Return columns `ids` and `mask`, `[B, L]`, padded on the right, and `length` `[B]`."""
    return Batch(_columns(examples, ""))


def collate_pairs(pairs: Sequence[PairTokens]) -> Batch:
    """Return the columns of `collate` for both responses, and `margin` `[B]`.

    If the reference log-probabilities of all pairs are known, they become the columns `chosen_reference` and
    `rejected_reference`, `[B]`.
    """
    columns = _columns([pair.chosen for pair in pairs], "chosen_")
    columns |= _columns([pair.rejected for pair in pairs], "rejected_")
    columns["margin"] = torch.tensor([pair.margin or 0.0 for pair in pairs])
    known = [pair.reference for pair in pairs if pair.reference is not None]
    if len(known) == len(pairs):
        columns["chosen_reference"], columns["rejected_reference"] = torch.tensor(known).unbind(1)
    return Batch(columns)


def _columns(examples: Sequence[Tokens], prefix: str) -> dict[str, Tensor]:
    width = max(len(example.ids) for example in examples)
    ids = torch.zeros(len(examples), width, dtype=torch.long)
    mask = torch.zeros(len(examples), width)
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        mask[row, : len(example.ids)] = torch.tensor(example.learn, dtype=torch.float32)
    mask[:, 0] = 0.0  # no token precedes the first, so it cannot be predicted
    length = torch.tensor([len(example.ids) for example in examples])
    return {f"{prefix}ids": ids, f"{prefix}mask": mask, f"{prefix}length": length}


def size_of(example: Tokens | PairTokens) -> int:
    """Return the number of tokens of an example, or of both sequences of a pair."""
    return len(example.ids) if isinstance(example, Tokens) else len(example.chosen.ids) + len(example.rejected.ids)
