"""Exports a selection of rollouts as CSV, JSON Lines or Parquet."""

import csv
import io
import json
import re
import tempfile
from collections.abc import Iterator
from itertools import chain
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field
from starlette.background import BackgroundTask
from starlette.responses import FileResponse, Response, StreamingResponse

from cavesson.board.runs import Board
from cavesson.board.search import matching
from cavesson.board.selection import Selection, order_of
from cavesson.errors import UserError
from cavesson.record.schema import ROW_COLUMNS, arrow_schema
from cavesson.record.splits import Split
from cavesson.text.spreadsheet import cell

BATCH = 2_000
MEDIA = {"csv": "text/csv; charset=utf-8", "jsonl": "application/x-ndjson", "parquet": "application/vnd.apache.parquet"}
ALL_MEDIA = " ".join(media.split(";")[0] for media in MEDIA.values())


class ExportQuery(Selection):
    format: Literal["csv", "parquet", "jsonl"] = "csv"
    """What to write."""
    sort: str = Field("step", max_length=200)
    """Column to sort by; with - in front the largest first."""
    both: bool = False
    """Rollouts of both splits, whatever split is."""

    @property
    def splits(self) -> Split | None:
        return None if self.both else super().splits


def export(board: Board, query: ExportQuery) -> Response:
    """Return every column of the selected rollouts, as recorded; in CSV, formulas are quoted.

    A search whose hits are still being verified cannot be exported; the response is then an error.
    """
    run = board.run(query.run)
    snapshot = run.snapshot()
    if partial := run.partial(texts=bool(query.text)):
        raise UserError(
            f"{partial.indexed:,} of {partial.of:,} rollouts are indexed so far; export again when all of them are"
        )
    found = matching(run, snapshot, query)
    if found.most is not None:
        raise UserError("the search is not finished yet; export again when its number of hits is exact")
    chunks = order_of(run, snapshot, query.sort).chunks(BATCH)
    rows = (chunk if found.mask is None else chunk[found.mask[chunk]] for chunk in chunks)
    tables = (run.fetch(snapshot.keys(chunk)) for chunk in rows if len(chunk))
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", run.name).strip("-.") or "run"
    headers = {"content-disposition": f'attachment; filename="{name}.{query.format}"'}
    if query.format == "parquet":
        return _parquet(tables, headers)
    lines = _csv(tables) if query.format == "csv" else _jsonl(tables)
    # Read the first rows before the response starts, so that a read error can still be reported.
    first = next(lines, b"")
    return StreamingResponse(chain([first], lines), media_type=MEDIA[query.format], headers=headers)


def _parquet(tables: Iterator[pa.Table], headers: dict[str, str]) -> Response:
    file = tempfile.NamedTemporaryFile(suffix=".parquet")  # noqa: SIM115  it is closed once it has been sent
    # Imported records can have nulls even in columns that are declared non-nullable.
    schema = pa.schema([field.with_nullable(True) for field in arrow_schema(ROW_COLUMNS)])
    with pq.ParquetWriter(file.name, schema, compression="zstd") as writer:
        for table in tables:
            writer.write_table(table.cast(schema))
    return FileResponse(file.name, media_type=MEDIA["parquet"], headers=headers, background=BackgroundTask(file.close))


def _csv(tables: Iterator[pa.Table]) -> Iterator[bytes]:
    names = [column.name for column in ROW_COLUMNS]
    head = _csv_lines([names])
    for table in tables:
        lines = _dictionaries(table)
        yield head + _csv_lines([[cell(line[name], quote_formulas=True) for name in names] for line in lines])
        head = b""
    yield head


def _csv_lines(lines: list[list[Any]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(lines)
    return text.getvalue().encode("utf-8", "surrogatepass")


def _jsonl(tables: Iterator[pa.Table]) -> Iterator[bytes]:
    for table in tables:
        lines = [{name: value for name, value in line.items() if value is not None} for line in _dictionaries(table)]
        yield "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode("utf-8", "surrogatepass")


def _dictionaries(table: pa.Table) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = table.to_pylist(maps_as_pydicts="strict")
    return lines
