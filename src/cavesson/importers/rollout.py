"""What every format returns for a record: its rollouts, or the reason why it has none."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from cavesson.importers.packing import Values
from cavesson.record.splits import HELD_OUT


class Broken(Exception):
    """Raised for a record that is not a rollout of its format; the message says what was expected."""


class Inexact(Exception):
    """Raised if JSON to be kept may contain an integer beyond 64 bits; parse the record with ``parse_exactly`` then."""


class Tokenizer(NamedTuple):
    """The vocabulary of the model whose token ids a source has."""

    tokens: Sequence[str]
    """[V] the tokenizer's internal string of each id."""
    texts: Sequence[str]
    """[V] the text of each id."""
    decode: Callable[[Sequence[int]], str]
    """Returns the text of ids."""


class Names(NamedTuple):
    """The names that may say a file's step."""

    inside: str = ""
    """Path from the source folder to the file."""
    outside: str = ""
    """The source folder, with some folders above it."""


NO_NAMES = Names()


class Origin(NamedTuple):
    """The location of a record, and how it was read."""

    path: Path
    line: int
    """From 1; of a table, the row."""
    rank: int | None = None
    """Number of the process that wrote the file."""
    exact: bool = False
    """Whether ``parse_exactly`` read it."""
    names: Names = NO_NAMES
    numeric: frozenset[str] = frozenset()
    """Columns with texts that are all numbers."""


class ImportedRollout(NamedTuple):
    """One rollout in the form that the record needs."""

    step: int
    row: dict[str, Any]
    """Columns of the record's rows that the source gives; ``prompt`` and ``response`` may be known as ids only."""
    tokens: dict[str, Values]
    """Columns of the record's tokens, each as long as it came; ``learned`` where some before the end were not."""
    real: int
    """How many tokens, from the first, are not padding."""
    remarks: tuple[str, ...] = ()
    """What the user should know about how the record was read; counted by text."""
    turns: Sequence[dict[str, Any]] = ()
    """Turns of an episode in their order: columns of the record's turns, as far as they are known."""


class Annotations(Protocol):
    """What is written about records after them, in separate files."""

    def read(self, streams: Sequence[Path], last: bool) -> Sequence[tuple[Path, Any, str]]:
        """Read what is new; return what is broken: its file, the line if there is one, and the reason."""

    def add_to(self, record: Mapping[str, Any]) -> None:
        """Add to a record what has been written about it."""


@dataclass(frozen=True)
class Format:
    """An import format. To add one, define it in a new file and add it to the table in ``importers/__init__.py``."""

    name: str
    what: str
    patterns: tuple[str, ...]
    """Ends of the paths of its files; the first pattern that has files of this format is the one that is read."""
    keys: tuple[frozenset[str], ...]
    """The keys that a record has: all of one of these sets."""
    rollouts: Callable[[dict[str, Any], Origin], Iterable[ImportedRollout]]
    """The rollouts of one record; raises ``Broken``."""
    accepts: Callable[[Mapping[str, Any]], bool] = lambda record: True
    """What else makes a record, whole and readable, one of this format."""
    ranks: bool = False
    """Whether the folder holds one file per process."""
    new_tables: bool = False
    """Whether no table of Weights & Biases repeats rows of an earlier one, so that they can be followed."""
    one_run: bool = True
    """Whether files of the same step or name in different folders are those of different runs."""
    annotations: Callable[[], Annotations] | None = None
    """What is written about records after them, in separate files; None = nothing."""
    check: Callable[[Iterable[Mapping[str, Any]]], None] = lambda records: None
    """Checks the first records; raises ``UserError``."""

    def recognises(self, record: Mapping[str, Any]) -> bool:
        """Whether a record is of this format."""
        return any(keys <= record.keys() for keys in self.keys) and self.accepts(record)

    def resembles(self, record: Mapping[str, Any]) -> bool:
        """Whether a record has some keys of this format, so that it may be a broken one."""
        return any(key in record for keys in self.keys for key in keys if key != "step")

    def held_out(self) -> "Format":
        """Return the same format for files with responses to held-out prompts; it refuses those of training."""

        def rollouts(record: dict[str, Any], place: Origin) -> Iterable[ImportedRollout]:
            for found in self.rollouts(record, place):
                if found.row.get("split") not in (None, HELD_OUT):
                    raise Broken(f"'split' is {found.row['split']!r}, which --held-out contradicts")
                yield found._replace(row=found.row | {"split": HELD_OUT})

        return replace(self, rollouts=rollouts)
