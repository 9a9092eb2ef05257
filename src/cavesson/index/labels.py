"""The labels of rollouts as columns that a filter can use."""

from collections.abc import Callable, Collection, Sequence

import numpy as np
import pyarrow as pa

from cavesson.index.columns import Array
from cavesson.index.said import Test
from cavesson.index.snapshot import Snapshot
from cavesson.record.labels import Key, Label, Labels, pairs

FLAGS = ("starred", "chosen", "rejected")
"""Names that are true or false."""
RATING = "rating"
"""The mean of all ratings of a rollout."""
LABEL_TEXTS = ("tag", "note", "author")
"""Names of texts, of which a rollout can have several: one of them passes a test, or none."""
LABELS = (*FLAGS, RATING, *LABEL_TEXTS)


class LabelColumns:
    """The labels of some rows, each value where it is there."""

    def __init__(self, snapshot: Snapshot, labels: Labels) -> None:
        self.snapshot = snapshot
        self.labels = labels

    def flag(self, name: str) -> Array:
        """Return [rows] which rows have a star, or were chosen or rejected in a pair."""
        if name == "rejected":
            return self.among({key for pair in pairs(self.labels) for key in pair[1:]})
        kind = {"starred": "star", "chosen": "over"}[name]
        return self._where(lambda labels: any(label.name == kind for label in labels))

    def rating(self) -> Array:
        """Return [rows] the mean rating; NaN for rows without one."""
        found = {key: mean for key, own in self.labels.items() if (mean := mean_rating(own.values())) is not None}
        values = np.full(self.snapshot.rows, np.nan)
        for row, key in self._rows(found):
            values[row] = found[key]
        return values

    def where(self, name: str, texts: Sequence[str], test: Test, narrow: bool, only: Array | None) -> Array:
        """Return [rows] where one of the texts passes a test; all texts are at hand, so nothing narrows the search."""
        known = sorted({text for own in self.labels.values() for text in _texts(own.values(), name)})
        passed = test(pa.chunked_array([pa.array(known, pa.string())])).to_pylist()
        passing = {text for text, passes in zip(known, passed, strict=True) if passes}
        return self._where(lambda labels: not passing.isdisjoint(_texts(labels, name)))

    def among(self, keys: Collection[Key]) -> Array:
        """Return [rows] which rows are those of some rollouts."""
        mask = np.zeros(self.snapshot.rows, np.bool_)
        mask[[row for row, _ in self._rows(keys)]] = True
        return mask

    def _where(self, test: Callable[[Collection[Label]], bool]) -> Array:
        return self.among({key for key, own in self.labels.items() if test(own.values())})

    def _rows(self, keys: Collection[Key]) -> list[tuple[int, Key]]:
        if not keys or not self.snapshot.rows:
            return []
        rows = np.flatnonzero(np.isin(self.snapshot.raw("step"), [step for step, _ in keys]))
        return [(row, key) for row, key in zip(rows.tolist(), self.snapshot.keys(rows), strict=True) if key in keys]


def mean_rating(labels: Collection[Label]) -> float | None:
    """Return the mean of the ratings among some labels; None without any."""
    ratings = [int(label.value or 0) for label in labels if label.name == "rating"]
    return sum(ratings) / len(ratings) if ratings else None


def _texts(labels: Collection[Label], name: str) -> set[str]:
    if name == "author":
        return {label.author for label in labels if label.author}
    return {str(label.value) for label in labels if label.name == name}
