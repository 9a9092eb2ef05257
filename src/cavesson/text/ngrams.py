"""The n-grams of many sequences of tokens, counted all at once."""

from functools import cached_property

import numpy as np

from cavesson.sorted_arrays import Array, are_first


class NGrams:
    """The n-grams of some sequences, none of which spans two of them.

    Args:
        number: [N] which n-gram starts at each place, not negative; for single tokens, the tokens.
        owner: [N] the sequence that each is in, ascending.
        among: [N] the set among which n-grams are distinct, ascending: `owner` itself, a step, or 0 for all together.
        size: Tokens of an n-gram.
    """

    def __init__(self, number: Array, owner: Array, among: Array, size: int = 1) -> None:
        self._number, self._owner, self._among, self._size = number, owner, among, size

    def doubled(self) -> "NGrams":
        """Return the n-grams of twice the size."""
        number = self._number
        if self._size > 1:  # combined, the numbers of two n-grams would not fit into 64 bits, but their ranks do
            order, new = self._sorted
            number = np.empty(len(order), np.int64)
            number[order] = np.cumsum(new) - 1
        there = self._owner[: -self._size] == self._owner[self._size :]
        number = _combined(number[: -self._size], number[self._size :])[there]
        owner, among = (values[: -self._size][there] for values in (self._owner, self._among))
        return NGrams(number, owner, among, 2 * self._size)

    def first(self, most: int) -> "NGrams":
        """Return at most so many n-grams of each set: its first ones."""
        sizes = np.bincount(self._among)
        kept = np.arange(len(self._among)) - (np.cumsum(sizes) - sizes)[self._among] < most
        return NGrams(self._number[kept], self._owner[kept], self._among[kept], self._size)

    def counts(self, count: int) -> Array:
        """Return [count] the number of n-grams of each set."""
        return np.bincount(self._among, minlength=count)

    def distinct(self, count: int) -> Array:
        """Compute [count] the distinct n-grams of each set, divided by all its n-grams; NaN if it has none."""
        order, new = self._sorted
        with np.errstate(invalid="ignore"):
            return np.asarray(np.bincount(self._among[order[new]], minlength=count) / self.counts(count))

    @cached_property
    def _sorted(self) -> tuple[Array, Array]:
        """The order that sorts the n-grams by their set and number, and which of these are the first of equal ones."""
        # From ranks on, a number belongs to one set and ascends with it.
        numbers = self._number if self._size > 2 else _combined(self._among, self._number)
        bits = len(numbers).bit_length()
        if int(numbers.max(initial=0)) < 2 ** (63 - bits):
            # If the index fits into the same integer as the number, sorting both at once takes a third of the time.
            both = np.sort(numbers << bits | np.arange(len(numbers)))
            order, numbers = both & (1 << bits) - 1, both >> bits
        else:
            order = np.argsort(numbers)
            numbers = numbers[order]
        return order, are_first(numbers)


def _combined(first: Array, second: Array) -> Array:
    """Combine two numbers that are not negative into one, which ascends with the first."""
    size = int(second.max(initial=0)) + 1
    if (int(first.max(initial=0)) + 1) * size < 2**63:
        return np.asarray(first.astype(np.int64) * size + second)
    return np.unique(np.stack([first, second], axis=1), axis=0, return_inverse=True)[1].reshape(-1)
