"""One rollout: its texts, its row, its turns, its tokens and the other responses to its prompt."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import Field

from cavesson.board.groups import group_of
from cavesson.board.pieces import PARTIAL, bytes_of
from cavesson.board.rows import numbers
from cavesson.board.runs import Board, NotFoundError, OpenRun, UnreadableError, reading
from cavesson.board.selection import RunQuery, step_of
from cavesson.errors import UserError
from cavesson.index.columns import Array
from cavesson.index.prompt_ids import id_of
from cavesson.index.snapshot import Snapshot
from cavesson.record.read.not_learned import padding_at_end
from cavesson.record.schema import SOURCE_CODES
from cavesson.record.splits import GIVEN, HELD_OUT, Split

TOKEN_TYPES = {pa.bool_(): "uint8", pa.int32(): "int32", pa.float32(): "float32", pa.float64(): "float32"}
NOT_SENT = {"step", "sample", "token"}
TURN_FACTS = ["role", "name", "arguments", "text", "first_token", "tokens", "seconds", "error", "reward"]
TEXTS = ("prompt", "response", "ref_response", "ground_truth", "extra")
MAX_TEXT = 2_000_000
"""Characters of a text that are sent."""


class Shown(NamedTuple):
    """A rollout as the board shows it."""

    row: dict[str, Any]
    turns: list[dict[str, Any]]
    tokens: pa.Table
    """without padding at its end"""
    padding: int
    """how many tokens that was"""


class RolloutQuery(RunQuery):
    step: int = Field(ge=0, lt=2**31)
    """Training step."""
    sample: int = Field(ge=-(2**31), lt=2**31)
    """Index in the step's batch."""


def rollout(board: Board, query: RolloutQuery) -> dict[str, Any]:
    """Return the full texts and all columns of one rollout, its turns, and the addresses of its tokens."""
    run = board.run(query.run)
    found, turns, tokens, padding = read(run, query.step, query.sample)
    row = dict(found)
    row |= {name: dict(row.pop(f"reward_{name}") or {}) for name in ("parts", "weights", "reasons")}
    base = f"/api/runs/{run.key}/rollouts/{query.step}/{query.sample}"
    columns, offset = [], 0
    for name, values in token_columns(tokens):
        columns.append({"name": name, "dtype": values.dtype.name, "offset": offset})
        offset += values.nbytes
    return {
        **row,
        **_cut(row),
        "prompt_id": id_of(row["prompt"]),
        "gap": None if None in (row["reward"], row["ref_reward"]) else row["reward"] - row["ref_reward"],
        "labels": [label._asdict() for label in run.labels.of((query.step, query.sample))],
        "conversation": turns,
        **_neighbours(run, query.step, query.sample, split_of(row)),
        "tokens": {
            "count": tokens.num_rows,
            "padding": padding,
            "columns": columns,
            "url": f"{base}/tokens",
            "texts": f"{base}/texts",
        },
    }


def _cut(row: dict[str, Any]) -> dict[str, Any]:
    """Return the texts, cut to what a page can show, and the full length of each text that was cut."""
    cut: dict[str, Any] = {}
    for name in TEXTS:
        text = row[name]
        longer = text is not None and len(text) > MAX_TEXT
        cut |= {name: text[:MAX_TEXT] if longer else text, f"{name}_truncated": len(text) if longer else None}
    return cut


def split_of(row: Mapping[str, Any]) -> Split:
    """Return the split of a row of the record."""
    split: Split | None = row["split"]
    return split if split in (GIVEN, HELD_OUT) else "train"


def read(run: OpenRun, step: int, sample: int) -> Shown:
    """Return the row and the tokens of a rollout, or raise a NotFoundError; recent ones are cached."""
    try:
        key = (step, sample, run.version())
        with reading():
            return run.cache.get("rollouts", key, lambda: _read(run, step, sample), most=8)
    except UnreadableError:
        raise
    except UserError as error:
        raise NotFoundError(str(error)) from None


def _read(run: OpenRun, step: int, sample: int) -> Shown:
    row, tokens = run.record.rollout(step, sample)
    padding = padding_at_end(run.record, tokens)
    turns = run.record.turns(step, sample).select(TURN_FACTS).to_pylist()
    cut = [turn | {"text": turn["text"] and turn["text"][:MAX_TEXT]} for turn in turns]
    return Shown(row, cut, tokens.slice(0, tokens.num_rows - padding), padding)


def tokens(board: Board, query: RolloutQuery) -> bytes:
    """Return the token columns one after another, little-endian; values that were not measured are NaN."""
    table = read(board.run(query.run), query.step, query.sample).tokens
    return b"".join(values.tobytes() for _, values in token_columns(table))


def token_columns(table: pa.Table) -> list[tuple[str, Array]]:
    """Return the name and the [T] values of each measured column; wider dtypes come first, so that all are aligned.

    ``source`` is an index into ``SOURCES``, 255 if it is unknown.
    """
    columns = []
    for name in table.column_names:
        column = table[name].combine_chunks()
        if name == "source" and column.null_count < len(column):
            columns.append((name, np.array([SOURCE_CODES[source] for source in column.to_pylist()]).astype(np.uint8)))
        if name in NOT_SENT or column.type not in TOKEN_TYPES or column.null_count == len(column):
            continue
        dtype = np.dtype(TOKEN_TYPES[column.type]).newbyteorder("<")
        if dtype.kind != "f":
            column = column.fill_null(-1 if dtype.kind == "i" else True)
        with np.errstate(over="ignore"):
            columns.append((name, column.to_numpy(zero_copy_only=False).astype(dtype)))
    return sorted(columns, key=lambda named: -named[1].itemsize)


def texts(board: Board, query: RolloutQuery) -> dict[str, Any]:
    """Return the text of each token; if some tokens are parts of characters, their bytes too, else null."""
    run = board.run(query.run)
    table = read(run, query.step, query.sample).tokens
    given, ids = table["token"].to_pylist(), table["token_id"].to_pylist()
    known = run.token_texts(ids)
    pieces = [text if token is None else token for token, text in zip(given, known, strict=True)]
    if not any(PARTIAL in piece for piece in pieces):
        return {"texts": pieces, "bytes": None}
    strings = run.record.token_strings(ids)
    parts = [bytes_of(string) if PARTIAL in piece else None for piece, string in zip(pieces, strings, strict=True)]
    return {"texts": pieces, "bytes": [None if part is None else list(part) for part in parts]}


def _neighbours(run: OpenRun, step: int, sample: int, split: Split) -> dict[str, Any]:
    """Return the columns of all responses to the same prompt in the same step, and the neighbouring rollouts.

    All are of the split of the rollout, which is included. ``previous`` and ``next`` are in the order of step and
    sample.
    """
    snapshot = run.snapshot()
    here = step_of(run, snapshot, step, split)
    if not len(here.rows):
        return {"siblings": [], "previous": None, "next": None}
    samples = snapshot.raw("sample")[here.rows]
    group = group_of(snapshot, here.rows)
    found = numbers(snapshot, here.rows[np.isin(group, group[samples == sample])])
    line = [here.before, *here.rows.tolist(), here.behind]
    place = int(np.searchsorted(samples, sample))
    return {
        "siblings": found,
        "previous": _neighbour(snapshot, line[place]),
        "next": _neighbour(snapshot, line[min(place + 2, len(line) - 1)]),
    }


def _neighbour(snapshot: Snapshot, row: int | None) -> dict[str, int] | None:
    return None if row is None else {name: int(snapshot.raw(name)[row]) for name in ("step", "sample")}
