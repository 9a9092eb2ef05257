"""Load the rows of the settings: read every source, convert its rows to one kind, and split off held-out rows."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Generic, TypeVar

from cavesson.data.chat import Tools
from cavesson.data.fields import Fields, Row, Skip
from cavesson.data.formats import NAMES, convert, recognise
from cavesson.data.notes import Notes, Reiterable
from cavesson.data.settings import ChatSettings, SourceSettings
from cavesson.data.sources import read
from cavesson.data.types import Demonstration, Labelled, Pair, Prompt
from cavesson.data.usage import Usage
from cavesson.errors import UserError
from cavesson.text.reach import names_in, reach

R = TypeVar("R", bound=Prompt | Demonstration | Pair | Labelled)
T = TypeVar("T")


ARGUMENTS = ("prompts", "responses", "completions")
"""Names that rewards get other arguments under."""


class SourceRows(Generic[R]):
    """The rows of one source, converted to one kind; every iteration reads them again.

    `tools` are offered in conversations without tools of their own. At most `limit` rows are read.
    """

    def __init__(
        self,
        source: SourceSettings,
        kind: type[R],
        *,
        chat: bool = False,
        tools: Tools = (),
        stream: bool = False,
        limit: int | None = None,
    ):
        self.source, self.kind, self.chat, self.tools, self.stream = source, kind, chat, tools, stream
        self.usage = Usage(kind, source.columns)
        """what the columns of the rows that were read last are used for"""
        self.groups: Reiterable[list[R]] = Reiterable(lambda notes: islice(self._converted(notes), limit))
        """the same in groups: what one row of the source gives, such as the two responses of a pair"""

    def __iter__(self) -> Iterator[R]:
        return chain.from_iterable(self.groups)

    def notes(self) -> list[str]:
        """Return remarks about rows of a complete reading; before the first one, of the latest reading so far."""
        return self.groups.notes()

    def _converted(self, notes: Notes) -> Iterator[list[R]]:
        recognised: str | None = None
        self.usage = usage = Usage(self.kind, self.source.columns)
        seen: set[str] = set()
        for number, raw in enumerate(read(self.source, stream=self.stream)):
            if number == 0:
                self._check_mapping(raw)
            seen.update(raw.values)
            row = self.renamed(raw)
            stated = self.source.format or row.format
            if stated is None and recognised is None:
                recognised = recognise(row.values, self.kind, row.place)
            name, fields = stated or recognised or "", Fields(row, notes, chat=self.chat)
            try:
                converted = convert(name, fields, self.kind)
            except Skip as skip:
                usage.add(fields)
                notes.add(str(skip), row.place)
                continue
            usage.add(fields)
            usage.check(fields, name)
            yield [with_tools(one, self.tools, row.place, chat=self.chat) for one in converted]
        self._check_ignored(seen)

    def renamed(self, row: Row) -> Row:
        """Return a row under Cavesson's names of columns, without those that are ignored."""
        mapping, ignored = self.source.columns, set(self.source.ignore)
        if not mapping and not ignored:
            return row
        reached = {ours: reach(row.values, theirs) for ours, theirs in mapping.items()}
        named = {ours: found[0] for ours, found in reached.items() if found}
        # A mapped column is not read again under its own name, not even in part.
        taken = {theirs if theirs in row.values else theirs.partition(".")[0] for theirs in mapping.values()}
        kept = {name: value for name, value in row.values.items() if name not in taken | ignored}
        original = {name: value for name, value in row.values.items() if name not in ARGUMENTS or name in kept}
        return row._replace(values=kept | named, original=original)

    def _check_mapping(self, row: Row) -> None:
        for ours, theirs in self.source.columns.items():
            if not reach(row.values, theirs):
                raise UserError(
                    f"{row.place}: data.columns maps {ours!r} to {theirs!r}, but there is no such column; "
                    f"it has {', '.join(names_in(row.values))}"
                )

    def _check_ignored(self, seen: Collection[str]) -> None:
        for name in self.source.ignore:
            if name not in seen:
                raise UserError(
                    f"{self.source.path}: data.ignore names {name!r}, but there is no such column; "
                    f"there are {', '.join(sorted(seen))}"
                )


def with_tools(row: R, tools: Tools, place: str, *, chat: bool) -> R:
    """Return a row with these tools of the settings, unless it has its own.

    Raises:
        UserError: there are tools, and the row is plain text.
    """
    if not tools:
        return row
    if isinstance(row.prompt, str) and not chat:
        raise UserError(f"{place}: this is plain text; data.tools is for conversations, so set data.chat = true")
    return row if row.tools else replace(row, tools=tools)


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
    settings: ChatSettings
    read: tuple[SourceRows[R], ...]
    """everything that was or is being read, for the sake of its notes and usage"""

    @property
    def train(self) -> list[R]:
        """The rows of all sources, concatenated; when streaming, this reads everything."""
        return [row for source in self.sources for row in source.rows]

    def notes(self) -> list[str]:
        """Return remarks about dropped or skipped rows; when streaming, those of one pass so far."""
        return [line for rows in self.read for line in rows.notes()]

    def usage(self) -> list[str]:
        """Return what the columns are used for: one line, or one per source where sources differ."""
        lines = {rows.source.path: line for rows in self.read if (line := rows.usage.line())}
        if len(set(lines.values())) > 1:
            return [f"columns of {path}: {line}" for path, line in lines.items()]
        return [f"columns: {line}" for line in set(lines.values())]


def load(settings: ChatSettings, kind: type[R]) -> Loaded[R]:
    """Load the rows of the settings, those that are held out apart, converted to one kind.

    Raises:
        UserError: the data does not exist, rows do not match their format, or no row can be used.
    """
    wanted = settings.mix or (settings,)
    apart = _held_out_source(settings)
    read = [
        SourceRows(
            source, kind, chat=settings.chat, tools=settings.tools, stream=settings.stream, limit=settings.max_rows
        )
        for source in (*wanted, *([] if apart is None else [apart]))
    ]
    held_out = [row for group in _all(read[-1]) for row in group] if apart is not None else []
    sources = []
    for source, rows in zip(wanted, read, strict=False):
        kept: Sequence[R] | SourceRows[R] = rows
        if settings.stream:
            rows.usage = _of_first(rows)
        if not settings.stream:
            first, last = split(_all(rows), settings.validation, source.path)
            kept = [*chain.from_iterable(first)]
            held_out += chain.from_iterable(last)
        sources.append(Source(kept, source.weight))
    return Loaded(tuple(sources), held_out, settings, tuple(read))


def _held_out_source(settings: ChatSettings) -> SourceSettings | None:
    if not settings.has_held_out_source:
        return None
    return SourceSettings(
        path=settings.validation_path or settings.path,
        split=settings.validation_split or "train",
        subset=settings.subset,
        format=settings.format,
        columns=settings.columns,
        ignore=settings.ignore,
    )


def _all(rows: SourceRows[R]) -> list[list[R]]:
    """Return the groups, of which no part may be held out alone."""
    read = list(rows.groups)
    if not read:
        why = "; ".join(rows.notes())
        raise UserError(f"{rows.source.path} contains no {NAMES[rows.kind]}{why and f': {why}'}")
    return read


def _of_first(rows: SourceRows[R]) -> Usage:
    """Return what the columns of the first row are used for."""
    first = SourceRows(rows.source, rows.kind, chat=rows.chat, tools=rows.tools, stream=rows.stream, limit=1)
    list(first)
    return first.usage


def split(rows: list[T], fraction: float, source: str | None) -> tuple[list[T], list[T]]:
    """Split rows into the first part and the last fraction.

    Raises:
        UserError: one of the two parts is empty, although the fraction is not 0.
    """
    last = round(len(rows) * fraction)
    if fraction and not 0 < last < len(rows):
        raise UserError(f"{source}: data.validation = {fraction:g} of its {len(rows)} rows leaves one part empty")
    return rows[: len(rows) - last], rows[len(rows) - last :]
