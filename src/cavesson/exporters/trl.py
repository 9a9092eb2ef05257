"""Export a run folder as the tables that TRL writes with ``log_completions=True``. https://github.com/huggingface/trl."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cavesson.errors import UserError
from cavesson.exporters.portions import portions, rollouts_by_step
from cavesson.record import open as open_run
from cavesson.record.read.reader import Run
from cavesson.record.splits import HELD_OUT
from cavesson.record.storage import Location
from cavesson.record.write.new_folder import new_folder

_READ = ["step", "split", "prompt", "response", "reward", "reward_parts"]
_OURS = ("step", "prompt", "completion", "advantage")


def export(place: Location, out_folder: Path, allow_remote: bool = False) -> int:
    """Write ``completions_NNNNN.parquet`` for every step, held-out responses to ``held-out/``; return their number.

    A row has ``step, prompt, completion``, a column for each part of the reward, or ``reward`` in a run without parts,
    and ``advantage``, which is null: the record has one per token.

    Raises:
        UserError: ``place`` is not a run, a part has the name of another column, or ``out_folder`` is not empty.
    """
    run = open_run(place, allow_remote)
    counts = rollouts_by_step(run)
    with new_folder(out_folder) as folder:
        for steps in portions(counts):
            files: dict[str, list[dict[str, Any]]] = {}
            for row in run.rows(_READ, steps).to_pylist(maps_as_pydicts="strict"):
                inside = "held-out/" if row["split"] == HELD_OUT else ""
                files.setdefault(f"{inside}completions_{row['step']:05d}.parquet", []).append(_line(run, row))
            for name, lines in files.items():
                (folder / name).parent.mkdir(exist_ok=True)
                pq.write_table(_table(lines), folder / name)
    return sum(counts.values())


def _line(run: Run, row: dict[str, Any]) -> dict[str, Any]:
    parts = row["reward_parts"] or {"reward": row["reward"]}
    if taken := parts.keys() & set(_OURS):
        raise UserError(f"{run.folder}: the part {min(taken)!r} of the reward has the name of another column of TRL")
    texts = {"step": row["step"], "prompt": row["prompt"], "completion": row["response"]}
    return {**texts, **parts, "advantage": None}


def _table(lines: list[dict[str, Any]]) -> pa.Table:
    """Return the lines as a table; parts that a response lacks are null."""
    parts = dict.fromkeys(name for line in lines for name in line if name not in _OURS)
    types = {"step": pa.int64(), "prompt": pa.string(), "completion": pa.string()}
    schema = pa.schema([*types.items(), *((name, pa.float64()) for name in (*parts, "advantage"))])
    return pa.Table.from_pylist(lines, schema)
