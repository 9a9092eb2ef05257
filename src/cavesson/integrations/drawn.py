"""What an engine sampled in a step, found again in the responses that the trainer made of it."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from cavesson.record.precision import Array


class Drawn:
    """The turns that an engine sampled, by the tokens before each of them."""

    def __init__(self) -> None:
        self._turns: dict[int, list[tuple[list[int], list[int]]]] = defaultdict(list)
        self._factors: Array = np.zeros(0, np.uint64)
        self._random = np.random.default_rng(0)

    def add(self, before: Sequence[int], ids: Sequence[int]) -> None:
        """Add a sampled turn and all tokens before it."""
        key = int(self._sums(before)[-1])
        self._turns[key].append((list(before), list(ids)))

    def sampled(self, prompt: Sequence[int], ids: Sequence[int]) -> Array | None:
        """Return [T] whether each token after a prompt was sampled; None if the response is not made of these turns.

        Of turns with the same tokens before them, a response contains the longest one that fits: the others end where
        the tokens of a tool begin, say. The last turn may have been cut to the greatest length.
        """
        whole, covered = [*prompt, *ids], len(prompt)
        sums = self._sums(whole)
        ends = np.flatnonzero(np.isin(sums, np.fromiter(self._turns, np.uint64, len(self._turns))))
        found = np.zeros(len(whole), bool)
        if covered not in ends:
            return None
        for end in ends[ends >= covered].tolist():
            if end < covered:
                continue
            turns = self._turns[int(sums[end])]
            fits = [len(own) for before, own in turns if before == whole[:end] and _begins(own, whole[end:])]
            if not fits:
                if end == len(prompt):
                    return None
                continue  # the tokens of a tool happen to end like those before a turn of another response
            covered = min(end + max(fits), len(whole))
            found[end:covered] = True
        return found[len(prompt) :]

    def _sums(self, ids: Sequence[int]) -> Array:
        """Return [T + 1] a hash of each beginning of some tokens, the empty one first."""
        if len(self._factors) < len(ids):
            more = self._random.integers(0, 2**64, 2 * len(ids), np.uint64)
            self._factors = np.append(self._factors, more)
        values = (np.asarray(ids, np.int64) + 1).astype(np.uint64) * self._factors[: len(ids)]
        return np.append(np.zeros(1, np.uint64), np.cumsum(values, dtype=np.uint64))


def _begins(own: list[int], rest: list[int]) -> bool:
    return own[: len(rest)] == rest[: len(own)]
