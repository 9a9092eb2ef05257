"""What every format returns for a record: its rollouts, or the reason why it has none."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cavesson.importers.packing import Values
from cavesson.record.splits import HELD_OUT

if TYPE_CHECKING:
    from cavesson.importers.prime_annotations import Annotations


class Broken(Exception):
    """Raised for a record that is not a rollout of its format; the message says what was expected."""


class Inexact(Exception):
    """Raised if JSON to be kept may contain an integer beyond 64 bits; parse the record with ``parse_exactly`` then."""


class Origin(NamedTuple):
    """The location of a record, and how it was read."""

    path: Path
    line: int
    """From 1; of a table, the row."""
    rank: int | None = None
    """Number of the process that wrote the file."""
    exact: bool = False
    """Whether ``parse_exactly`` read it."""


class ImportedRollout(NamedTuple):
    """One rollout in the form that the record needs."""

    step: int
    row: dict[str, Any]
    """Columns of the record's rows that the source gives."""
    tokens: dict[str, Values]
    """Columns of the record's tokens, each as long as it came; ``mask`` where some before the end were not learned."""
    real: int
    """How many tokens, from the first, are not padding."""


@dataclass(frozen=True)
class Format:
    """An import format. To add one, define it in a new file and add it to the table in ``importers/__init__.py``."""

    name: str
    what: str
    patterns: tuple[str, ...]
    """Its files in a folder; the first pattern that any file matches is the one that is read."""
    recognises: Callable[[Mapping[str, Any]], bool]
    """Whether a record, whole and readable, is of this format."""
    rollouts: Callable[[dict[str, Any], Origin], Iterable[ImportedRollout]]
    """The rollouts of one record; raises ``Broken``."""
    ranks: bool = False
    """Whether the folder holds one file per process."""
    annotations: "Callable[[], Annotations] | None" = None
    """What is written about records after them, in separate files; None = nothing."""

    def held_out(self) -> "Format":
        """Return the same format for files with responses to held-out prompts; it refuses those of training."""

        def rollouts(record: dict[str, Any], place: Origin) -> Iterable[ImportedRollout]:
            for found in self.rollouts(record, place):
                if found.row.get("split") not in (None, HELD_OUT):
                    raise Broken(f"'split' is {found.row['split']!r}, which --held-out contradicts")
                yield found._replace(row=found.row | {"split": HELD_OUT})

        return replace(self, rollouts=rollouts)
