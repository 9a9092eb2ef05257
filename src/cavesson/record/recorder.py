"""Write rollouts and metrics from a background thread, so that training does not wait for the disk."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from queue import Queue
from threading import Thread
from types import MappingProxyType, TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa

from cavesson.errors import NoRoomError, UserError, first_line, no_room
from cavesson.record.compaction import WAITING
from cavesson.record.lock import Lock
from cavesson.record.merger import Merger
from cavesson.record.padding import padded
from cavesson.record.precision import Array, rounded
from cavesson.record.run_folder import begin_attempt, write_run
from cavesson.record.schema import ROW_COLUMNS, STEP_COLUMNS, TOKEN_COLUMNS, Column, arrow_schema
from cavesson.record.segments import Kind, listing, segment_name, write_parquet, write_segment
from cavesson.record.statistics import STATISTICS, rollout_statistics
from cavesson.record.storage import Folder, Location, Storage, reaching, small_table, storage

_LOGGER = logging.getLogger(__name__)

FILLED_IN = {"step", "attempt", "rank", *STATISTICS}
GIVEN_ROWS = {column.name: column for column in ROW_COLUMNS if column.name not in FILLED_IN}
PRECISIONS = {column.name: column.precision for column in TOKEN_COLUMNS if column.precision is not None}
GIVEN_TOKENS = [column.name for column in TOKEN_COLUMNS if column.name not in ("step", "sample", "position")]


class Recorder:
    """Records the rollouts and metrics of one rank and attempt, as a context manager.

    A background thread writes the arguments of each call, in order; the caller must not change the arrays afterwards.
    The queue is bounded: if the disk cannot keep up, calls block, and nothing is ever dropped. An exception in the
    thread is raised by the caller's next call, and by every later one. Whenever more than ``WAITING`` steps have
    accumulated, another thread merges them into large files without blocking anything.

    Args:
        folder: Run folder, or a URL such as ``s3://bucket/run``; the folder and ``run.json`` are created if necessary.
        attempt: Number that ``begin_attempt`` returned; None = begin a new attempt with the first recorded step.
        rank: Rank of this process; every rank but 0 needs ``attempt``.
        queue_size: Maximum number of calls waiting to be written.
        lock: The caller's lock on the run; None = rank 0 acquires one and holds it until ``close``.
        spare: Local folder for what cannot be written to ``folder``: after the first failure, everything is written
            there, and ``unreachable`` is set. ``add_spare`` adds it to the record. None = a failure is an error.

    Raises:
        LockedError: Another process is writing the run.
    """

    unreachable: BaseException | None = None
    """why the record is written to ``spare``, or None if it is not"""

    def __init__(
        self,
        folder: Location,
        *,
        attempt: int | None = None,
        rank: int = 0,
        queue_size: int = 4,
        lock: Lock | None = None,
        spare: Path | None = None,
    ) -> None:
        if queue_size < 1:
            raise ValueError(f"queue_size is {queue_size}, expected at least 1")
        if rank and attempt is None:
            raise ValueError(f"rank {rank} needs the attempt that begin_attempt returned to one of the processes")
        self._files = storage(folder)
        self.place = self._files.root
        self._own_lock = Lock(self._files) if lock is None and not rank else None
        self._lock = lock or self._own_lock
        if self._lock is not None:
            self._lock.keep_alive()
        self._spare = spare
        self._newest_file = ""
        if not rank and not self._files.exists("run.json"):
            write_run(self._files, {"cavesson": version("cavesson")})
        self._attempt = -1 if attempt is None else attempt
        self._rank = rank
        self._latest: dict[Kind, tuple[int, set[Any]]] = {}
        self._written: dict[Kind, int] = {}
        self._waiting = 0
        self._merge_has_failed = False
        self._error: BaseException | None = None
        self._closed = False
        self._merger = Merger(self._files, rank, self._merge_failed)
        self._queue: Queue[Callable[[], None] | None] = Queue(queue_size)
        self._thread = Thread(target=self._work, name="recorder", daemon=True)
        self._thread.start()

    def rollouts(
        self, step: int, rows: Mapping[str, Sequence[Any] | Array], tokens: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Record this rank's rollouts of ``step``; they become visible to readers atomically.

        Further calls for the same step, such as for evaluation, add to it; recording a later step closes it.

        Args:
            step: Optimisation step.
            rows: [B] columns of ``ROW_COLUMNS``, at least ``prompt``, ``response`` and ``reward``. ``step``,
                ``attempt``, ``rank`` and the statistics are filled in; rank 0 also fills in ``sample`` if it is absent.
            tokens: Columns of ``TOKEN_COLUMNS``: B lists each, as long as the responses; or arrays [B, T], padded on
                the right, with a boolean ``mask`` that is true on response tokens, the only ones that are written.

        Raises:
            ValueError: A column is unknown, missing or of the wrong length, a sample occurs twice, or the step is
                closed.
        """
        if "sample" not in rows and "prompt" in rows and not self._rank:
            rows = {"sample": self._next_samples(step, len(rows["prompt"])), **rows}
        _check_names("rows", rows, GIVEN_ROWS, {name for name, column in GIVEN_ROWS.items() if column.required})
        _check_names("tokens", tokens, GIVEN_TOKENS, set())
        measured = bool(tokens)  # without tokens, even their number is unknown
        if "mask" not in tokens:
            tokens = padded(tokens, len(rows["prompt"]))
        _check_shapes(rows, tokens)
        self._claim("rows", step, np.asarray(rows["sample"]).tolist())
        self._put(partial(self._write_rollouts, step, dict(rows), dict(tokens), measured))

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of ``step``; further calls for the same step add to them, as with ``rollouts``.

        Raises:
            ValueError: A metric is called ``step`` or ``attempt`` or occurs twice, or the step is closed.
        """
        if clash := {column.name for column in STEP_COLUMNS} & metrics.keys():
            raise ValueError(f"a metric cannot be called {clash.pop()!r}: that column is reserved for the recorder")
        self._claim("steps", step, metrics)
        self._put(partial(self._write_metrics, step, dict(metrics)))

    def flush(self) -> None:
        """Wait until everything recorded so far is on disk."""
        self._raise_error()
        self._queue.join()
        self._raise_error()

    def close(self) -> None:
        """Write what is left and stop the thread; a second call only raises the error of the thread, if any."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join()
            self._merger.close()
            if self._own_lock is not None:
                self._own_lock.release()
        self._raise_error()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except BaseException as failure:
            if failure is not error:
                raise

    def _claim(self, kind: Kind, step: int, keys: Iterable[Any]) -> None:
        """Raise ValueError if something recorded would be replaced; ``keys`` are samples or names of metrics."""
        if self._attempt < 0:
            self._attempt = begin_attempt(self._files, max(step, 0))
        latest, taken = self._latest.get(kind, (-1, set()))
        if step != latest:
            taken = set()
            if kind not in self._latest:
                latest = self._newest(kind)
            if step < 0 or step <= latest:
                raise ValueError(f"step {step} is closed: attempt {self._attempt} has recorded it or a later one")
        if twice := taken.intersection(keys):
            raise ValueError(f"step {step} already has {twice.pop()!r}")
        self._latest[kind] = (step, taken.union(keys))

    def _next_samples(self, step: int, count: int) -> Array:
        """Return the sample numbers that follow those already recorded for the step."""
        latest, taken = self._latest.get("rows", (-1, set()))
        first = max(taken) + 1 if step == latest and taken else 0
        return np.arange(first, first + count)

    def _newest(self, kind: Kind) -> int:
        """Return the last step that an earlier recorder of this attempt and rank has recorded, or −1."""
        self._queue.join()  # so that only one thread changes where to write
        with reaching(self._files):
            try:
                found = listing(self._files)
            except Exception as error:
                self._use_spare(error)
                return -1
        segments = found.rows if kind == "rows" else found.steps
        own = (self._rank, None)  # None: a merged segment of all ranks
        return max((s.last for s in segments if s.attempt == self._attempt and s.rank in own), default=-1)

    def _put(self, job: Callable[[], None]) -> None:
        self._raise_error()
        if self._closed:
            raise ValueError("the recorder is closed")
        self._queue.put(job)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                self._do(job)
            except BaseException as error:
                # Jobs after a failed one are still written if possible: they were queued before the error was known.
                self._fail(error)
            finally:
                self._queue.task_done()
        self._queue.task_done()

    def _do(self, job: Callable[[], None]) -> None:
        try:
            self._check_place()
            job()
        except Exception as error:
            self._use_spare(error)
            job()

    def _use_spare(self, error: Exception) -> None:
        """Switch to the spare folder because of an error, or raise that error if there is no spare folder."""
        if self._spare is None or isinstance(error, UserError):
            raise error
        self._files, self._lock, self._newest_file = Folder(self._spare), None, ""
        self.unreachable = self.unreachable or error

    def _check_place(self) -> None:
        """Check that the run still exists, so that no incomplete record is written."""
        if self._lock is not None:
            self._lock.check()
        if self._newest_file and not self._files.exists(self._newest_file):
            raise UserError(f"{self._files.path('record')} was deleted or moved while it was being written")

    def _merge_failed(self, error: BaseException) -> None:
        """Leave the segments as they are if the storage may be unreachable; a later merge includes them."""
        if self._spare is None or isinstance(error, UserError):
            self._fail(error)
            return
        if not self._merge_has_failed:
            _LOGGER.warning(
                "small files of the record in %s could not be merged (%s); later merges include them",
                self.place,
                first_line(error),
            )
        self._merge_has_failed = True

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or self._for_user(error)

    def _for_user(self, error: BaseException) -> BaseException:
        room = no_room(error)
        if room is None:
            return error
        plain = NoRoomError(
            f"{room.reason}: the record in {self._files.path('record')} could not be written; {room.advice}"
        )
        plain.__cause__ = error
        return plain

    def _write_rollouts(self, step: int, rows: dict[str, Any], tokens: dict[str, Array], measured: bool) -> None:
        samples = np.asarray(rows["sample"])
        order = np.argsort(samples)
        index, position = np.nonzero(tokens["mask"][order])
        index = order[index]
        flat = {name: array[index, position] for name, array in tokens.items()}
        count = len(samples)
        rows |= {"attempt": np.full(count, self._attempt), "rank": np.full(count, self._rank)}
        rows |= {"step": np.full(count, step)}
        if measured:
            rows |= rollout_statistics(index, count, flat)
        # The statistics above are computed from the exact numbers, before rounding.
        flat |= {name: rounded(flat[name], precision) for name, precision in PRECISIONS.items() if name in flat}
        flat |= {"step": np.full(len(index), step), "sample": samples[index], "position": position}
        row_table, token_table = table_of(ROW_COLUMNS, rows), table_of(TOKEN_COLUMNS, flat)
        write_segment(self._files, step, self._attempt, self._rank, row_table, token_table)
        self._newest_file = segment_name("rows", step, self._attempt, self._rank)
        self._compact("rows", step)

    def _write_metrics(self, step: int, metrics: dict[str, float]) -> None:
        write_metrics(self._files, step, self._attempt, self._rank, metrics)
        self._newest_file = segment_name("steps", step, self._attempt, self._rank)
        self._compact("steps", step)

    def _compact(self, kind: Kind, step: int) -> None:
        """Request a merge of the closed steps once more than ``WAITING`` have accumulated."""
        self._waiting += step != self._written.get(kind)
        self._written[kind] = step
        if self._waiting > WAITING and self.unreachable is None:
            self._waiting = 0
            self._merger.merge(before=(self._attempt, min(self._written.values())))


def write_metrics(files: Storage, step: int, attempt: int, rank: int, metrics: Mapping[str, float]) -> None:
    """Write the metrics of one step, or add to them."""
    name = segment_name("steps", step, attempt, rank)
    row = {"step": step, "attempt": attempt} | {name: float(value) for name, value in metrics.items()}
    if files.exists(name):
        row = small_table(files, name).to_pylist()[0] | row
    columns = [*STEP_COLUMNS, *(Column(name, pa.float64(), "") for name in row if name not in ("step", "attempt"))]
    write_parquet(files, name, table_of(columns, {name: [value] for name, value in row.items()}))


def _check_names(what: str, given: Mapping[str, Any], known: Iterable[str], required: set[str]) -> None:
    if unknown := given.keys() - set(known):
        raise ValueError(f"{what} have no column {min(unknown)!r}; known: {', '.join(known)}")
    if missing := required - given.keys():
        raise ValueError(f"{what} are missing the required column {min(missing)!r}")


def _check_shapes(rows: Mapping[str, Sequence[Any] | Array], tokens: Mapping[str, Array]) -> None:
    mask, samples = tokens["mask"], rows["sample"]
    if not isinstance(mask, np.ndarray):
        raise ValueError("mask is not an array, expected bool [B, T]; with a list of tokens per response, leave it out")
    if mask.ndim != 2 or mask.dtype != np.bool_:
        raise ValueError(f"mask is {mask.dtype} of shape {mask.shape}, expected bool [B, T]")
    for name, values in rows.items():
        if len(values) != len(mask):
            raise ValueError(f"rows column {name!r} has {len(values)} entries, mask has {len(mask)}")
    for name, array in tokens.items():
        if array.shape != mask.shape:
            raise ValueError(f"tokens column {name!r} has shape {array.shape}, mask has {mask.shape}")
    if len(np.unique(np.asarray(samples))) != len(samples):
        raise ValueError("rows column 'sample' names a rollout twice; with step it is the key")


def table_of(columns: Sequence[Column], content: Mapping[str, Any]) -> pa.Table:
    """Return a table of the ``columns`` in ``content``; a float32 column becomes float64 if a value needs it."""
    present = [column for column in columns if column.name in content]
    arrays = [_array(content[column.name], column.type) for column in present]
    fields = [field.with_type(array.type) for field, array in zip(arrow_schema(present), arrays, strict=True)]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _array(values: Any, type_: pa.DataType) -> pa.Array:
    if isinstance(values, pa.Array):
        return values.cast(type_)
    if pa.types.is_map(type_):
        values = [None if v is None else [(key, float(x)) for key, x in v.items()] for v in values]
    if type_ == pa.float32():
        wide = pa.array(values, pa.float64())
        return wide if _needs_float64(wide) else wide.cast(pa.float32())
    try:
        return pa.array(values, type_)
    except UnicodeEncodeError:
        # A lone surrogate, which UTF-8 cannot encode, is written as its escape.
        return pa.array([v if v is None else v.encode(errors="backslashreplace").decode() for v in values], type_)


def _needs_float64(wide: pa.Array) -> bool:
    values = wide.to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):
        return not np.array_equal(values.astype(np.float32).astype(np.float64), values, equal_nan=True)
