"""Numbers for the distinct prompts of a run, so that counting by prompt needs no sorting."""

from pathlib import Path

import numpy as np

from cavesson.index.columns import MISSING, Array, write_at
from cavesson.sorted_arrays import contains

FILE = "prompts"


class Prompts:
    """Assigns a number to each prompt, in the order of first appearance; ``count`` of them already have one."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.count = count
        hashes = read_prompts(folder, count)
        self._order = np.argsort(hashes)
        self._hashes = hashes[self._order]

    def numbers(self, hashes: Array) -> Array:
        """Return [N] the number of each prompt; each new prompt gets the next number."""
        different, first, of = np.unique(hashes, return_index=True, return_inverse=True)
        is_new = ~contains(self._hashes, different) & (different != MISSING["<i8"])
        if is_new.any():
            new = different[is_new][np.argsort(first[is_new])]
            write_at(self.folder / FILE, self.count, new)
            self._order = np.append(self._order, np.arange(self.count, self.count + len(new)))
            self._hashes = np.append(self._hashes, new)
            by_hash = np.argsort(self._hashes)
            self._order, self._hashes = self._order[by_hash], self._hashes[by_hash]
            self.count += len(new)
        place = np.minimum(np.searchsorted(self._hashes, different), max(self.count - 1, 0))
        known = self._order[place] if self.count else np.zeros(len(different), np.int64)
        numbers = np.where(different == MISSING["<i8"], MISSING["<i4"], known)
        return numbers.astype("<i4")[of]


def read_prompts(folder: Path, count: int) -> Array:
    """Return [count] the hash of each prompt's text, which is the same in every run."""
    return np.fromfile(folder / FILE, "<i8", count) if count else np.empty(0, "<i8")
