"""Exports a selection of rollouts as a table, or as data to train on."""

import csv
import io
import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field
from starlette.background import BackgroundTask
from starlette.responses import FileResponse, Response, StreamingResponse

from cavesson.board.runs import Board, OpenRun
from cavesson.board.search import matching
from cavesson.board.selection import Selection, order_of
from cavesson.errors import UserError
from cavesson.exporters.conversations import labelled_pairs, preference_lines, sft_lines
from cavesson.record.labels import Key
from cavesson.record.schema import ROW_COLUMNS, arrow_schema
from cavesson.record.splits import Split
from cavesson.text.spreadsheet import cell

BATCH = 2_000
MEDIA = {
    "csv": "text/csv; charset=utf-8",
    "jsonl": "application/x-ndjson",
    "parquet": "application/vnd.apache.parquet",
    "sft": "application/x-ndjson",
    "preference": "application/x-ndjson",
}
ALL_MEDIA = " ".join(dict.fromkeys(media.split(";")[0] for media in MEDIA.values()))


class ExportQuery(Selection):
    format: Literal["csv", "parquet", "jsonl", "sft", "preference"] = "csv"
    """What to write: a table, or conversations to train on; a preference is a pair whose chosen rollout is selected."""
    sort: str = Field("step", max_length=200)
    """Column to sort by; with - in front the largest first."""
    both: bool = False
    """Rollouts of both splits, whatever split is."""

    @property
    def splits(self) -> Split | None:
        return None if self.both else super().splits


def export(board: Board, query: ExportQuery) -> Response:
    """Return the selected rollouts: all columns as recorded, in CSV with quoted formulas; or conversations to train on.

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
    keys = (snapshot.keys(chunk) for chunk in rows if len(chunk))
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", run.name).strip("-.") or "run"
    ending = f"{query.format}.jsonl" if query.format in ("sft", "preference") else query.format
    headers = {"content-disposition": f'attachment; filename="{name}.{ending}"'}
    if query.format == "parquet":
        return _parquet(map(run.fetch, keys), headers)
    lines = _lines(run, query.format, keys)
    # Read the first rows before the response starts, so that a read error can still be reported.
    first = next(lines, b"")
    return StreamingResponse(chain([first], lines), media_type=MEDIA[query.format], headers=headers)


def _lines(run: OpenRun, format: str, keys: Iterator[list[Key]]) -> Iterator[bytes]:
    if format == "sft":
        return _json_lines(line for some in keys for line in sft_lines(run.record, some))
    if format == "preference":
        known = labelled_pairs(run.record)
        chosen = {key for some in keys for key in some} if known else set()
        return _json_lines(preference_lines(run.record, [pair for pair in known if pair[0] in chosen]))
    tables = map(run.fetch, keys)
    return _csv(tables) if format == "csv" else _jsonl(tables)


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
        yield b"".join(_json_lines(lines))


def _json_lines(lines: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    for line in lines:
        yield (json.dumps(line, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")


def _dictionaries(table: pa.Table) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = table.to_pylist(maps_as_pydicts="strict")
    return lines
