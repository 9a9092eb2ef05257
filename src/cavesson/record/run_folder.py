"""The files of a run folder other than the record: run.json, the vocabulary and the attempts."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from cavesson.errors import UserError
from cavesson.record.storage import Location, Storage, storage
from cavesson.text.masking import masked

_LIMITS = (2**15 - 1, 2**31 - 1, 2**15)
"""Of the numbers of an attempt: what the columns `attempt`, `step` and `rank` can hold."""


class Attempt(NamedTuple):
    """A start of the run, or a resume."""

    number: int
    start_step: int
    """its first step; readers ignore what earlier attempts recorded from this step on"""
    processes: int
    """those that record; a step is complete when all of them have recorded it"""


def write_run(location: Location, info: Mapping[str, Any]) -> None:
    """Write ``run.json``: the resolved config, versions and other facts about the whole run; secrets are masked."""
    rewrite_run(location, masked(info))


def rewrite_run(location: Location, info: Mapping[str, Any]) -> None:
    """Write ``run.json`` as it is: with the secrets, if it was read with some, without which the run cannot resume."""
    _write_json(storage(location), "run.json", info)


def write_vocabulary(location: Location, tokens: Sequence[str], texts: Sequence[str]) -> None:
    """Write ``vocabulary.parquet``, which maps token ids to text.

    For each of the V ids, ``tokens`` has the tokenizer's internal string, such as ``Ġthe``, and ``texts`` its text,
    such as `` the``.
    """
    ids = pa.array(range(len(tokens)), pa.int32())
    columns = [ids, pa.array(tokens, pa.string()), pa.array(texts, pa.string())]
    with storage(location).writing("vocabulary.parquet") as file:
        pq.write_table(pa.table(columns, names=["token_id", "token", "text"]), file, compression="zstd")


def begin_attempt(location: Location, start_step: int, processes: int = 1) -> int:
    """Record that the run starts or resumes at ``start_step``, and return the number of the new attempt.

    Data that earlier attempts recorded at ``start_step`` and later stays on disk but is no longer read. One process
    calls this function and passes the number to the others. If several ``processes`` each record a part of every step,
    as ranks from 0, a step is read once all of them have recorded it.
    """
    files = storage(location)
    number = max((one.number for one in attempts(files)), default=-1) + 1
    started = datetime.now(UTC).isoformat(timespec="seconds")
    content = {"attempt": number, "start_step": start_step, "processes": processes, "started": started}
    _write_json(files, f"attempts/{number:04d}.json", content)
    return number


def remove_run(location: Location) -> None:
    """Remove the record and all other files of a run, as far as possible."""
    files = storage(location)
    inside = [f"{folder}/{name}" for folder in ("record", "compactions", "attempts") for name in files.names(folder)]
    for name in (*inside, "vocabulary.parquet", "run.json"):
        files.delete(name)


def attempts(files: Storage) -> list[Attempt]:
    """Return all attempts, in order; raise a UserError if the file of one is damaged."""
    names = [name for name in files.names("attempts") if name[0].isdigit() and name.endswith(".json")]
    return sorted(_attempt(files, f"attempts/{name}") for name in names)


def _attempt(files: Storage, name: str) -> Attempt:
    wrong = UserError(f"{files.path(name)} does not say where an attempt starts: put back a copy of the file")
    try:
        content = json.loads(files.read(name))
        found = Attempt(content["attempt"], content["start_step"], content.get("processes", 1))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, IsADirectoryError) as error:
        raise wrong from error
    for number, least, limit in zip(found, (0, 0, 1), _LIMITS, strict=True):
        if type(number) is not int or not least <= number <= limit:
            raise wrong
    return found


def _write_json(files: Storage, name: str, content: Mapping[str, Any]) -> None:
    with files.writing(name) as file:
        file.write(json.dumps(content, indent=2, ensure_ascii=False).encode())
