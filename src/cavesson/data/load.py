"""Load the rows of the settings: read every source, convert its rows to one kind, and split off held-out rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from cavesson.data.fields import Fields, Row, Skip
from cavesson.data.formats import NAMES, convert, recognise
from cavesson.data.notes import Notes, Reiterable
from cavesson.data.settings import DataSettings, SourceSettings
from cavesson.data.sources import read
from cavesson.data.types import Demonstration, Pair, Prompt
from cavesson.errors import UserError

R = TypeVar("R", bound=Prompt | Demonstration | Pair)
T = TypeVar("T")


class SourceRows(Reiterable[R]):
    """The rows of one source, converted to one kind; every iteration reads them again.

    Args:
        source: the source to read.
        kind: what the rows are converted to.
        stream: whether a Hub data set is read while it is downloaded.
        limit: maximum number of rows to read.
    """

    def __init__(self, source: SourceSettings, kind: type[R], *, stream: bool = False, limit: int | None = None):
        self.source, self.kind, self.stream = source, kind, stream
        super().__init__(lambda notes: islice(self._converted(notes), limit))

    def _converted(self, notes: Notes) -> Iterator[R]:
        recognised: str | None = None
        for number, raw in enumerate(read(self.source, stream=self.stream)):
            if number == 0:
                self._check_mapping(raw)
            row = self.renamed(raw)
            stated = self.source.format or row.format
            if stated is None and recognised is None:
                recognised = recognise(row.values, self.kind, row.place)
            try:
                yield convert(stated or recognised or "", Fields(row, notes), self.kind)
            except Skip as skip:
                notes.add(str(skip), row.place)

    def renamed(self, row: Row) -> Row:
        if not self.source.columns:
            return row
        mapping = self.source.columns
        kept = {name: value for name, value in row.values.items() if name not in {*mapping, *mapping.values()}}
        named = {ours: row.values[theirs] for ours, theirs in mapping.items() if theirs in row.values}
        return row._replace(values=named | kept)

    def _check_mapping(self, row: Row) -> None:
        for ours, theirs in self.source.columns.items():
            if theirs not in row.values:
                raise UserError(
                    f"{row.place}: data.columns maps {ours!r} to {theirs!r}, but there is no such column; "
                    f"it has {', '.join(row.values)}"
                )


@dataclass(frozen=True)
class Source(Generic[R]):
    """The rows of one source that are trained on."""

    rows: Sequence[R] | SourceRows[R]
    """a list, or when streaming what reads them"""
    weight: float


@dataclass(frozen=True)
class Loaded(Generic[R]):
    """The rows of a run."""

    sources: tuple[Source[R], ...]
    """one, or those of a mix"""
    held_out: list[R]
    settings: DataSettings
    read: tuple[SourceRows[R], ...]
    """everything that was or is being read, for the sake of its notes"""

    @property
    def train(self) -> list[R]:
        """The rows of all sources, concatenated; when streaming, this reads everything."""
        return [row for source in self.sources for row in source.rows]

    def notes(self) -> list[str]:
        """Return remarks about dropped or skipped rows; when streaming, those of one pass so far."""
        return [line for rows in self.read for line in rows.notes()]


def load(settings: DataSettings, kind: type[R]) -> Loaded[R]:
    """Load the rows of the settings, converted to one kind.

    Args:
        settings: what to read, and which rows to hold out.
        kind: Prompt, Demonstration or Pair.

    Raises:
        UserError: the data does not exist, rows do not match their format, or no row can be used.
    """
    wanted = settings.mix or (settings,)
    read = [SourceRows(source, kind, stream=settings.stream, limit=settings.max_rows) for source in wanted]
    apart = _held_out_source(settings)
    if apart is not None:
        read.append(SourceRows(apart, kind, stream=settings.stream, limit=settings.max_rows))
    held_out = _all(read[-1]) if apart is not None else []
    sources = []
    for source, rows in zip(wanted, read, strict=False):
        kept: Sequence[R] | SourceRows[R] = rows
        if not settings.stream:
            kept, last = split(_all(rows), settings.validation, source.path)
            held_out += last
        sources.append(Source(kept, source.weight))
    return Loaded(tuple(sources), held_out, settings, tuple(read))


def _held_out_source(settings: DataSettings) -> SourceSettings | None:
    if not settings.has_held_out_source:
        return None
    return SourceSettings(
        path=settings.validation_path or settings.path,
        split=settings.validation_split or "train",
        subset=settings.subset,
        format=settings.format,
        columns=settings.columns,
    )


def _all(rows: SourceRows[R]) -> list[R]:
    read = list(rows)
    if not read:
        why = "; ".join(rows.notes())
        raise UserError(f"{rows.source.path} contains no {NAMES[rows.kind]}{why and f': {why}'}")
    return read


def split(rows: list[T], fraction: float, source: str | None) -> tuple[list[T], list[T]]:
    """Split rows into the first part and the last fraction.

    Raises:
        UserError: one of the two parts is empty, although the fraction is not 0.
    """
    last = round(len(rows) * fraction)
    if fraction and not 0 < last < len(rows):
        raise UserError(f"{source}: data.validation = {fraction:g} of its {len(rows)} rows leaves one part empty")
    return rows[: len(rows) - last], rows[len(rows) - last :]
