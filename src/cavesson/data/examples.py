"""Examples for training: token ids with a mask of the learned tokens, collated to padded columns."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, tee
from typing import Generic, TypeVar

import torch
import xxhash
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from cavesson.data.chat import Chat
from cavesson.data.encode import Asked, Encoder, Learned, Line, asked_of
from cavesson.data.load import Loaded, load
from cavesson.data.notes import Notes, Reiterable
from cavesson.data.order import Stream, passes_over
from cavesson.data.settings import PairSettings, TextSettings
from cavesson.data.types import AnyRow, Demonstration, Labelled, Pair
from cavesson.errors import UserError
from cavesson.types import Batch

T = TypeVar("T")
R = TypeVar("R", Demonstration, Pair, Labelled)
E = TypeVar("E", "Tokens", "PairTokens", "LabelledTokens")


@dataclass(frozen=True)
class Tokens:
    """One example."""

    ids: tuple[int, ...]
    learn: tuple[bool, ...]
    """for each id whether it is learned; never the first, which nothing comes before"""

    @property
    def size(self) -> int:
        """The number of tokens."""
        return len(self.ids)


@dataclass(frozen=True)
class PairTokens:
    """Two responses to one prompt; only the response tokens are learned."""

    chosen: Tokens
    rejected: Tokens
    margin: float | None = None
    """by how much the first was preferred, where the data says so"""
    reference: tuple[float, float] | None = None
    """log-probabilities of the two responses under the reference, once they are known"""

    @property
    def size(self) -> int:
        """The number of tokens of both."""
        return self.chosen.size + self.rejected.size


@dataclass(frozen=True)
class LabelledTokens:
    """A prompt with a response that is labelled as a good or a bad one; only the response is learned."""

    tokens: Tokens
    """of both"""
    label: bool
    mismatched: Tokens | None = None
    """of the prompt with a response to another one, once that is chosen"""
    reference: tuple[float, ...] | None = None
    """log-probabilities of the response, and of the mismatched one, under the reference, once they are known"""

    @property
    def size(self) -> int:
        """The number of tokens."""
        return self.tokens.size


AnyTokens = Tokens | PairTokens | LabelledTokens
"""An example of any kind."""


def sequences(example: AnyTokens) -> tuple[Tokens, ...]:
    """Return the sequences that a model learns of an example."""
    match example:
        case Tokens():
            return (example,)
        case PairTokens():
            return example.chosen, example.rejected
        case LabelledTokens():
            return (example.tokens,)


def tokenize_demonstrations(
    rows: Iterable[Demonstration], tokenizer: PreTrainedTokenizerBase, settings: TextSettings
) -> Reiterable[Tokens]:
    """Tokenize every prompt and its response; see `Encoder.lines` for which tokens are learned.

    A conversation gives several examples if the chat template rewrites earlier turns; see `answers`.

    Returns:
        The examples, tokenized again in every iteration, with notes about rows that are dropped, cut or look odd.
        Iteration raises a UserError if a text starts with two BOS tokens or the chat template does not fit a
        conversation.
    """
    encoder = Encoder(Chat.of(settings, tokenizer), learn_all=settings.learn == "all")

    def read(notes: Notes) -> Iterator[Tokens]:
        return (Tokens(line.ids, line.learn) for _, (line,) in _encoded(rows, encoder, settings, notes))

    return Reiterable(read)


def tokenize_pairs(
    rows: Iterable[Pair], tokenizer: PreTrainedTokenizerBase, settings: PairSettings
) -> Reiterable[PairTokens]:
    """Tokenize every prompt with each of its two responses, in the same way as `tokenize_demonstrations`."""
    encoder = Encoder(Chat.of(settings, tokenizer))

    def read(notes: Notes) -> Iterator[PairTokens]:
        return (
            PairTokens(Tokens(chosen.ids, chosen.learn), Tokens(rejected.ids, rejected.learn), row.margin)
            for row, (chosen, rejected) in _encoded(rows, encoder, settings, notes)
        )

    return Reiterable(read)


def tokenize_labelled(
    rows: Iterable[Labelled], tokenizer: PreTrainedTokenizerBase, settings: PairSettings
) -> Reiterable[LabelledTokens]:
    """Tokenize every prompt and its response, in the same way as `tokenize_demonstrations`."""
    encoder = Encoder(Chat.of(settings, tokenizer))

    def read(notes: Notes) -> Iterator[LabelledTokens]:
        return (
            LabelledTokens(Tokens(line.ids, line.learn), row.label)
            for row, (line,) in _encoded(rows, encoder, settings, notes)
        )

    return Reiterable(read)


def _encoded(
    rows: Iterable[R], encoder: Encoder, settings: PairSettings, notes: Notes
) -> Iterator[tuple[R, list[Line]]]:
    """Yield the lines that are kept: of a pair both together, of other rows one at a time, each with its row."""
    rows, again = tee(rows)
    source = settings.path or "the data"

    def noted(one: Asked) -> Asked:
        notes.add_all(encoder.remarks(one), one.place)
        return one

    asked = (noted(asked_of(row, f"{source}: row {number}")) for number, row in enumerate(again, start=1))
    for number, (row, learned) in enumerate(zip(rows, encoder.lines(asked), strict=True), start=1):
        place = f"{source}: row {number}"
        notes.add_all(learned.remarks, place)
        for lines in together(row, learned):
            kept, found = fitted(lines, settings)
            notes.add_all(found, place)
            if kept:
                yield row, kept


def together(row: AnyRow, learned: Learned) -> list[list[Line]]:
    """Return the lines of a row in the groups that are kept or dropped together."""
    if isinstance(row, Pair):
        return [learned.lines] if learned.lines else []
    return [[line] for line in learned.lines]


def fitted(lines: Sequence[Line], settings: PairSettings) -> tuple[list[Line], list[str]]:
    """Apply the length limit to lines that are kept or dropped together.

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
    kept = [Line(line.ids[:limit], line.learn[:limit], line.spans_prompt) for line in lines]
    if not all(any(line.learn) for line in kept):
        return [], [f"dropped: no token of a response is within data.max_length = {limit}"]
    if len(kept) > 1 and kept[0].ids == kept[1].ids:
        return [], [*remarks, "dropped: chosen and rejected are the same tokens"]
    if any(line.spans_prompt for line in kept):
        remarks.append("one token spans prompt and response: it is learned, and sampling sees a different prompt")
    return kept, remarks


@dataclass(frozen=True)
class Examples(Generic[T]):
    """The examples that are trained on and those that are held out."""

    train: Stream[T]
    held_out: Sequence[T]
    collate: Callable[[Sequence[T]], Batch]
    notes: Callable[[], list[str]]
    """says what was dropped or cut; when streaming, in one pass as far as it has come"""
    usage: Callable[[], list[str]] = list
    """says what the columns are used for; when streaming, of the rows that were read"""


def fingerprint(examples: Iterable[AnyTokens]) -> str:
    """Return a hash of the examples: their token ids, which of them are learned, and margins or labels."""
    seen = xxhash.xxh3_128()
    for one in examples:
        for tokens in sequences(one):
            seen.update(array("q", (tokens.size, *tokens.ids)).tobytes())
            seen.update(bytes(tokens.learn))
        said = one.margin if isinstance(one, PairTokens) else one.label if isinstance(one, LabelledTokens) else None
        seen.update(repr(said).encode())
    return str(seen.hexdigest())


def load_demonstrations(settings: TextSettings, tokenizer: PreTrainedTokenizerBase, seed: int) -> Examples[Tokens]:
    """Read and tokenize the demonstrations for `cavesson sft`; raise a UserError if none can be used."""
    loaded = load(settings, Demonstration)
    return _examples(loaded, lambda rows: tokenize_demonstrations(rows, tokenizer, settings), collate, seed)


def load_texts(settings: TextSettings) -> Iterator[str]:
    """Yield every text that `load_demonstrations` would tokenize, for building a tokenizer from them."""
    loaded = load(settings, Demonstration)
    for row in chain(*(source.rows for source in loaded.sources), loaded.held_out):
        for content in (row.prompt, row.response):
            yield content if isinstance(content, str) else "".join(text for turn in content for text in turn.texts())


def load_pairs(settings: PairSettings, tokenizer: PreTrainedTokenizerBase, seed: int) -> Examples[PairTokens]:
    """Read and tokenize pairs of a better and a worse response; raise a UserError if none can be used."""
    loaded = load(settings, Pair)
    return _examples(loaded, lambda rows: tokenize_pairs(rows, tokenizer, settings), collate_pairs, seed)


def load_labelled(settings: PairSettings, tokenizer: PreTrainedTokenizerBase, seed: int) -> Examples[LabelledTokens]:
    """Read and tokenize responses that are labelled as good or bad; raise a UserError if none can be used."""
    loaded = load(settings, Labelled)
    return _examples(loaded, lambda rows: tokenize_labelled(rows, tokenizer, settings), collate_labelled, seed)


def _examples(
    loaded: Loaded[R], tokenize: Callable[[Iterable[R]], Reiterable[E]], put: Callable[[Sequence[E]], Batch], seed: int
) -> Examples[E]:
    settings, held_out = loaded.settings, tokenize(loaded.held_out)
    parts: list[Reiterable[E]] = [tokenize(source.rows) for source in loaded.sources]

    def notes() -> list[str]:
        apart: list[str] = [f"held out: {note}" for note in held_out.notes()]
        return [*loaded.notes(), *apart, *(note for part in parts for note in part.notes())]

    kept = list(held_out)
    sources: list[Iterable[E]] = [part if settings.stream else list(part) for part in parts]
    if [] in sources:
        raise UserError("; ".join(["there are no examples left to train on", *notes()]))
    weights = [source.weight for source in loaded.sources]
    train = passes_over(sources, weights, seed, shuffle=settings.shuffle, buffer=settings.shuffle_buffer)
    # Computed now, so that the notes do not keep the texts of tokenized examples in memory.
    noted = notes()
    return Examples(train, kept, put, notes if settings.stream else lambda: noted, loaded.usage)


def collate(examples: Sequence[Tokens]) -> Batch:
    """Return columns `ids` and `learned`, `[B, L]`, padded on the right, and `length` `[B]`."""
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


MISMATCHED = "mismatched_"
"""Prefix of the columns of a prompt with a response to another one."""


def collate_labelled(examples: Sequence[LabelledTokens]) -> Batch:
    """Return the columns of `collate`, and `label` `[B]`, 1 for a good response and 0 for a bad one.

    If mismatched responses are chosen, they have the same columns with the prefix `MISMATCHED`. If the reference
    log-probabilities of all examples are known, they are `reference` of both, `[B]`.
    """
    columns = _columns([one.tokens for one in examples], "")
    columns["label"] = torch.tensor([float(one.label) for one in examples])
    mismatched = [one.mismatched for one in examples if one.mismatched is not None]
    prefixes = ("", MISMATCHED) if len(mismatched) == len(examples) else ("",)
    if len(prefixes) > 1:
        columns |= _columns(mismatched, MISMATCHED)
    known = [one.reference for one in examples if one.reference is not None]
    if len(known) == len(examples):
        logprobs = torch.tensor(known).unbind(1)
        columns |= {f"{prefix}reference": column for prefix, column in zip(prefixes, logprobs, strict=True)}
    return Batch(columns)


def mismatched(batch: Batch) -> Batch:
    """Return the mismatched responses of a batch, as a batch of their own."""
    named = {name: column for name, column in batch.columns.items() if name.startswith(MISMATCHED)}
    return Batch({name.removeprefix(MISMATCHED): column for name, column in named.items()})


def _columns(examples: Sequence[Tokens], prefix: str) -> dict[str, Tensor]:
    ids = pad_sequence([torch.tensor(example.ids, dtype=torch.long) for example in examples], batch_first=True)
    mask = pad_sequence([torch.tensor(example.learn, dtype=torch.float32) for example in examples], batch_first=True)
    mask[:, 0] = 0.0  # no token precedes the first, so it cannot be predicted
    length = torch.tensor([len(example.ids) for example in examples])
    return {f"{prefix}ids": ids, f"{prefix}learned": mask, f"{prefix}length": length}
