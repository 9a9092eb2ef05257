"""What a record costs: bytes per token of each column, and processor seconds to write and to compact it.

The rollouts are those of a real run, drawn again and again with their numbers moved by noise, so that nothing repeats
itself more than it does in a run of that size. `record.py RUN` takes them as they are, once.
"""

import json
import time
from argparse import ArgumentParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import cavesson
from cavesson.record import Recorder, Run, begin_attempt, compact, write_run
from cavesson.record.schema import TOKEN_COLUMNS

FIVE = ("token_id", "logprob", "ref_logprob", "value", "token_reward")
"""Columns that are to take at most 12 bytes per token together."""
NOISE = 0.01


def padded(run: Run, rng: np.random.Generator, rollouts: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rows and tokens [B, T] as a trainer hands them over; `rollouts` of them drawn at random, or all."""
    rows, tokens = run.rows(), run.arrow("tokens")
    count = rows.num_rows
    drawn = np.arange(count) if rollouts is None else rng.integers(0, count, rollouts)
    lengths = rows["length"].to_numpy()
    starts = (np.cumsum(lengths) - lengths)[drawn]
    mask = np.arange(lengths.max()) < lengths[drawn][:, None]
    at = np.where(mask, starts[:, None] + np.arange(lengths.max()), 0)
    columns = {"mask": mask, "token_id": tokens["token_id"].to_numpy()[at]}
    for column in TOKEN_COLUMNS:
        if column.precision is not None and tokens[column.name].null_count == 0:
            values = tokens[column.name].to_numpy()[at]
            factor = 1 if rollouts is None else 1 + NOISE * rng.standard_normal(values.shape)
            columns[column.name] = (values * factor).astype(np.float32)
    texts = {name: rows[name].take(drawn).to_pylist() for name in ("prompt", "response", "reward", "group")}
    return texts, columns


def write(folder: Path, rows: dict[str, Any], tokens: dict[str, Any], batch: int) -> float:
    """Processor seconds to record everything in steps of `batch` rollouts."""
    write_run(folder, {})
    started = time.process_time()
    with Recorder(folder, attempt=begin_attempt(folder, 0)) as recorder:
        for step, start in enumerate(range(0, len(rows["reward"]), batch)):
            part = slice(start, start + batch)
            mine = {name: values[part] for name, values in rows.items()}
            mine["sample"] = np.arange(len(mine["reward"]))
            recorder.rollouts(step, mine, {name: values[part] for name, values in tokens.items()})
    return time.process_time() - started


def sizes(run: Run, tokens: int) -> dict[str, float]:
    """Bytes per token of each token column, of the five and of all files."""
    found: dict[str, float] = {}
    for segment in run.segments():
        metadata = run.storage.parquet(segment.name("tokens")).metadata
        for group in range(metadata.num_row_groups):
            for index in range(metadata.num_columns):
                chunk = metadata.row_group(group).column(index)
                name = chunk.path_in_schema
                found[name] = found.get(name, 0.0) + chunk.total_compressed_size / tokens
    files = sum(path.stat().st_size for path in Path(run.folder, "record").iterdir())
    return found | {"five columns": sum(found[name] for name in FIVE if name in found), "all files": files / tokens}


def main() -> None:
    """Print a JSON line for the record as it is written, and one for what compaction makes of it."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("run", help="a run folder with tokens, such as runs/demo")
    parser.add_argument("--rollouts", type=int, help="draw so many instead of taking the run's own")
    parser.add_argument("--batch", type=int, default=64, help="rollouts per step")
    given = parser.parse_args()
    rows, tokens = padded(cavesson.open(given.run), np.random.default_rng(0), given.rollouts)
    count = int(tokens["mask"].sum())
    with TemporaryDirectory() as name:
        seconds = write(Path(name), rows, tokens, given.batch)
        run = cavesson.open(name)
        numbers: dict[str, Any] = {"record": "as written", "tokens": count, "seconds": seconds, **sizes(run, count)}
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in numbers.items()}))
        started = time.process_time()
        compact(name)
        numbers = {"record": "compacted", "tokens": count, "seconds": time.process_time() - started} | sizes(run, count)
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in numbers.items()}))


if __name__ == "__main__":
    main()
