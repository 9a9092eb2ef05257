"""Export a run folder as tables in common formats: CSV, JSON lines or Parquet."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.csv as pc_csv
import pyarrow.parquet as pq

from cavesson.exporters.portions import portions, rollouts_by_step, schemas
from cavesson.importers.fields import to_json
from cavesson.record import open as open_run
from cavesson.record.read.reader import Run
from cavesson.record.schema import ROW_COLUMNS, TOKEN_COLUMNS, TURN_COLUMNS, Column, arrow_schema
from cavesson.record.segments import Kind
from cavesson.record.storage import Location
from cavesson.record.write.new_folder import new_folder
from cavesson.text.spreadsheet import cell

Format = Literal["csv", "jsonl", "parquet"]


def export(
    place: Location, out_folder: Path, allow_remote: bool = False, *, format: Format, quote_formulas: bool = False
) -> int:
    """Write ``rows``, ``tokens``, ``turns``, ``steps`` and ``vocabulary`` as files; return the number of rollouts.

    The folder to write must not exist, or be empty. With ``allow_remote``, the record may be at another place that the
    run's folder names. ``quote_formulas`` puts ``'`` before texts in CSV that a spreadsheet would interpret as
    formulas.

    Raises:
        UserError: ``place`` is not a run, or ``out_folder`` is not empty.
    """
    run = open_run(place, allow_remote)
    # The last steps are those of now, also if the run is still in training.
    counts, metrics = rollouts_by_step(run), run.steps()
    with new_folder(out_folder) as folder:

        def write(name: str, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
            columns = (table.select(schema.names).cast(schema) for table in tables)
            _WRITERS[format](folder / f"{name}.{format}", schema, columns, quote_formulas)

        kinds: dict[Kind, Sequence[Column]] = {"rows": ROW_COLUMNS, "tokens": TOKEN_COLUMNS}
        if run.has_turns():
            kinds["turns"] = TURN_COLUMNS
        for kind, declared in kinds.items():
            tables = (run.arrow(kind, steps=steps) for steps in portions(counts))
            write(kind, _schema(run, kind, declared), tables)
        for name, table in (("steps", metrics), ("vocabulary", run.vocabulary)):
            write(name, table.schema, [table])
    return sum(counts.values())


def _schema(run: Run, kind: Kind, declared: Sequence[Column]) -> pa.Schema:
    """Return the schema of the declared columns, with 64-bit numbers if any file of the run has them."""
    known = pa.unify_schemas([arrow_schema(declared), *schemas(run, kind)], promote_options="permissive")
    return pa.schema([pa.field(column.name, known.field(column.name).type) for column in declared])


def _write_parquet(file: Path, schema: pa.Schema, tables: Iterable[pa.Table], quote_formulas: bool) -> None:
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for table in tables:
            writer.write_table(table)


def _write_json_lines(file: Path, schema: pa.Schema, tables: Iterable[pa.Table], quote_formulas: bool) -> None:
    with file.open("w", encoding="utf-8", newline="\n") as out:
        for table in tables:
            for line in table.to_pylist(maps_as_pydicts="strict"):
                out.write(to_json({name: value for name, value in line.items() if value is not None}) + "\n")


def _write_csv(file: Path, schema: pa.Schema, tables: Iterable[pa.Table], quote_formulas: bool) -> None:
    schema = pa.schema(
        [pa.field(cell(f.name, quote_formulas), pa.string() if _is_text(f.type) else f.type) for f in schema]
    )
    with pc_csv.CSVWriter(file, schema) as writer:
        for table in tables:
            writer.write_table(pa.table([_cells(column, quote_formulas) for column in table.columns], schema=schema))


def _cells(column: pa.ChunkedArray, quote_formulas: bool) -> pa.Array | pa.ChunkedArray:
    if not _is_text(column.type) or (pa.types.is_string(column.type) and not quote_formulas):
        return column
    cells = [cell(value, quote_formulas) for value in column.to_pylist(maps_as_pydicts="strict")]
    return pa.array(cells, pa.string())


def _is_text(kind: pa.DataType) -> bool:
    """Whether a column is written as text in CSV: strings, and lists and maps as JSON."""
    return bool(pa.types.is_string(kind) or pa.types.is_nested(kind))


_WRITERS = {"csv": _write_csv, "jsonl": _write_json_lines, "parquet": _write_parquet}
