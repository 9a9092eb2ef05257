"""The rewards of a recorded run, computed again with other rewards: `cavesson rescore`."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import track

import cavesson.record
from cavesson.errors import UserCodeError, UserError
from cavesson.record import Run
from cavesson.record.keys import rollout_keys
from cavesson.record.rescored import FOLDER, SCHEMA, description, read_rescored, rescored_files, write_rescored
from cavesson.rollout.rewards.fingerprint import settings_fingerprints
from cavesson.rollout.rewards.table import Reward, Scored
from cavesson.text.masking import masked
from cavesson.tools.rescored_report import Report, report
from cavesson.tools.score import score_by_length, text_scorers
from cavesson.tools.settings import RescoreSettings

AT_ONCE = 4096
"""Rollouts that are read, and at most so many scored, together."""
INTERVAL = 5.0
"""Seconds from one file to the next; a killed command loses no more than these and one call."""
_READ = ["step", "sample", "attempt", "prompt", "response", "ground_truth", "finish_reason", "extra"]


def rescore(path: str, settings: RescoreSettings) -> Report:
    """Compute the rewards of all rollouts of a run that do not have these yet, and compare them with the recorded ones.

    They are written beside the record, which does not change. Each call of a reward gets the responses of one step, as
    in training, or at most ``AT_ONCE`` of them.

    Args:
        path: the folder or URL of a run.
        settings: the rewards; they get `ground_truth`, `finish_reason` and what `extra` has by name.

    Raises:
        UserError: there is no such run, the name is taken by other rewards, a reward cannot be built or fails, or
            another process is computing the same ones. What was computed before is kept.
    """
    run = cavesson.record.open(path)
    with text_scorers(settings) as rewards, _claimed(run, settings):
        missing, terminal = _missing(run, settings.label), Console(stderr=True)
        with _writing(run, settings.label) as write:
            portions, is_silent = _portions(missing), not terminal.is_terminal
            for steps in track(portions, "computing rewards", console=terminal, transient=True, disable=is_silent):
                for rows in _calls(run.rows(_READ, steps), missing):
                    write(rows, _scored(rewards, rows, settings.columns))
    return report(run, settings.label, settings.show)


def _missing(run: Run, name: str) -> pa.Table:
    """Return the rollouts of a run that do not have the rewards yet."""
    rows = run.rows(["step", "sample", "attempt"])
    if not rows.num_rows:
        raise UserError(f"{run.folder} contains no rollouts")
    there = rollout_keys(read_rescored(run.storage, name, rows))
    return rows.filter(pa.array(~np.isin(rollout_keys(rows), there)))


def _portions(rows: pa.Table) -> list[list[int]]:
    """Return the steps of rows, in portions of about ``AT_ONCE`` rows or one step."""
    steps, counts = np.unique(rows["step"].to_numpy(), return_counts=True)
    portion = (np.cumsum(counts) - counts) // AT_ONCE
    return [steps[portion == number].tolist() for number in np.unique(portion)]


def _calls(rows: pa.Table, missing: pa.Table) -> Iterator[pa.Table]:
    """Yield those of the rows that are missing, each time as many as a reward is called with."""
    rows = rows.filter(pa.array(np.isin(rollout_keys(rows), rollout_keys(missing))))
    steps = rows["step"].to_numpy()
    for step in np.unique(steps):
        of_step = rows.filter(pa.array(steps == step))
        for start in range(0, of_step.num_rows, AT_ONCE):
            yield of_step.slice(start, AT_ONCE)


def _scored(rewards: Sequence[Reward], rows: pa.Table, mapping: Mapping[str, str]) -> Scored:
    prompts, responses = (rows[name].to_pylist() for name in ("prompt", "response"))
    try:
        return score_by_length(rewards, prompts, responses, _columns(rows, mapping))
    except UserCodeError as error:
        raise UserCodeError(f"step {rows['step'][0]}: {error}") from error


def _columns(rows: pa.Table, mapping: Mapping[str, str]) -> dict[str, list[Any]]:
    """Return the columns that rewards get in addition to prompt and response."""
    extra = [json.loads(text) if text else {} for text in rows["extra"].to_pylist()]
    columns = {name: [one.get(name) for one in extra] for one in extra for name in one}
    recorded = {name: rows[name] for name in ("ground_truth", "finish_reason")}
    columns |= {name: column.to_pylist() for name, column in recorded.items() if column.null_count < len(column)}
    if unknown := [theirs for theirs in mapping.values() if theirs not in columns]:
        raise UserError(f"columns: the record has no column {unknown[0]!r}; it has {', '.join(columns) or 'none'}")
    return columns | {ours: columns[theirs] for ours, theirs in mapping.items()}


@contextmanager
def _claimed(run: Run, settings: RescoreSettings) -> Iterator[None]:
    """Hold the name of the rewards while they are computed.

    Raises:
        UserError: rewards with other settings or another source have it, or another process holds it.
    """
    place = description(settings.label)
    chosen = settings.model_dump(mode="json", include={"rewards", "columns", "special_tokens"})
    content = masked({**chosen, "fingerprints": settings_fingerprints(settings.rewards)})
    try:
        with FileLock(f"{run.storage.lock_file()}-{FOLDER}-{settings.label}", blocking=False):
            if not rescored_files(run.storage, settings.label):
                with run.storage.writing(place) as file:
                    file.write(json.dumps(content, indent=2, ensure_ascii=False).encode())
            elif json.loads(run.storage.read(place)) != content:
                raise UserError(
                    f"{run.storage.path(place)} is about other rewards, or they have changed since: "
                    f"choose another --name, or remove the folder {FOLDER}/{settings.label}"
                )
            yield
    except Timeout:
        raise UserError(f"another process is computing the rewards {settings.label} of {run.folder}") from None


class _Writer:
    """Writes scored rows from time to time."""

    def __init__(self, run: Run, name: str) -> None:
        self._run, self._name = run, name
        self._pending: list[pa.Table] = []
        self._written = time.monotonic()

    def __call__(self, rows: pa.Table, scored: Scored) -> None:
        self._pending.append(_table(rows, scored))
        if time.monotonic() - self._written > INTERVAL:
            self.flush()

    def flush(self) -> None:
        if self._pending:
            write_rescored(self._run.storage, self._name, pa.concat_tables(self._pending))
        self._pending, self._written = [], time.monotonic()


@contextmanager
def _writing(run: Run, name: str) -> Iterator[_Writer]:
    """Yield a writer, and write what it still has when the block ends, also by an error."""
    writer = _Writer(run, name)
    try:
        yield writer
    finally:
        writer.flush()


def _table(rows: pa.Table, scored: Scored) -> pa.Table:
    count = rows.num_rows
    parts, reasons = (
        [{name: values[row] for name, values in named.items() if values[row] is not None} for row in range(count)]
        for named in (scored.parts, scored.reasons)
    )
    weights = [{name: scored.weights[name] for name in one} for one in parts]
    columns = {
        **{name: rows[name] for name in ("step", "attempt", "sample")},
        **{"reward": scored.total, "reward_parts": parts, "reward_weights": weights, "reward_reasons": reasons},
    }
    maps = {name: [list(one.items()) for one in columns[name]] for name in columns if name.startswith("reward_")}
    return pa.table({**columns, **maps}, SCHEMA)
