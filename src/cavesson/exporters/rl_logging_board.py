"""Export a run folder as RL Logging Board's JSON lines."""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cavesson.errors import UserError
from cavesson.exporters.portions import portions, rollouts_by_step, schemas
from cavesson.importers.fields import to_json
from cavesson.importers.rl_logging_board import OF_EPISODES, ROW_KEYS, TOKEN_KEYS, TURN_KEYS
from cavesson.record import open as open_run
from cavesson.record.read.reader import Run
from cavesson.record.storage import Location
from cavesson.record.write.new_folder import new_folder


def export(place: Location, out_folder: Path, allow_remote: bool = False) -> int:
    """Write one ``rank-NNNN.jsonl`` per rank of a run, and return the number of lines; held-out rollouts go to
    ``held-out/``.

    The folder to write must not exist, or be empty. With ``allow_remote``, the record may be at another place that the
    run's folder names.

    Raises:
        UserError: ``place`` is not a run or lacks the vocabulary for its token ids, or ``out_folder`` is not empty.
    """
    run = open_run(place, allow_remote)
    count = 0
    with new_folder(out_folder) as folder:
        for name, line in _lines(run):
            (folder / name).parent.mkdir(exist_ok=True)
            with (folder / name).open("a", encoding="utf-8", newline="\n") as file:
                file.write(to_json(line) + "\n")
                count += 1
    return count


def _lines(run: Run) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every rollout of the steps recorded so far, with the file that it belongs to."""
    counts = rollouts_by_step(run)
    measured = {name for schema in schemas(run, "tokens") for name in schema.names}
    for steps in portions(counts):
        rows, tokens = run.rows(steps=steps), run.arrow("tokens", steps=steps)
        turns = _turns(run.arrow("turns", steps=steps))
        for step in steps:
            here = pc.field("step") == step
            yield from _lines_of_step(run, rows.filter(here), tokens.filter(here), measured, turns)


def _turns(turns: pa.Table) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Return the turns of each rollout, by step and sample, without values that were not measured."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for turn in turns.to_pylist():
        line = {name: turn[name] for name in TURN_KEYS if turn[name] is not None}
        found.setdefault((turn["step"], turn["sample"]), []).append(line)
    return found


def _lines_of_step(
    run: Run,
    rows: pa.Table,
    tokens: pa.Table,
    measured: Collection[str],
    turns: Mapping[tuple[int, int], list[dict[str, Any]]],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rollouts of a step; an empty response has the empty lists of what was `measured`."""
    if len(tokens):
        measured = [name for name in tokens.column_names if tokens[name].null_count < len(tokens)]
    tokens = _with_token_texts(run, tokens)
    samples = tokens["sample"].to_numpy()
    for row in rows.to_pylist():
        extra = json.loads(row.get("extra") or "{}")
        known = {key: row[key] for key in ROW_KEYS if row.get(key) is not None}
        line = {"step": row["step"], "reward": None} | known
        if said := turns.get((row["step"], row["sample"])):
            line["turns"] = said
        # A number that the source wrote as a text, or a step as a float, is kept unchanged in `extra`.
        line = line | extra if run.info.get("format") == "rl-logging-board" else extra | line
        start, end = np.searchsorted(samples, row["sample"], "left"), np.searchsorted(samples, row["sample"], "right")
        if start < end:
            line |= _token_lists(tokens.slice(start, end - start))
        elif row.get("length") == 0:
            names = {key: name for key, name in TOKEN_KEYS.items() if name not in OF_EPISODES}
            line |= {k: [] for k, name in names.items() if {"token": "token_id"}.get(name, name) in measured}
        # RL Logging Board merges all files of a folder by step.
        yield f"{'held-out/' if row.get('split') == 'eval' else ''}rank-{row.get('rank') or 0:04d}.jsonl", line


def _token_lists(tokens: pa.Table) -> Mapping[str, list[Any]]:
    """Return the lists of one rollout, each without trailing nulls."""
    lists = {}
    for key, name in TOKEN_KEYS.items():
        values = tokens[name].to_pylist()
        without = (None, False) if name == "learned" else (None,)
        while values and values[-1] in without:
            values.pop()
        # That the last tokens were not learned, the format says by ending the other lists before them.
        if values and not (name in OF_EPISODES and all(value in (True, "sampled") for value in values)):
            lists[key] = values
    return lists


def _with_token_texts(run: Run, tokens: pa.Table) -> pa.Table:
    """Fill null values of the column ``token`` from the token ids, if there are any."""
    ids = tokens["token_id"]
    if ids.null_count == len(ids):
        return tokens
    if run.vocabulary.num_rows == 0:
        raise UserError(f"{run.folder} has token ids but no vocabulary.parquet, which turns them into tokens")
    strings = pa.array(run.token_strings(ids.to_pylist()), pa.string())
    return tokens.set_column(tokens.column_names.index("token"), "token", pc.coalesce(tokens["token"], strings))
