"""Rewards that were computed again, beside the record: the files `rescored/NAME/*.parquet` of a run."""

import hashlib
import re

import numpy as np
import pyarrow as pa

from cavesson.record.keys import rows_of_tokens
from cavesson.record.schema import ROW_COLUMNS, arrow_schema
from cavesson.record.segments import write_parquet
from cavesson.record.storage import Storage

FOLDER = "rescored"
SCHEMA = arrow_schema(
    column
    for column in ROW_COLUMNS
    if column.name in ("step", "attempt", "sample", "reward", "reward_parts", "reward_weights", "reward_reasons")
)
"""One line per rollout; its columns mean what those of the rows mean, with the other rewards."""
_FILE = re.compile(r"rows-\d{5,}\.parquet")


def rescored_names(files: Storage) -> list[str]:
    """Return the names under which rewards were computed again."""
    return sorted(name for name in files.names(FOLDER) if files.exists(description(name)))


def description(name: str) -> str:
    """Return the name of the file that says which rewards have a name."""
    return f"{FOLDER}/{name}/rewards.json"


def rescored_files(files: Storage, name: str) -> list[str]:
    """Return the files of rewards, in the order in which they were written; none is changed later."""
    return sorted(file for file in files.names(f"{FOLDER}/{name}") if _FILE.fullmatch(file))


def rescored_cursor(files: Storage, name: str) -> str:
    """Return a value that changes whenever rewards are added, or others take the name."""
    stamps = [(file, files.modified(f"{FOLDER}/{name}/{file}")) for file in rescored_files(files, name)]
    return hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]


def read_rescored(files: Storage, name: str, rows: pa.Table) -> pa.Table:
    """Return the rewards, as ``SCHEMA``, of those rollouts of a run that ``rows`` has, in the order of the files.

    ``rows`` are those in force, with ``step``, ``sample`` and ``attempt``: rewards of superseded rollouts are left out.
    """
    tables = [files.parquet(f"{FOLDER}/{name}/{file}").read() for file in rescored_files(files, name)]
    table = pa.concat_tables([SCHEMA.empty_table(), *tables])
    at, is_there = rows_of_tokens(rows, table)
    own, theirs = (_attempts(one) for one in (rows, table))
    is_there[is_there] = own[at[is_there]] == theirs[is_there]
    return table.filter(pa.array(is_there))


def write_rescored(files: Storage, name: str, table: pa.Table) -> None:
    """Add rewards of further rollouts, as ``SCHEMA``."""
    number = len(rescored_files(files, name))
    write_parquet(files, f"{FOLDER}/{name}/rows-{number:05d}.parquet", table)


def _attempts(table: pa.Table) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.asarray(table["attempt"].cast(pa.int64()).fill_null(-1).to_numpy())
