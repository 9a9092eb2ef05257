"""Read the metrics that a trainer logged beside its rollouts: CSV, JSON, JSON lines, TensorBoard, Weights & Biases."""

import csv
import json
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from cavesson.errors import UserError
from cavesson.importers.databases import Inside, inside, logged_in, runs_in, within
from cavesson.importers.fields import MAX_STEP
from cavesson.importers.machine import of_machine
from cavesson.importers.steps import STEP_COLUMNS
from cavesson.record.schema import STEP_COLUMNS as RESERVED
from cavesson.text.counting import counted, some_of

STEPS = (*STEP_COLUMNS, "train/global_step", "trainer/global_step", "_step")
"""Names of the step, in lower case; the first one that a line has is used. `_step` counts calls of `wandb.log`."""
EVENTS = "*tfevents*"
WANDB = ".wandb"
WANDB_HEADER = b":W&B"
WANDB_START = 7
"""Bytes of the header, which ends in a number and a version."""
READABLE = ".csv, .json (such as trainer_state.json), .jsonl, .wandb, a database of trackio, or TensorBoard events"
AGREEING = 3
"""Minimum number of steps at which a logged reward has to agree with the rollouts before metrics are moved."""
_EXPORTED = re.compile(r"(?P<run>.+) - (?P<name>.+)")
"""A column of a chart that was exported from Weights & Biases."""
_EXTREMES = ("__MIN", "__MAX")
_TIMES = ("_timestamp", "timestamp")
"""Names of the time in Weights & Biases and Trackio: seconds since 1970, or a date of ISO 8601."""


class Metrics(NamedTuple):
    """Metrics by step, and remarks on how they were read."""

    values: dict[int, dict[str, float]]
    notes: list[str]


def read_metrics(path: Path) -> Metrics:
    """Read a file of metrics; lines of the same step are put together, and of a repeated value the last one counts.

    Lines without a step, such as those that Weights & Biases samples of the machine, belong to the step that was logged
    next, if both have a time; of several, the mean counts. Figures of the machine get Cavesson's names.

    Raises:
        UserError: The file does not exist, has another format, is broken, or has no step or no metric.
    """
    if not path.exists() and inside(path) is None:
        raise UserError(f"{path} does not exist")
    lines = [_Line.of(line) for line in _lines_of(path)]
    values: dict[int, dict[str, float]] = {}
    for line in lines:
        if line.step is not None and line.metrics:
            values.setdefault(line.step, {}).update(line.metrics)
    for step, metrics in _sampled(lines).items():
        values[step] = metrics | values.get(step, {})
    if not values:
        has_step = any(line.step is not None for line in lines)
        reason = (
            "no line has a number besides the step" if has_step else "no line has a step" if lines else "it is empty"
        )
        raise UserError(f"{path} has no metrics: {reason}")
    return Metrics({step: values[step] for step in sorted(values)}, list(_notes(path, lines, values)))


class _Line(NamedTuple):
    """A line of a log."""

    column: str | None
    """The column with the step."""
    step: int | None
    metrics: dict[str, float]
    left: list[str]
    """The names of what is not a metric."""
    time: float | None = None
    """Seconds since 1970."""

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> "_Line":
        column = min(line, key=_order, default=None)
        if column is None or _order(column) == len(STEPS):
            time = _time_of(line)
            return cls(None, None, {}, []) if time is None else cls(None, None, *_numbers(line, _TIMES), time)
        step = _number(line[column])
        if step is None or not step.is_integer() or not 0 <= step <= MAX_STEP:
            return cls(None, None, {}, [])
        return cls(column, int(step), *_numbers(line, (column,)), _time_of(line))


def _numbers(line: Mapping[str, Any], without: Sequence[str]) -> tuple[dict[str, float], list[str]]:
    """Return the metrics of a line, those of the machine by Cavesson's names, and the names of what is not a metric."""
    metrics, left = {}, []
    for name, value in line.items():
        number = None if name in _RESERVED else _number(value)
        if number is not None and name not in without:
            ours, its_value = of_machine(name, number) or (name, number)
            metrics[ours] = its_value
        elif name not in without:
            left.append(name)
    return metrics, left


def _time_of(line: Mapping[str, Any]) -> float | None:
    value = next((line[name] for name in _TIMES if name in line), None)
    number = _number(value)
    if number is not None or not isinstance(value, str):
        return number
    try:
        return datetime.fromisoformat(value).timestamp()
    except ValueError:
        return None


def _sampled(lines: Sequence[_Line]) -> dict[int, dict[str, float]]:
    """Return the means of what lines without a step have, by the step that was logged next, or the last one."""
    logged = sorted((line.time, line.step) for line in lines if line.step is not None and line.time is not None)
    if not logged:
        return {}
    found = defaultdict[int, dict[str, list[float]]](lambda: defaultdict(list))
    for line in lines:
        if line.step is None and line.time is not None:
            after = bisect_left(logged, (line.time,))
            _, step = logged[min(after, len(logged) - 1)]
            for name, value in line.metrics.items():
                found[step][name].append(value)
    return {step: {name: fmean(values) for name, values in metrics.items()} for step, metrics in found.items()}


def _notes(path: Path, lines: Sequence[_Line], values: Mapping[int, Mapping[str, float]]) -> Iterator[str]:
    names = {name for metrics in values.values() for name in metrics}
    yield f"{counted(len(names), 'metric')} of {counted(len(values), 'step')} read from {path}"
    columns = dict.fromkeys(line.column for line in lines if line.column)
    if [*columns] != ["step"]:
        yield f"the step of the metrics is {' or '.join(map(repr, columns))}"
    if machine := sum(name.startswith("machine/") for name in names):
        yield f"{counted(machine, 'figure')} of the machine, by the names and in the units of docs/machine.md"
    has_times = any(line.step is not None and line.time is not None for line in lines)
    untimed = [line for line in lines if line.step is None and (line.time is None or not has_times)]
    if placed := sum(line.step is None for line in lines) - len(untimed):
        yield f"{counted(placed, 'line')} of {path} without a step: of the step that was logged next, by their time"
    if untimed:
        yield f"{counted(len(untimed), 'line')} of {path} without a step, not read"
    if left := sorted({name for line in lines for name in line.left} - names):
        yield f"not read from {path}, because it is not a number or has a reserved name: {some_of(left)}"
    read = [(line.step, name) for line in lines if line.step is not None for name in line.metrics]
    if repeated := len(read) - len(set(read)):
        yield f"{counted(repeated, 'value')} of {path} replaced by a later one of the same step"


def aligned(metrics: Metrics, rewards: Mapping[int, float]) -> Metrics:
    """Move metrics by one step if that makes their reward agree with the mean rewards of the steps' rollouts."""
    if metrics.values.keys().isdisjoint(rewards):
        first, last = min(rewards), max(rewards)
        note = f"no metric is of a step with rollouts: these have the steps {first} to {last}"
        return metrics._replace(notes=[*metrics.notes, note])
    logged = defaultdict[str, dict[int, float]](dict)
    for step, values in metrics.values.items():
        for name, value in values.items():
            if "reward" in name.lower():
                logged[name][step] = value
    for move in (0, -1, 1):
        of = next((name for name in sorted(logged) if _agree(logged[name], rewards, move)), None)
        if of is not None and move and min(metrics.values) + move >= 0:
            where = "earlier" if move < 0 else "later"
            note = f"metrics moved one step {where}, where {of!r} is the mean reward of the rollouts"
            return Metrics({step + move: metrics.values[step] for step in metrics.values}, [*metrics.notes, note])
        if of is not None:
            break
    return metrics


def _agree(logged: Mapping[int, float], rewards: Mapping[int, float], move: int) -> bool:
    """Return whether logged rewards are those of the rollouts ``move`` steps on, and could have differed."""
    steps = [step for step in logged if step + move in rewards]
    of_log = np.array([logged[step] for step in steps])
    of_rollouts = np.array([rewards[step + move] for step in steps])
    same = np.isclose(of_log, of_rollouts, rtol=1e-3, atol=1e-6)
    return len(set(of_rollouts.tolist())) >= AGREEING and bool(same.all())


def _order(name: str) -> int:
    """Return the place of a column among the names of the step; their number if it is not one."""
    return STEPS.index(name.lower()) if name.lower() in STEPS else len(STEPS)


def _number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, str | int | float) else None
    except (ValueError, OverflowError):
        return None


def _lines_of(path: Path) -> Iterable[Mapping[str, Any]]:
    if (place := inside(path)) is not None:
        return _database(path, place)
    if path.suffix == WANDB or (path.is_dir() and any(path.rglob(f"*{WANDB}"))):
        return _wandb(path)
    if path.is_dir() or path.match(EVENTS):
        return _events(path)
    if path.suffix == ".csv":
        return _table(path)
    if path.suffix == ".jsonl":
        return _json_lines(path)
    if path.suffix == ".json":
        return _json(path)
    raise UserError(f"{path} cannot be read as metrics; what can be read: {READABLE}")


def _table(path: Path) -> Iterator[dict[str, str]]:
    """Yield the lines of a CSV file, without the cells that are empty."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            reader = csv.DictReader(file, restval="")
            columns = reader.fieldnames or []
            if len(set(columns)) < len(columns):
                twice = next(name for name in columns if columns.count(name) > 1)
                raise UserError(f"{path} has the column {twice!r} twice; rename one of them")
            names = _exported(path, columns)
            for line in reader:
                if None in line:
                    raise UserError(f"{path}, line {reader.line_num}: more cells than columns")
                yield {names[name]: cell for name, cell in line.items() if name in names and cell.strip()}
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read as CSV: {error}") from error


def _exported(path: Path, names: Sequence[str]) -> dict[str, str]:
    """Return each column's name of the metric; an exported chart of Weights & Biases has the run's before it."""
    found = {name: _EXPORTED.fullmatch(name) for name in names if _order(name) == len(STEPS)}
    if not found or not all(found.values()) or len(found) == len(names):
        return {name: name for name in names}
    runs = {match["run"] for match in found.values() if match}
    if len(runs) > 1:
        raise UserError(f"{path} has the metrics of {len(runs)} runs: {some_of(sorted(runs))}; export one of them")
    metrics = {name: match["name"] for name, match in found.items() if match and not name.endswith(_EXTREMES)}
    return {name: name for name in names if name not in found} | metrics


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _flat(_object(_parsed(line, f"{path}, line {number}"), f"{path}, line {number}"))


def _json(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a list, or of `log_history` in a `trainer_state.json`."""
    content = _parsed(path.read_bytes(), str(path))
    lines = content.get("log_history") if isinstance(content, dict) else content
    if not isinstance(lines, list):
        raise UserError(f"{path} has no metrics: expected a list of objects, or one in `log_history`")
    for number, line in enumerate(lines):
        yield _flat(_object(line, f"{path}, entry {number}"))


def _parsed(text: bytes, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{place}: not JSON: {error}") from error


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{place}: expected an object with a step and metrics, not {type(value).__name__}")
    return value


def _flat(line: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a line with its inner objects' entries as `outer/inner`; media and histograms stay as they are."""
    found: dict[str, Any] = {}
    for name, value in line.items():
        is_inner = isinstance(value, dict) and "_type" not in value
        found |= _flat(value, f"{prefix}{name}/") if is_inner else {prefix + name: value}
    return found


def _database(path: Path, place: Inside) -> Iterator[dict[str, Any]]:
    """Yield what one run has logged into a database of trackio."""
    try:
        runs = runs_in(place.file)
        chosen = place.run or (runs[0] if len(runs) == 1 else "")
        if chosen not in runs:
            which = f"no run {place.run!r}" if place.run else f"the metrics of {counted(len(runs), 'run')}"
            named = f"; name one, such as {within(place.file, runs[0])}" if runs else ""
            raise UserError(f"{place.file} has {which}: {some_of(runs)}{named}")
        yield from map(_flat, logged_in(place.file, chosen))
    except ValueError as error:
        raise UserError(f"{path} cannot be read as a database of trackio: {error}") from error


def _wandb(path: Path) -> Iterator[dict[str, Any]]:
    """Yield what a run of Weights & Biases has logged, from the file beside its folder of files."""
    if find_spec("wandb") is None:
        raise UserError(f"{path} needs wandb to be read; install it with: pip install wandb")
    parsed = import_module("wandb.proto.wandb_internal_pb2").Record.FromString
    damaged = import_module("google.protobuf.message").DecodeError
    files = [path] if path.is_file() else sorted({file.resolve() for file in path.rglob(f"*{WANDB}")})
    if len(files) > 1:
        runs = some_of(file.parent.name for file in files)
        raise UserError(f"{path} has {len(files)} runs of Weights & Biases; name the folder of one: {runs}")
    content = files[0].read_bytes()
    if not content.startswith(WANDB_HEADER):
        raise UserError(f"{files[0]} is not a file of Weights & Biases: it does not begin with {WANDB_HEADER.decode()}")
    try:
        for text in _leveldb(content, WANDB_START):
            history = parsed(text).history
            if history.item:
                values = {one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in history.item}
                yield _flat({"_step": history.step.num} | values)
    except (damaged, ValueError) as error:
        raise UserError(f"{files[0]} is damaged: {error}") from error


def _leveldb(content: bytes, place: int) -> Iterator[bytes]:
    """Yield the whole records of a log of LevelDB, https://github.com/google/leveldb/blob/main/doc/log_format.md.

    In blocks of 32 KiB: a checksum (4 bytes), the length (2), whether it is whole or its first, middle or last part (1
    to 4), and the content. The last record may be cut off.
    """
    record = b""
    while place + 7 <= len(content):
        if (left := 2**15 - place % 2**15) < 7:  # too short for another record
            place += left
            continue
        size, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        part = content[place + 7 : place + 7 + size]
        if len(part) < size:
            return
        record, place = part if kind in (1, 2) else record + part, place + 7 + size
        if kind in (1, 4):
            yield record


def _events(path: Path) -> Iterator[dict[str, Any]]:
    if find_spec("tensorboard") is None:
        raise UserError(f"{path} needs TensorBoard to be read; install it with: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    files = [path] if path.is_file() else sorted({file.parent for file in path.rglob(EVENTS)})
    if len(files) != 1:
        found = f"{len(files)} folders with" if files else "no"
        raise UserError(f"{path} has {found} TensorBoard events; name the folder or file of one run")
    events = EventAccumulator(str(files[0]), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()
    for name in tags["scalars"]:
        for event in events.Scalars(name):
            yield {"step": event.step, name: event.value}
    for name in tags["tensors"]:  # TensorFlow writes scalars as tensors
        for event in events.Tensors(name):
            values = make_ndarray(event.tensor_proto)
            yield {"step": event.step, name: values.item() if values.size == 1 else None}
    for kind in ("images", "audio", "histograms"):
        yield from ({"step": 0, name: None} for name in tags[kind])


_RESERVED = frozenset(column.name for column in RESERVED)
