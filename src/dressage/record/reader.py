"""Reads a run folder; what it returns is consistent while the run is still being written."""

import glob
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from dressage.errors import UserError
from dressage.record.files import SEGMENT_NAME, TOKEN_ORDER, attempts, segment_path
from dressage.record.schema import ROW_COLUMNS, STEP_COLUMNS, TOKEN_COLUMNS, Column, arrow_schema


class Segment(NamedTuple):
    """One rank's rollouts of one step."""

    step: int
    rank: int
    rows: Path
    tokens: Path


class Rollout(NamedTuple):
    """One rollout: its row as a dictionary and its tokens as a table, ordered by position."""

    row: dict[str, Any]
    tokens: pa.Table


def open_run(folder: Path | str) -> "Run":
    """Opens a run folder for reading.

    Raises:
        UserError: ``folder`` has no readable ``run.json``.
    """
    folder = Path(folder)
    path = folder / "run.json"
    if not path.is_file():
        raise UserError(f"{folder} is no run folder: it has no run.json")
    try:
        info = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is no JSON: {error}") from error
    return Run(folder, info)


class Run:
    """One run folder. Every call looks at the disk anew, so a running run shows its latest steps."""

    def __init__(self, folder: Path, info: dict[str, Any]) -> None:
        self.folder = folder
        self.info = info

    def segments(self) -> list[Segment]:
        """Returns the committed segments that no later attempt superseded, ordered by step and rank."""
        live = set(self._live())
        found = []
        for kind, step, attempt, rank in live:
            if kind == "rows" and ("tokens", step, attempt, rank) in live:
                rows, tokens = (segment_path(self.folder, k, step, attempt, rank) for k in ("rows", "tokens"))
                found.append(Segment(step, rank, rows, tokens))
        return sorted(found)

    def rows(self, columns: Sequence[str] | None = None, steps: Iterable[int] | None = None) -> pa.Table:
        """Returns rollouts without their tokens, ordered by step and rank.

        Args:
            columns: Names from ``ROW_COLUMNS``; all of them if None. What was not measured is null.
            steps: Only these steps; all of them if None.
        """
        wanted = None if steps is None else set(steps)
        paths = [str(s.rows) for s in self.segments() if wanted is None or s.step in wanted]
        return ds.dataset(paths, arrow_schema(ROW_COLUMNS), format="parquet").to_table(columns)

    def tokens(self, step: int, sample: int | None = None) -> pa.Table:
        """Returns all columns of the tokens of one step, or of one rollout, ordered by sample and position."""
        wanted = None if sample is None else [("sample", "=", sample)]
        return read_tokens([s.tokens for s in self.segments() if s.step == step], wanted)

    def steps(self) -> pa.Table:
        """Returns the metrics, one row per step and one column per metric, ordered by step."""
        tables = [pq.ParquetFile(path).read() for path in self._steps_paths()]
        return _union(tables, STEP_COLUMNS)

    def rollout(self, step: int, sample: int) -> Rollout:
        """Returns one rollout.

        Raises:
            UserError: The record has no such rollout.
        """
        rows = self.rows(steps=[step])
        found = rows.filter(pc.equal(rows["sample"], sample)).to_pylist(maps_as_pydicts="strict")
        if not found:
            raise UserError(f"{self.folder} has no sample {sample} in step {step}, which has {rows.num_rows} rollouts")
        return Rollout(found[0], self.tokens(step, sample))

    def sql(self, query: str) -> duckdb.DuckDBPyRelation:
        """Runs a query over the views ``rows``, ``tokens`` and ``steps``, as they are on disk now."""
        connection = duckdb.connect(config={"autoinstall_known_extensions": "false"})
        segments = self.segments()
        views = {
            "rows": (ROW_COLUMNS, [s.rows for s in segments]),
            "tokens": (TOKEN_COLUMNS, [s.tokens for s in segments]),
            "steps": (STEP_COLUMNS, self._steps_paths()),
        }
        for name, (columns, paths) in views.items():
            # A view opens every file to learn its columns, so only those are made that the query can mean.
            if name in query.lower():
                _create_view(connection, name, columns, paths)
        return connection.sql(query)

    def token_texts(self, ids: Iterable[int | None]) -> list[str]:
        """Returns the text of each id; an id without a text is written as its number, as in ``<17>``."""
        return self._look_up("text", ids)

    def token_strings(self, ids: Iterable[int | None]) -> list[str]:
        """Returns the tokenizer's own string of each id, such as ``Ġthe``; ``<17>`` where it has none."""
        return self._look_up("token", ids)

    def _look_up(self, column: str, ids: Iterable[int | None]) -> list[str]:
        # A model can have more ids than its tokenizer has tokens, and sample them.
        known: dict[int | None, str] = dict(enumerate(self.vocabulary[column].to_pylist()))
        return [f"<{i}>" if (text := known.get(i)) is None else text for i in ids]

    @cached_property
    def vocabulary(self) -> pa.Table:
        """Columns ``token_id``, ``token`` and ``text``, row number = id; empty where none was recorded."""
        path = self.folder / "vocabulary.parquet"
        if not path.is_file():
            return pa.table({"token_id": [], "token": [], "text": []})
        return pq.read_table(path)

    def _live(self) -> list[tuple[str, int, int, int]]:
        """Returns (kind, step, attempt, rank) of the files that no later attempt superseded.

        The attempts are read after the files: a new attempt in between can only hide files, never leave both.
        """
        record = self.folder / "record"
        names = [path.name for path in record.iterdir()] if record.is_dir() else []
        keys = [(m[1], int(m[2]), int(m[3]), int(m[4])) for name in names if (m := SEGMENT_NAME.fullmatch(name))]
        starts = attempts(self.folder)
        return [key for key in keys if all(key[1] < start for later, start in starts if later > key[2])]

    def _steps_paths(self) -> list[Path]:
        keys = sorted(key[1:] for key in self._live() if key[0] == "steps")
        return [segment_path(self.folder, "steps", *key) for key in keys]


def read_tokens(paths: Sequence[Path], filters: list[tuple[str, str, Any]] | None = None) -> pa.Table:
    """Returns the tokens of ``paths`` with all of ``TOKEN_COLUMNS``, ordered by sample and position."""
    tables = [pq.read_table(path, filters=filters) for path in paths]
    return _union(tables, TOKEN_COLUMNS).sort_by(TOKEN_ORDER)


def _union(tables: Sequence[pa.Table], columns: Sequence[Column]) -> pa.Table:
    declared = arrow_schema(columns).empty_table()
    return pa.concat_tables([declared, *tables], promote_options="permissive")


def _create_view(
    connection: duckdb.DuckDBPyConnection, name: str, columns: Sequence[Column], paths: Sequence[Path]
) -> None:
    """Creates a view with every declared column, whether or not a file has it."""
    parts = [f"{name}_declared"]
    connection.register(parts[0], arrow_schema(columns).empty_table())
    if paths:
        parts.append(f"{name}_recorded")
        # DuckDB reads names as patterns.
        files = [glob.escape(str(path)) for path in paths]
        connection.read_parquet(files, union_by_name=True).create_view(parts[1])
    union = " UNION ALL BY NAME ".join(f"FROM {part}" for part in parts)
    connection.execute(f"CREATE VIEW {name} AS {union}")
