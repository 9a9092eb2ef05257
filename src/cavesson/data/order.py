"""Endless passes over data.

The item at a position depends only on the seed and the position. A resumed run therefore continues where it stopped,
without any saved state.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import count as count_from
from itertools import islice
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from cavesson.errors import UserError
from cavesson.randomness import Purpose, generator

T = TypeVar("T")
U = TypeVar("U")


class Stream(Protocol[T]):
    """An endless sequence of passes over data, with access to any slice."""

    @property
    def size(self) -> int | None:
        """Number of items in one pass, or None if it is not known."""

    def take(self, start: int, count: int) -> list[T]:
        """Return items number start … start + count − 1."""


def permutation(seed: int, pass_number: int, size: int, *, source: int = 0, block: int = 0) -> NDArray[np.int64]:
    """Return the order of one pass over `size` items or one block; it differs between passes, blocks and sources."""
    return generator(seed, Purpose.PROMPT_ORDER, step=pass_number, row=(source << 32) + block).permutation(size)


class InMemory(Generic[T]):
    """Passes over a list; with `shuffle`, each pass has a different order.

    `source` is the index of the source in a mix, so that sources are shuffled independently.
    """

    def __init__(self, items: Sequence[T], seed: int, *, shuffle: bool = True, source: int = 0):
        if not items:
            raise UserError("there are no rows left to train on")
        self.items, self.seed, self.shuffle, self.source = items, seed, shuffle, source
        self._latest = (-1, np.arange(0))

    @property
    def size(self) -> int:
        """Number of items in one pass."""
        return len(self.items)

    def take(self, start: int, count: int) -> list[T]:
        """Return items number start … start + count − 1."""
        return [self.items[index] for index in self.indices(start, count)]

    def indices(self, start: int, count: int) -> list[int]:
        """Return the list indices of items number start … start + count − 1."""
        if not self.shuffle:
            return [number % self.size for number in range(start, start + count)]
        return [int(self._pass(number // self.size)[number % self.size]) for number in range(start, start + count)]

    def with_items(self, items: Sequence[U]) -> "InMemory[U]":
        """Return the same order over other items, which replace these one by one."""
        if len(items) != self.size:
            raise ValueError(f"{len(items)} items cannot take the places of {self.size}")
        return InMemory(items, self.seed, shuffle=self.shuffle, source=self.source)

    def _pass(self, number: int) -> NDArray[np.int64]:
        if self._latest[0] != number:
            self._latest = (number, permutation(self.seed, number, self.size, source=self.source))
        return self._latest[1]


class Streamed(Generic[T]):
    """Passes over data that is read again in every pass, shuffled in blocks of `buffer` items, which are held in
    memory.

    `open` starts reading; it must give the same items in the same order every time. Reading goes forward only. For an
    earlier slice, the source is opened again and skipped to that slice. Whole passes are skipped without reading once
    the length of a pass is known.
    """

    def __init__(
        self, open: Callable[[], Iterable[T]], seed: int, *, shuffle: bool = True, buffer: int = 10_000, source: int = 0
    ):
        self.open, self.seed, self.shuffle, self.buffer, self.source = open, seed, shuffle, buffer, source
        self._size: int | None = None
        self._restart(0)

    @property
    def size(self) -> int | None:
        """Number of items in one pass, or None until the first pass has ended."""
        return self._size

    def take(self, start: int, count: int) -> list[T]:
        """Return items number start … start + count − 1."""
        if start < self._position:
            self._restart(start)
        while self._position < start:
            if self._size is not None and start // self._size > self._position // self._size:
                self._restart(start)
            self._position += len(list(islice(self._items, min(start - self._position, self.buffer))))
        items = list(islice(self._items, count))
        self._position += count
        return items

    def _restart(self, target: int) -> None:
        """Go back to the start of the last pass before the target whose position is known without reading."""
        first = 0 if self._size is None else target // self._size
        self._position = first * (self._size or 0)
        self._items = self._passes(first)

    def _passes(self, first: int) -> Iterator[T]:
        for number in count_from(first):
            size = 0
            for block, items in enumerate(_blocks(self.open(), self.buffer)):
                order = permutation(self.seed, number, len(items), source=self.source, block=block)
                yield from (items[i] for i in order) if self.shuffle else items
                size += len(items)
            if not size:
                raise UserError("there are no rows left to train on")
            self._size = size


def _blocks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while block := list(islice(rest, size)):
        yield block


class Mixed(Generic[T]):
    """Several streams interleaved by weight, relative to the others; each makes its own passes."""

    def __init__(self, sources: Sequence[Stream[T]], weights: Sequence[float]):
        self.sources, self.weights = sources, weights
        self._shares = _shares(weights)

    def with_items(self, items: Sequence[U]) -> "Mixed[U]":
        """Return the same order over other items: one for each item of each source, in the order of `items`."""
        rest = iter(items)
        sources = []
        for source in self.sources:
            assert isinstance(source, InMemory)
            sources.append(source.with_items([next(rest) for _ in range(source.size)]))
        return Mixed(sources, self.weights)

    @property
    def items(self) -> list[T]:
        """The items of all in-memory sources, concatenated."""
        return [item for source in self.sources if isinstance(source, InMemory) for item in source.items]

    @property
    def size(self) -> int | None:
        """Total number of items of all sources, or None while the size of one is unknown."""
        sizes = [source.size for source in self.sources]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def take(self, start: int, count: int) -> list[T]:
        """Return items number start … start + count − 1."""
        turns = [self.turn(position) for position in range(start, start + count)]
        first: dict[int, int] = {}
        counts: dict[int, int] = {}
        for source, index in turns:
            first.setdefault(source, index)
            counts[source] = counts.get(source, 0) + 1
        # The items taken from one source are consecutive.
        taken = {source: iter(self.sources[source].take(first[source], counts[source])) for source in counts}
        return [next(taken[source]) for source, _ in turns]

    def turn(self, position: int) -> tuple[int, int]:
        """Return the source of the item at a position, and its index (from 0) within that source.

        The first source provides round(n · share) of the first n items; the rest is divided in the same way among the
        other sources. So no item depends on earlier ones, and no source deviates from its share by more than one item
        for every two sources.
        """
        for source, share in enumerate(self._shares):
            before, after = _rounded(position * share), _rounded((position + 1) * share)
            if after > before:
                return source, before
            position -= before
        raise AssertionError("the last share is 1")


def passes_over(
    sources: Sequence[Iterable[T]], weights: Sequence[float], seed: int, *, shuffle: bool, buffer: int = 10_000
) -> Stream[T]:
    """Return a stream of endless passes over one source, or over a mix of several by their weights.

    Sources are lists, or iterables that every iteration reads again, in blocks of `buffer` items (see `Streamed`).
    """
    streams: list[Stream[T]] = [
        InMemory(items, seed, shuffle=shuffle, source=number)
        if isinstance(items, Sequence)
        else Streamed(items.__iter__, seed, shuffle=shuffle, buffer=buffer, source=number)
        for number, items in enumerate(sources)
    ]
    return streams[0] if len(streams) == 1 else Mixed(streams, weights)


def _shares(weights: Sequence[float]) -> list[Fraction]:
    """Return the share of each source in what the sources before it leave, as exact fractions to avoid rounding."""
    exact = [Fraction(weight) for weight in weights]
    return [weight / sum(exact[i:]) for i, weight in enumerate(exact)]


def _rounded(number: Fraction) -> int:
    return int(number + Fraction(1, 2))
