"""Convert source records into rollouts, and many rollouts into one segment of the record."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from cavesson.importers.reading import File, Record, parse, parse_exactly, readable
from cavesson.importers.rollout import Annotations, Broken, Format, ImportedRollout, Inexact, Origin, Tokenizer
from cavesson.importers.tables import tables_of
from cavesson.importers.texts import with_texts
from cavesson.record.maintain.compaction import write_uncommitted
from cavesson.record.segments import Segment


class PartsRead(NamedTuple):
    """The content of some parts of files."""

    steps: Counter[int]
    """How many rollouts each step has."""
    broken: list[list[tuple[Record | None, str]]]
    """Of each part, the records that are not rollouts, and why; None if it is the file that cannot be read."""
    lines: list[int]
    """Of each part, how many lines it has."""
    remarks: Counter[str]
    """How many rollouts each remark is about."""


class RolloutBuffer:
    """Holds rollouts until their sample numbers within each step are known, then writes them.

    ``annotations`` were written after the records; the tokenizer turns token ids into the texts that a source lacks.
    """

    def __init__(
        self,
        folder: Path,
        format: Format,
        annotations: Annotations | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._annotations = annotations
        self._tokenizer = tokenizer
        self._folder = folder
        self._format = format
        self._rollouts: list[ImportedRollout] = []
        self.size = 0
        """Bytes that the held rollouts take, roughly."""
        self.numeric: frozenset[str] = frozenset()
        """Columns with texts that are all numbers."""

    def read(self, parts: Sequence[File]) -> PartsRead:
        """Read some parts of files completely, replacing the rollouts held before."""
        self._rollouts, self.size = [], 0
        broken = [self._read(part) for part in parts]
        return PartsRead(self.steps, broken, [part.lines for part in parts], self.remarks)

    def _read(self, part: File) -> list[tuple[Record | None, str]]:
        broken: list[tuple[Record | None, str]] = []
        for record in readable(part, last=True, unreadable=lambda reason: broken.append((None, reason))):
            try:
                self.add(part, record)
            except Broken as reason:
                broken.append((record, str(reason)))
        return broken

    def add(self, file: File, record: Record) -> None:
        """Add the rollouts of a record, or raise Broken if it is not one of the format; empty lines are ignored."""
        if isinstance(record.content, bytes) and not record.content.strip():
            return
        if record.content is None:
            raise Broken(record.problem)
        try:
            place = Origin(file.path, record.line, file.rank, names=file.names, numeric=self.numeric)
            found = self._parsed(record.content, place)
        except RecursionError:
            raise Broken("lists or objects are nested too deeply to be read") from None
        self._rollouts += found
        self.size += sum(map(_size, found))

    def _parsed(self, content: bytes | dict[str, Any], place: Origin) -> list[ImportedRollout]:
        if not isinstance(content, bytes):
            return self._found(content, place._replace(exact=True))
        try:
            return self._found(_object(parse(content)), place)
        except Inexact:
            return self._found(_object(parse_exactly(content)), place._replace(exact=True))

    def _found(self, record: dict[str, Any], place: Origin) -> list[ImportedRollout]:
        if self._annotations is not None:
            self._annotations.add_to(record)
        return [with_texts(rollout, self._tokenizer) for rollout in self._format.rollouts(record, place)]

    @property
    def steps(self) -> Counter[int]:
        return Counter(rollout.step for rollout in self._rollouts)

    @property
    def remarks(self) -> Counter[str]:
        return Counter(remark for rollout in self._rollouts for remark in rollout.remarks)

    def write(self, first: Mapping[int, int]) -> Segment:
        """Write the held rollouts, of which there must be at least one, as an uncommitted segment.

        ``first`` is the sample number of the first rollout of each step; the others follow in the order of reading.
        """
        numbers = {step: count(number) for step, number in first.items()}
        held = [(rollout, next(numbers[rollout.step])) for rollout in self._rollouts]
        self._rollouts, self.size = [], 0
        # In the order of the record, so that no large table has to be sorted later.
        held.sort(key=lambda one: (one[0].step, -1 if (group := one[0].row.get("group")) is None else group, one[1]))
        rollouts, samples = zip(*held, strict=True)
        return write_uncommitted(self._folder, 0, tables_of(rollouts, samples))


def _size(rollout: ImportedRollout) -> int:
    lines = (rollout.row, *rollout.turns)
    texts = (value for line in lines for value in line.values() if isinstance(value, str))
    return 1024 + sum(map(len, texts)) + sum(len(values.content) for values in rollout.tokens.values())


def _object(content: object) -> dict[str, object]:
    if not isinstance(content, dict):
        raise Broken(f"expected a JSON object, found {type(content).__name__}")
    return content
