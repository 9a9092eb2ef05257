"""Read a run; results are consistent even while the run is being written and compacted."""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cavesson.errors import UserError, first_line
from cavesson.notebook import SHOWN, page
from cavesson.object_storage import checked_url
from cavesson.record.keys import sorted_rows
from cavesson.record.lines import has_turns, lines_at, lines_of_rows, lines_of_steps
from cavesson.record.read.changes import Changes, changes
from cavesson.record.read.fetching import fetched, fetched_lines
from cavesson.record.read.nearby import runs_nearby
from cavesson.record.rescored import SCHEMA, read_rescored, rescored_names
from cavesson.record.rollups import ROLLUP_SCHEMA, merged
from cavesson.record.schema import (
    PLACE_COLUMNS,
    ROW_COLUMNS,
    STEP_COLUMNS,
    TOKEN_COLUMNS,
    TURN_COLUMNS,
    Column,
    arrow_schema,
)
from cavesson.record.segments import (
    TOKEN_KEYS,
    TURN_KEYS,
    Kind,
    LiveSegments,
    Segment,
    growing,
    live_segments,
    overlapping,
    rollups_in,
    union,
    with_steps,
)
from cavesson.record.splits import rollout_counts
from cavesson.record.storage import Location, Storage, reaching, storage
from cavesson.record.tables import NO_TURNS, turn_counts
from cavesson.record.write.fallback_folder import recover
from cavesson.text.masking import masked

if TYPE_CHECKING:
    import duckdb
    import pandas
    import polars

ELSEWHERE = "record"
"""The entry of a run folder's run.json with the URL of the record, if that is not in the folder."""
T = TypeVar("T")
DECLARED = {"rows": ROW_COLUMNS, "tokens": TOKEN_COLUMNS, "turns": TURN_COLUMNS}
_NOT_FINITE = ["step", "split", "column", "not_finite"]


class Rollout(NamedTuple):
    """One rollout: its row as a dictionary and its tokens as a table, ordered by position."""

    row: dict[str, Any]
    tokens: pa.Table


def open(run: Location, allow_remote: bool = False) -> "Run":
    """Open a record, with the arguments and errors of ``cavesson.open``, which adds findings and charts."""
    files = storage(run)
    info = run_info(files)
    elsewhere = info.get(ELSEWHERE)
    if isinstance(elsewhere, str):
        files = _elsewhere(files, elsewhere, allow_remote)
        info = run_info(files)
    with suppress(OSError):  # a folder that may only be read, or a full disk
        recover(files)
    return Run(files, masked(info))


def _elsewhere(files: Storage, url: str, allow_remote: bool) -> Storage:
    """Return the location of a record that a run folder names. The folder may come from a stranger.

    Raises:
        UserError: It is not in object storage, or the user has not allowed it.
    """
    try:
        url = checked_url(url)
    except UserError as error:
        raise UserError(f"{files.path('run.json')}: record: {error}") from None
    if not allow_remote:
        raise UserError(
            f"the record of {files.root} is at {url}; if you trust the run, read it with --allow-remote (in Python, "
            "allow_remote=True), or name that URL instead of the folder"
        )
    return storage(url)


def run_info(run: Location) -> dict[str, Any]:
    """Return the content of ``run.json``.

    Raises:
        UserError: It is missing or unreadable, or the location cannot be reached.
    """
    files = storage(run)
    try:
        info = json.loads(_read_first(files, "run.json"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{files.path('run.json')} is not JSON: {error}") from error
    if not isinstance(info, dict):
        raise UserError(f"{files.path('run.json')} is not a JSON object")
    return info


def _read_first(files: Storage, name: str) -> bytes:
    """Read a file that must exist, as the first access to a location; raise UserError if that fails."""
    with reaching(files):
        try:
            return files.read(name)
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{files.root} is not a run folder: {_why_not(files, name)}") from None


def _why_not(files: Storage, name: str) -> str:
    """Return why a location is not a run, and what may have been meant."""
    is_local = files.filesystem is None
    why = f"it has no {name}" if not is_local or Path(files.root).exists() else "it does not exist"
    near = runs_nearby(Path(files.root)) if is_local else ""
    return f"{why}; {near or '`cavesson import` makes one of the logs of another trainer'}"


class Run:
    """One run. Every call looks at the files anew, so a running run shows its latest steps."""

    def __init__(self, files: Storage, info: dict[str, Any]) -> None:
        self.storage = files
        self.info = info

    @property
    def folder(self) -> str:
        """The path or URL of the run, as text."""
        return self.storage.root

    def __repr__(self) -> str:
        said = [f"{name}={value!r}" for name, value in self.facts.items() if value is not None]
        return f"Run({', '.join([repr(self.folder), *said])})"

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        steps = self.steps()
        facts = {**self.facts, "steps": steps.num_rows or None, **rollout_counts(self.rows(["split"]))}
        facts |= turn_counts(self.arrow("turns", ["role", "error"]))
        numbers = steps["step"].to_pylist()
        curves = {name: (numbers, steps[name].to_pylist()) for name in steps.column_names if name in SHOWN}
        return page(f"Run {self.folder}", facts, curves)

    @property
    def facts(self) -> dict[str, Any]:
        """The algorithm, the format and the model's name, of those that run.json has."""
        model = self.info.get("model")
        name = model.get("name") if isinstance(model, dict) else None
        return {"algorithm": self.info.get("algorithm"), "format": self.info.get("format"), "model": name}

    def segments(self) -> list[Segment]:
        """Return the committed segments that no later attempt superseded, ordered by step."""
        return live_segments(self.storage).rows

    def changes(self, cursor: str | None) -> Changes:
        """Return what is new since the cursor of an earlier call; None = since the beginning."""
        return self.consistent(lambda live: changes(self.storage, live, cursor))

    def rows(self, columns: Sequence[str] | None = None, steps: Iterable[int] | None = None) -> pa.Table:
        """Return rollouts without their tokens, ordered by step and sample; all steps and columns if None.

        Columns are names from ``ROW_COLUMNS``. Values that were not measured are null.
        """
        return self._table("rows", ROW_COLUMNS, columns, steps, ("step", "sample"))

    def tokens(self, step: int, sample: int | None = None) -> pa.Table:
        """Return all columns of the tokens of one step, or of one rollout, ordered by sample and position."""
        if sample is None:
            return self._table("tokens", TOKEN_COLUMNS, None, [step], TOKEN_KEYS)
        return self.tokens_of([(step, sample)])

    def tokens_of(self, keys: Iterable[tuple[int, int]]) -> pa.Table:
        """Return all columns of the tokens of some rollouts (step and sample), ordered by step, sample and position.

        Reads little more of the files than these tokens, and each part of a file once.
        """
        return self._lines_of("tokens", keys, TOKEN_KEYS)

    def turns(self, step: int, sample: int | None = None) -> pa.Table:
        """Return all columns of the turns of one step, or of one rollout, ordered by sample and turn; maybe none."""
        if sample is None:
            return self._table("turns", TURN_COLUMNS, None, [step], TURN_KEYS)
        return self.turns_of([(step, sample)])

    def turns_of(self, keys: Iterable[tuple[int, int]]) -> pa.Table:
        """Return all columns of the turns of some rollouts (step and sample), ordered by step, sample and turn."""
        return self._lines_of("turns", keys, TURN_KEYS)

    def has_turns(self) -> bool:
        """Return whether the record has turns of any rollout."""
        return self.consistent(lambda live: any(has_turns(self.storage, segment) for segment in live.rows))

    def _lines_of(self, kind: Kind, keys: Iterable[tuple[int, int]], order: Sequence[str]) -> pa.Table:
        wanted = np.unique(np.array([(step << 32) + sample for step, sample in keys], np.int64))
        return sorted_rows(self.consistent(lambda live: fetched_lines(self.storage, live, kind, wanted)), order)

    def steps(self) -> pa.Table:
        """Return the metrics, one row per step and one column per metric, ordered by step."""

        def read(live: LiveSegments) -> pa.Table:
            declared = arrow_schema(STEP_COLUMNS).empty_table()
            tables = [lines_of_steps(self.storage, segment, "steps", None, None) for segment in live.steps]
            table = union(declared, *tables).sort_by("step")
            # A merged file has columns for the metrics of all its steps, including superseded ones.
            lacking = [name for name in table.column_names if table[name].null_count == table.num_rows]
            return table.drop_columns([name for name in lacking if name not in declared.column_names])

        return self.consistent(read)

    def rollups(self, columns: Collection[str] | None = None, steps: Collection[int] | None = None) -> pa.Table:
        """Return the roll-ups, one row per level, column, split and step; see docs/record.md for their content.

        Columns are such as ``reward``, ``part/length`` or ``kl_k1``; all columns and steps if None.
        """

        def read(live: LiveSegments) -> pa.Table:
            tables = [ROLLUP_SCHEMA.empty_table()]
            for segment in with_steps(live.rows, steps):
                table = rollups_in(self.storage, segment)
                there = pc.less(table["step"], segment.stop)
                if columns is not None:
                    there = pc.and_(there, pc.is_in(table["column"], pa.array(columns, pa.string())))
                if steps is not None:
                    there = pc.and_(there, pc.is_in(table["step"], pa.array(steps, pa.int32())))
                tables.append(table.filter(there))
            return merged(pa.concat_tables(tables))

        return self.consistent(read)

    def rescored(self) -> pa.Table:
        """Return the rewards that ``cavesson rescore`` has computed, one line per name and rollout.

        Columns are ``name`` and those of ``cavesson.record.rescored.SCHEMA``.
        """
        rows = self.rows(["step", "sample", "attempt"])
        tables = [SCHEMA.insert(0, pa.field("name", pa.string())).empty_table()]
        for name in rescored_names(self.storage):
            table = read_rescored(self.storage, name, rows)
            tables.append(table.add_column(0, "name", pa.array([name] * table.num_rows, pa.string())))
        return pa.concat_tables(tables)

    def not_finite(self) -> pa.Table:
        """Return ``step``, ``split``, ``column`` and ``not_finite``, the number of NaN and infinite values."""

        def read(live: LiveSegments) -> pa.Table:
            parts = [ROLLUP_SCHEMA.empty_table().select(_NOT_FINITE)]
            for segment in live.rows:
                table = rollups_in(self.storage, segment, _NOT_FINITE)
                there = pc.and_(pc.less(table["step"], segment.stop), pc.greater(table["not_finite"], 0))
                parts.append(table.filter(there))
            return pa.concat_tables(parts)

        return self.consistent(read)

    def rollout(self, step: int, sample: int) -> Rollout:
        """Return one rollout, or raise a UserError that the record does not have it."""
        row = self.fetch([(step, sample)]).to_pylist(maps_as_pydicts="strict")[0]
        return Rollout(row, self.tokens(step, sample))

    def fetch(self, keys: Sequence[tuple[int, int]], columns: Sequence[str] | None = None) -> pa.Table:
        """Return the rows of some rollouts, given by step and sample, in this order, reading little more than these.

        Columns are names from ``ROW_COLUMNS``; all of them if None.

        Raises:
            UserError: The record has no such rollout.
        """
        found = self.consistent(lambda live: fetched(self.storage, live, keys, _names(ROW_COLUMNS, columns)))
        return found.select(_names(ROW_COLUMNS, columns))

    def read(
        self,
        segment: Segment,
        kind: Kind,
        columns: Sequence[str] | None = None,
        start: int = 0,
        count: int | None = None,
    ) -> pa.Table:
        """Return the rows of one file of a segment that no later attempt superseded, in file order.

        Args:
            segment: From ``segments()``.
            kind: ``rows``, ``tokens``, ``turns`` or ``rollups``.
            columns: Columns to return; those that the file lacks are null. All columns of the file if None.
            start: First row.
            count: Number of rows; all to the end if None.

        Raises:
            FileNotFoundError: A compaction has merged the segment in the meantime: call ``segments()`` again.
        """
        wanted = None if columns is None else [*columns, "step"]
        if kind == "turns" and not has_turns(self.storage, segment):
            return NO_TURNS if columns is None else NO_TURNS.select(list(columns))
        table = lines_at(self.storage, segment, kind, wanted, start, count)
        if segment.stop <= segment.last:
            table = table.filter(pc.less(table["step"], segment.stop))
        if columns is None:
            return table
        declared = arrow_schema([*ROW_COLUMNS, *PLACE_COLUMNS] if kind == "rows" else DECLARED.get(kind, ()))
        known = [declared.field(name) for name in columns if name in declared.names]
        return union(pa.schema(known).empty_table(), table).select(list(columns))

    def arrow(self, name: str, columns: Sequence[str] | None = None, steps: Iterable[int] | None = None) -> pa.Table:
        """Return ``rows``, ``tokens``, ``turns``, ``steps`` or ``rollups`` as an Arrow table.

        ``columns`` and ``steps`` are the ones to return; all of them if None.
        """
        if name == "rows":
            return self.rows(columns, steps)
        if name == "tokens":
            return self._table("tokens", TOKEN_COLUMNS, columns, steps, TOKEN_KEYS)
        if name == "turns":
            return self._table("turns", TURN_COLUMNS, columns, steps, TURN_KEYS)
        if name not in ("steps", "rollups"):
            raise ValueError(f"unknown table {name!r}; choose rows, tokens, turns, steps or rollups")
        table = self.steps() if name == "steps" else self.rollups()
        if steps is not None:
            table = table.filter(pc.is_in(table["step"], pa.array(steps, pa.int32())))
        return table if columns is None else table.select(list(columns))

    def pandas(
        self, name: str = "rows", columns: Sequence[str] | None = None, steps: Iterable[int] | None = None
    ) -> "pandas.DataFrame":
        """Return the same as ``arrow`` as a pandas data frame; raise UserError if pandas is not installed."""
        require("pandas")
        return self.arrow(name, columns, steps).to_pandas(maps_as_pydicts="strict")

    def polars(
        self, name: str = "rows", columns: Sequence[str] | None = None, steps: Iterable[int] | None = None
    ) -> "polars.DataFrame":
        """Return the same as ``arrow`` as a polars data frame; raise UserError if polars is not installed."""
        require("polars")
        import polars

        found = polars.from_arrow(self.arrow(name, columns, steps))
        assert isinstance(found, polars.DataFrame)
        return found

    @property
    def computed(self) -> dict[str, Callable[[], pa.Table]]:
        """The tables that queries know beside those of files."""
        return {"rollups": self.rollups, "vocabulary": lambda: self.vocabulary, "rescored": self.rescored}

    def sql(self, query: str) -> "duckdb.DuckDBPyRelation":
        """Run a query over ``rows``, ``tokens``, ``turns``, ``steps``, ``rollups``, ``vocabulary`` and ``rescored``."""
        from cavesson.record.read.views import connect

        return self.consistent(lambda live: connect(self.storage, live, query, self.computed).sql(query))

    def token_texts(self, ids: Iterable[int | None]) -> list[str]:
        """Return the text of each id; an id without a text is written as its number, as in ``<17>``."""
        return self._look_up("text", ids)

    def token_strings(self, ids: Iterable[int | None]) -> list[str]:
        """Return the tokenizer's internal string of each id, such as ``Ġthe``; ``<17>`` for an id without one."""
        return self._look_up("token", ids)

    def _look_up(self, column: str, ids: Iterable[int | None]) -> list[str]:
        # A model can have, and sample, more ids than its tokenizer has tokens.
        known = self._vocabularies[column]
        return [f"<{i}>" if (text := known.get(i)) is None else text for i in ids]

    @cached_property
    def vocabulary(self) -> pa.Table:
        """Columns ``token_id``, ``token`` and ``text``, row number = id; empty if none was recorded."""
        try:
            return self.storage.parquet("vocabulary.parquet").read()
        except FileNotFoundError:
            return pa.table({"token_id": [], "token": [], "text": []})

    @cached_property
    def _vocabularies(self) -> dict[str, dict[int | None, str]]:
        return {name: dict(enumerate(self.vocabulary[name].to_pylist())) for name in ("token", "text")}

    def consistent(self, read: Callable[[LiveSegments], T]) -> T:
        """Call ``read`` with the live segments, and retry if a compaction removed some of its files in the meantime.

        Raises:
            UserError: A file is broken, or is missing although it was not merged.
        """
        while True:
            try:
                live = live_segments(self.storage)
                try:
                    return read(live)
                except FileNotFoundError:
                    if live == live_segments(self.storage):
                        raise
            except (ValueError, OSError) as error:
                reason = first_line(error)
                raise UserError(f"the record in {self.folder} cannot be read: {reason}") from error

    def _table(
        self,
        kind: Kind,
        declared: Sequence[Column],
        columns: Sequence[str] | None,
        steps: Iterable[int] | None,
        order: Sequence[str],
    ) -> pa.Table:
        names = _names(declared, columns)
        wanted = None if steps is None else set(steps)
        read = list(dict.fromkeys([*names, *order]))

        empty = arrow_schema([c for c in declared if c.name in read]).empty_table()

        def table(live: LiveSegments) -> pa.Table:
            parts, open_ones = [empty], growing(live.rows)
            for segments in overlapping(with_steps(live.rows, wanted)):
                lines = (self._lines(kind, segment, segment in open_ones, read, wanted) for segment in segments)
                parts.append(sorted_rows(union(empty, *lines), order))
            return union(*parts)

        return self.consistent(table).select(names)

    def _lines(
        self, kind: Kind, segment: Segment, growing: bool, columns: list[str], steps: set[int] | None
    ) -> pa.Table:
        if kind != "turns" and not (kind == "tokens" and growing):
            return lines_of_steps(self.storage, segment, kind, columns, steps)
        rows = lines_of_steps(self.storage, segment, "rows", ["step", "sample", "turn_count"], steps)
        return lines_of_rows(self.storage, segment, kind, rows, columns, steps)


def require(package: str) -> None:
    """Raise UserError if an optional package is not installed."""
    if find_spec(package) is None:
        raise UserError(f"{package} is not installed; install it with: pip install {package}")


def _names(declared: Sequence[Column], columns: Sequence[str] | None) -> list[str]:
    known = [column.name for column in declared]
    if columns is None:
        return known
    if unknown := set(columns).difference(known):
        raise ValueError(f"there is no column {min(unknown)!r}; known: {', '.join(known)}")
    return list(columns)
