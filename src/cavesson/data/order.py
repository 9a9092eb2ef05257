"""Endless passes over data.

What stands at a position is a function of the seed and the position alone. A resumed run therefore goes on where it
stopped, and there is nothing to save.
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
    """An endless sequence of passes over data, of which any stretch can be had."""

    @property
    def size(self) -> int | None:
        """Items of one pass; None where nobody has counted."""

    def take(self, start: int, count: int) -> list[T]:
        """Items number start … start + count − 1."""


def permutation(seed: int, pass_number: int, size: int, *, source: int = 0, block: int = 0) -> NDArray[np.int64]:
    """The order of one pass over `size` items, or over one block of them; no two passes, blocks or sources share it."""
    return generator(seed, Purpose.PROMPT_ORDER, step=pass_number, row=(source << 32) + block).permutation(size)


class InMemory(Generic[T]):
    """Passes over a list; shuffled, every pass has an order of its own.

    Args:
        items: the list.
        seed: the seed of the run.
        shuffle: whether every pass is permuted.
        source: number of the source in a mix, so that sources are shuffled independently.
    """

    def __init__(self, items: Sequence[T], seed: int, *, shuffle: bool = True, source: int = 0):
        if not items:
            raise UserError("there is no row left to train on")
        self.items, self.seed, self.shuffle, self.source = items, seed, shuffle, source
        self._latest = (-1, np.arange(0))

    @property
    def size(self) -> int:
        """Items of one pass."""
        return len(self.items)

    def take(self, start: int, count: int) -> list[T]:
        """Items number start … start + count − 1."""
        return [self.items[index] for index in self.indices(start, count)]

    def indices(self, start: int, count: int) -> list[int]:
        """Where in the list the items number start … start + count − 1 are."""
        if not self.shuffle:
            return [number % self.size for number in range(start, start + count)]
        return [int(self._pass(number // self.size)[number % self.size]) for number in range(start, start + count)]

    def with_items(self, items: Sequence[U]) -> "InMemory[U]":
        """The same order over other items, one for each of these."""
        if len(items) != self.size:
            raise ValueError(f"{len(items)} items cannot take the places of {self.size}")
        return InMemory(items, self.seed, shuffle=self.shuffle, source=self.source)

    def _pass(self, number: int) -> NDArray[np.int64]:
        if self._latest[0] != number:
            self._latest = (number, permutation(self.seed, number, self.size, source=self.source))
        return self._latest[1]


class Streamed(Generic[T]):
    """Passes over what is read anew in every pass, shuffled in blocks.

    Reading goes forward. For a stretch that lies behind, as after a resume, the source is opened again and skipped
    to the stretch; whole passes are skipped without reading once the length of one is known.

    Args:
        open: begins to read; the items must be the same in the same order every time.
        seed: the seed of the run.
        shuffle: whether the items of a block are permuted.
        buffer: items per block; so many are in memory.
        source: number of the source in a mix.
    """

    def __init__(
        self,
        open: Callable[[], Iterable[T]],
        seed: int,
        *,
        shuffle: bool = True,
        buffer: int = 10_000,
        source: int = 0,
    ):
        self.open, self.seed, self.shuffle, self.buffer, self.source = open, seed, shuffle, buffer, source
        self._size: int | None = None
        self._restart(0)

    @property
    def size(self) -> int | None:
        """Items of one pass; None before the first pass has ended."""
        return self._size

    def take(self, start: int, count: int) -> list[T]:
        """Items number start … start + count − 1."""
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
        """Back to the beginning of the last pass before the target that can be found without reading."""
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
                raise UserError("there is no row left to train on")
            self._size = size


def _blocks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while block := list(islice(rest, size)):
        yield block


class Mixed(Generic[T]):
    """Several streams interleaved by weight; each makes passes of its own.

    Args:
        sources: the streams.
        weights: how often each has its turn, relative to the others.
    """

    def __init__(self, sources: Sequence[Stream[T]], weights: Sequence[float]):
        self.sources, self.weights = sources, weights
        self._shares = _shares(weights)

    def with_items(self, items: Sequence[U]) -> "Mixed[U]":
        """The same order over other items, one for each of the sources' lists, one list after the other."""
        rest = iter(items)
        sources = []
        for source in self.sources:
            assert isinstance(source, InMemory)
            sources.append(source.with_items([next(rest) for _ in range(source.size)]))
        return Mixed(sources, self.weights)

    @property
    def items(self) -> list[T]:
        """The items of all sources, which are lists, one list after the other."""
        return [item for source in self.sources if isinstance(source, InMemory) for item in source.items]

    @property
    def size(self) -> int | None:
        """Items of all sources together; None while one of them is unknown."""
        sizes = [source.size for source in self.sources]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def take(self, start: int, count: int) -> list[T]:
        """Items number start … start + count − 1."""
        turns = [self.turn(position) for position in range(start, start + count)]
        first: dict[int, int] = {}
        counts: dict[int, int] = {}
        for source, index in turns:
            first.setdefault(source, index)
            counts[source] = counts.get(source, 0) + 1
        # The turns of one source are consecutive stretches of it.
        taken = {source: iter(self.sources[source].take(first[source], counts[source])) for source in counts}
        return [next(taken[source]) for source, _ in turns]

    def turn(self, position: int) -> tuple[int, int]:
        """Whose turn it is at a position, and its how-manieth (from 0) that is.

        The first source has had round(n · share) of the first n turns; the rest is divided in the same way among the
        others. So no turn depends on an earlier one, and no source is further from its share than one turn for every
        two sources.
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
    """Endless passes over one source, or over a mix of several.

    Args:
        sources: lists, or what is read anew by every iteration.
        weights: how often each has its turn, relative to the others.
        seed: the seed of the run.
        shuffle: a new order in every pass.
        buffer: items per block of what is no list, see `Streamed`.
    """
    streams: list[Stream[T]] = [
        InMemory(items, seed, shuffle=shuffle, source=number)
        if isinstance(items, Sequence)
        else Streamed(items.__iter__, seed, shuffle=shuffle, buffer=buffer, source=number)
        for number, items in enumerate(sources)
    ]
    return streams[0] if len(streams) == 1 else Mixed(streams, weights)


def _shares(weights: Sequence[float]) -> list[Fraction]:
    """What each source takes of what those before it leave; fractions, so that no turn is lost to rounding."""
    exact = [Fraction(weight) for weight in weights]
    return [weight / sum(exact[i:]) for i, weight in enumerate(exact)]


def _rounded(number: Fraction) -> int:
    return int(number + Fraction(1, 2))
