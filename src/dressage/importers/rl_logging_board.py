"""RL Logging Board's JSON lines into a run folder, without loss.

The format: https://github.com/HarderThenHarder/RLLoggingBoard. Every line is one rollout; a folder holds one file per
process, and files are merged by ``step``.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dressage.errors import UserError
from dressage.record.files import begin_attempt, new_folder, write_run, write_segment
from dressage.record.recorder import rollout_statistics, table_of
from dressage.record.schema import ROW_COLUMNS, TOKEN_COLUMNS

FORMAT = "rl-logging-board"
ROW_KEYS = {"prompt": str, "response": str, "reward": float, "ref_response": str, "ref_reward": float}
ROW_KEYS |= {"ground_truth": str}
REQUIRED = {"prompt": "a string", "response": "a string", "reward": "a number", "step": "a whole number from 0"}
TOKEN_KEYS = {
    "response_tokens": "token",
    "logprobs": "logprob",
    "ref_logprobs": "ref_logprob",
    "values": "value",
    "token_rewards": "token_reward",
}
"""The format's list → the record's column."""

MAX_RANK = 9999
MAX_STEP = 2**31 - 1


class Line(NamedTuple):
    """Where a line is: a step's rollouts are read when the step is written, so that no more is held in memory."""

    path: Path
    number: int
    offset: int


class Tokens(NamedTuple):
    """One line's tokens: how many, how many of them are no padding, and the columns, each as long as it came."""

    size: int
    real: int
    columns: dict[str, list[Any]]


def import_(source_folder: Path, run_folder: Path) -> int:
    """Writes a run folder from RL Logging Board's files and returns the number of rollouts.

    Every key and value comes back on export: what has no column of its own, or does not fit it exactly (a null, another
    type, an empty list, a list that ends in null), is kept as JSON in ``extra``. Of numbers the value is kept, not the
    spelling: 1 comes back as 1.0. A last number in each file's name is taken for the rank; without one, the files
    are counted in the order of their names.

    Args:
        source_folder: Folder of ``.jsonl`` files, or one such file.
        run_folder: Run folder to write; must not exist, or be empty.

    Raises:
        UserError: There are no such files, or a line is broken (the message names file, line and what was expected), or
            ``run_folder`` is taken.
    """
    ranks = _ranks(source_folder)
    index: dict[int, dict[int, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for rank, path in ranks.items():
        for line, content in _read(path):
            index[content["step"]][rank].append(line)
    with new_folder(run_folder) as folder:
        for step in sorted(index):
            sample = 0
            for rank, lines in sorted(index[step].items()):
                _write(folder, step, rank, sample, [_parse_at(line) for line in lines])
                sample += len(lines)
        begin_attempt(folder, min(index, default=0))
        files = {str(rank): path.name for rank, path in ranks.items()}
        write_run(folder, {"source": str(source_folder.resolve()), "format": FORMAT, "files": files})
    return sum(len(lines) for by_rank in index.values() for lines in by_rank.values())


def _ranks(source: Path) -> dict[int, Path]:
    paths = [source] if source.is_file() else sorted(source.glob("*.jsonl"))
    if not paths:
        raise UserError(f"{source} has no .jsonl files: give the folder that holds them, or one file")
    numbers = [int(found[-1]) for path in paths if (found := re.findall(r"\d+", path.stem))]
    if len(set(numbers)) == len(paths) and max(numbers) <= MAX_RANK:
        return dict(zip(numbers, paths, strict=True))
    return dict(enumerate(paths))


def _read(path: Path) -> Iterator[tuple[Line, dict[str, Any]]]:
    with path.open("rb") as file:
        offset = 0
        for number, text in enumerate(file, start=1):
            line = Line(path, number, offset)
            offset += len(text)
            if text.strip():
                yield line, _parse(line, text)


def _parse_at(line: Line) -> dict[str, Any]:
    with line.path.open("rb") as file:
        file.seek(line.offset)
        return _parse(line, file.readline())


def _parse(line: Line, text: bytes) -> dict[str, Any]:
    where = f"{line.path}, line {line.number}"
    try:
        content = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: expected one JSON object per line: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{where}: expected a JSON object, found {type(content).__name__}")
    for key, expected in REQUIRED.items():
        if key not in content:
            raise UserError(f"{where}: {key!r} is missing, expected {expected}")
        if not (_is_step(content[key]) if key == "step" else _fits(content[key], ROW_KEYS[key])):
            raise UserError(f"{where}: {key!r} is {json.dumps(content[key])[:60]}, expected {expected}")
    return content


def to_json(content: Mapping[str, Any]) -> str:
    """Returns readable JSON that UTF-8 can hold: half a surrogate pair, which it cannot, is escaped."""
    return json.dumps(content, ensure_ascii=False).encode(errors="backslashreplace").decode()


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_STEP


def _fits(value: Any, type_: type) -> bool:
    """Whether a column of strings or float64 holds exactly this value."""
    if type_ is str:
        # Half a surrogate pair is allowed in JSON and is no text.
        return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)
    if type(value) is int:
        return abs(value) <= 2**53
    return isinstance(value, float)


def _fits_column(values: Any, type_: type) -> bool:
    """Whether token columns hold this list and its length: what follows its end must be all that is null there."""
    if not isinstance(values, list) or not values or values[-1] is None:
        return False
    return all(value is None or _fits(value, type_) for value in values)


def _write(folder: Path, step: int, rank: int, first: int, lines: Sequence[dict[str, Any]]) -> None:
    """Writes one rank's lines of one step; their samples count from ``first``."""
    parsed = [_tokens(line) for line in lines]
    rows = [_row(line, tokens) for line, tokens in zip(lines, parsed, strict=True)]
    names = {name for row in rows for name in row}
    row_content = {name: [row.get(name) for row in rows] for name in names}
    count = len(rows)
    row_content |= {"step": [step] * count, "attempt": [0] * count, "rank": [rank] * count}
    row_content["sample"] = list(range(first, first + count))
    flat: dict[str, list[Any]] = {name: [] for name in ("sample", "position", "mask", *TOKEN_KEYS.values())}
    for sample, (size, real, columns) in enumerate(parsed, start=first):
        flat["sample"] += [sample] * size
        flat["position"] += range(size)
        flat["mask"] += [position < real for position in range(size)]
        for name in TOKEN_KEYS.values():
            values = columns.get(name, [])
            flat[name] += values + [None] * (size - len(values))
    flat["step"] = [step] * len(flat["sample"])
    measured = {name: v for name, v in flat.items() if name not in TOKEN_KEYS.values() or any(x is not None for x in v)}
    write_segment(folder, step, 0, rank, table_of(ROW_COLUMNS, row_content), table_of(TOKEN_COLUMNS, measured))


def _tokens(line: Mapping[str, Any]) -> Tokens:
    columns = {}
    for key, name in TOKEN_KEYS.items():
        if _fits_column(line.get(key), str if name == "token" else float):
            columns[name] = line[key]
    size = max((len(values) for values in columns.values()), default=0)
    numbers = [len(values) for name, values in columns.items() if name != "token"]
    real = len(columns["logprob"]) if "logprob" in columns else max(numbers, default=size)
    return Tokens(size, real, columns)


def _row(line: Mapping[str, Any], tokens: Tokens) -> dict[str, Any]:
    """Returns the columns of one line that have a value, without those that only its place gives."""
    row = {key: line[key] for key, type_ in ROW_KEYS.items() if key in line and _fits(line[key], type_)}
    size, real, columns = tokens
    named = {"step", *row, *(key for key, name in TOKEN_KEYS.items() if name in columns)}
    if rest := {key: value for key, value in line.items() if key not in named}:
        row["extra"] = to_json(rest)
    if size:
        whole = {name: values[:real] for name, values in columns.items() if name != "token"}
        whole = {name: v for name, v in whole.items() if len(v) == real and None not in v}
        statistics = rollout_statistics(np.zeros(real, np.int64), 1, {k: np.array(v) for k, v in whole.items()})
        row |= {name: array[0].as_py() for name, array in statistics.items()}
    return row
