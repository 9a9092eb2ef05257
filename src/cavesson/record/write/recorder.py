"""Write rollouts and metrics from a background thread, so that training does not wait for the disk."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from importlib.metadata import version
from math import inf
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from types import MappingProxyType, TracebackType
from typing import Any, Self

import numpy as np

from cavesson.errors import NoRoomError, UserError, first_line, no_room
from cavesson.record.maintain.compaction import WAITING
from cavesson.record.maintain.merger import Merger
from cavesson.record.precision import Array
from cavesson.record.run_folder import begin_attempt, write_run
from cavesson.record.schema import STEP_COLUMNS
from cavesson.record.segments import Kind, listing
from cavesson.record.storage import Folder, Location, reaching, storage
from cavesson.record.tables import Tables
from cavesson.record.write.fallback_folder import recover
from cavesson.record.write.inputs import GIVEN_ROWS, check_names, checked_tokens, checked_turns
from cavesson.record.write.journal import Journal
from cavesson.record.write.lock import Lock
from cavesson.record.write.unrecorded import best_addition
from cavesson.record.write.writing import (
    Call,
    Metrics,
    Rollouts,
    Rows,
    flattened,
    metrics_by_step,
    tables_of,
    write_metrics,
    write_segment,
)

_LOGGER = logging.getLogger(__name__)

INTERVAL = 5.0
"""Seconds between two writes of a recorder, so that writing takes about 1 % of the time of the shortest steps."""
JOURNAL_BYTES = 32 << 20
"""Bytes in the journal after which the recorder writes earlier."""


class _Order(Enum):
    """What a caller asks the thread to do besides recording."""

    WRITE = auto()
    STOP = auto()


class Recorder:
    """Records the rollouts and metrics of one rank and attempt, as a context manager.

    A background thread writes the arguments of each call, in order; the caller must not change the arrays afterwards.
    It appends them to a journal at once, which a killed process leaves to whoever opens the run next, and writes them
    as one segment per ``interval``. The queue is bounded: if the disk cannot keep up, calls block, and nothing is ever
    dropped. An exception in the thread is raised by the caller's next call, and by every later one. Whenever more than
    ``WAITING`` files have accumulated, another thread merges them into large files without blocking anything.

    Args:
        folder: Run folder, or a URL such as ``s3://bucket/run``; the folder and ``run.json`` are created if necessary.
        attempt: Number that ``begin_attempt`` returned; None = begin a new attempt with the first recorded step.
        rank: Rank of this process; every rank but 0 needs ``attempt``.
        queue_size: Maximum number of calls waiting to be written.
        lock: The caller's lock on the run; None = rank 0 acquires one and holds it until ``close``.
        fallback: Local folder for what cannot be written to ``folder``: after the first failure, everything is written
            there, and ``unreachable`` is set. ``add_fallback`` adds it to the record. None = a failure is an error.
        interval: Readers see a call at most this many seconds later, or when ``flush`` returns. 0 = every call is
            written as a segment at once, as always on storage whose files cannot grow.

    Raises:
        LockedError: Another process is writing the run.
    """

    unreachable: BaseException | None = None
    """why the record is written to ``fallback``, or None if it is not"""
    _error: BaseException | None = None
    _merge_has_failed = False
    _closed = False
    _newest_file = ""
    _waiting = 0
    _written_at = -inf
    _journal: Journal | None = None

    def __init__(
        self,
        folder: Location,
        *,
        attempt: int | None = None,
        rank: int = 0,
        queue_size: int = 4,
        lock: Lock | None = None,
        fallback: Path | None = None,
        interval: float = INTERVAL,
    ) -> None:
        if queue_size < 1:
            raise ValueError(f"queue_size is {queue_size}, expected at least 1")
        if rank and attempt is None:
            raise ValueError(f"rank {rank} needs the attempt that begin_attempt returned to one of the processes")
        self._files = storage(folder)
        self.location = self._files.root
        self._given: set[str] = set()
        self._own_lock = Lock(self._files) if lock is None and not rank else None
        self._lock = lock or self._own_lock
        if self._lock is not None:
            self._lock.keep_alive()
        self._fallback = fallback
        recover(self._files)
        if not rank and not self._files.exists("run.json"):
            write_run(self._files, {"cavesson": version("cavesson")})
        self._attempt = -1 if attempt is None else attempt
        self._rank = rank
        self._latest: dict[Kind, tuple[int, set[Any]]] = {}
        self._written: dict[Kind, int] = {}
        self._interval = interval
        self._pending: list[Call] = []
        self._rows: Rows = {}
        self._merger = Merger(self._files, rank, self._merge_failed)
        self._queue: Queue[Callable[[], Call] | _Order] = Queue(queue_size)
        self._thread = Thread(target=self._work, name="recorder", daemon=True)
        self._thread.start()

    def rollouts(
        self,
        step: int,
        rows: Mapping[str, Sequence[Any] | Array],
        tokens: Mapping[str, Any] = MappingProxyType({}),
        turns: Mapping[str, Sequence[Any] | Array] | None = None,
    ) -> None:
        """Record this rank's rollouts of ``step``; they become visible to readers atomically.

        Further calls for the same step, such as for evaluation, add to it; recording a later step closes it.

        Args:
            step: Optimisation step.
            rows: [B] columns of ``ROW_COLUMNS``, at least ``prompt``, ``response`` and ``reward``. ``step``,
                ``attempt``, ``rank`` and the statistics are filled in; rank 0 also fills in ``sample`` if it is absent.
            tokens: Columns of ``TOKEN_COLUMNS``: B lists each, as long as the responses; or arrays [B, T], padded on
                either side, with a mask ``attended`` that is true on the tokens of the response, the only ones that are
                written. Without ``learned``, training learned from all of them. ``source`` has names of ``SOURCES``, or
                their codes. If ``attended`` is called by its earlier name, ``mask``, these tokens are recorded as
                learned.
            turns: [M] columns of ``TURN_COLUMNS``, at least ``sample`` (the rollout; without ``sample`` in ``rows``,
                its index there) and ``role``. ``turn`` is filled in if absent: the order of the turns of a rollout.
                ``arguments`` can be dictionaries. None = unknown.

        Raises:
            ValueError: A column is unknown, missing or of the wrong length, a sample or a turn occurs twice, or the
                step is closed.
        """
        first = 0
        if "sample" not in rows and "prompt" in rows and not self._rank:
            samples = self._next_samples(step, len(rows["prompt"]))
            rows, first = {"sample": samples, **rows}, int(samples[0]) if len(samples) else 0
        check_names("rows", rows, GIVEN_ROWS, {name for name, column in GIVEN_ROWS.items() if column.required})
        measured = bool(tokens)  # without tokens, even their number is unknown
        columns = checked_tokens(tokens, rows)
        lines = {} if turns is None else checked_turns(turns, rows["sample"], first)
        self._given |= {f"rows.{name}" for name in rows} | {f"tokens.{name}" for name in tokens}
        self._claim("rows", step, np.asarray(rows["sample"]).tolist())
        self._put(partial(flattened, step, dict(rows), columns, measured, lines))

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of ``step``; further calls for the same step add to them, as with ``rollouts``.

        Raises:
            ValueError: A metric is called ``step`` or ``attempt`` or occurs twice, or the step is closed.
        """
        if clash := {column.name for column in STEP_COLUMNS} & metrics.keys():
            raise ValueError(f"a metric cannot be called {clash.pop()!r}: that column is reserved for the recorder")
        self._given.update(f"steps.{name}" for name in metrics)
        self._claim("steps", step, metrics)
        self._put(partial(Metrics, step, dict(metrics)))

    def flush(self) -> None:
        """Wait until readers see everything recorded so far."""
        self._raise_error()
        if not self._closed:
            self._queue.put(_Order.WRITE)
        self._queue.join()
        self._raise_error()

    def close(self) -> None:
        """Write what is left and stop the thread; a second call only raises the error of the thread, if any."""
        if not self._closed:
            self._closed = True
            self._queue.put(_Order.STOP)
            self._thread.join()
            self._merger.close()
            if self._own_lock is not None:
                self._own_lock.release()
                self._name_what_is_missing()
        self._raise_error()

    def _name_what_is_missing(self) -> None:
        """Say which columns would tell the doctor more about a loop; a trainer or a hook brings its own lock."""
        addition = best_addition(self._given) if "rows.reward" in self._given else None
        if addition is not None:
            _LOGGER.warning("%s: %s", self.location, addition)

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
                self._use_fallback(error)
                return -1
        segments = found.rows if kind == "rows" else found.steps
        own = (self._rank, None)  # None: a merged segment of all ranks
        return max((s.last for s in segments if s.attempt == self._attempt and s.rank in own), default=-1)

    def _put(self, call: Callable[[], Call]) -> None:
        self._raise_error()
        if self._closed:
            raise ValueError("the recorder is closed")
        self._queue.put(call)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        given = None
        while given is not _Order.STOP:
            given = self._next()
            # Calls after a failed one are still written if possible: they were queued before the error was known.
            if isinstance(given, _Order):
                self._unless_it_fails(self._write)
            elif given is not None:
                self._unless_it_fails(partial(self._take, given))
            self._queue.task_done()
        if self._journal is not None:
            self._journal.close(keep=self._error is not None)

    def _next(self) -> Callable[[], Call] | _Order:
        """Wait for the next call; write the earlier ones when they are due."""
        while self._pending:
            try:
                return self._queue.get(timeout=max(self._due_at() - time.monotonic(), 0))
            except Empty:
                self._unless_it_fails(self._write)
        return self._queue.get()

    def _unless_it_fails(self, act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            self._fail(error)

    def _due_at(self) -> float:
        return self._written_at + self._interval

    def _take(self, given: Callable[[], Call]) -> None:
        """Add a call to the journal, or write it with the earlier ones if that is due."""
        call = given()
        self._pending.append(call)
        is_due = time.monotonic() >= self._due_at() or not self._is_own_location()
        if not is_due and (journal := self._opened_journal()) is not None:
            journal.add(call)
            if journal.is_there and journal.size < JOURNAL_BYTES:
                return
        self._write()

    def _opened_journal(self) -> Journal | None:
        if self._journal is None and self.unreachable is None:
            self._journal = Journal.opened(self._files, self._attempt, self._rank)
        return self._journal

    def _write(self) -> None:
        """Write the pending calls as segments."""
        if not self._pending:
            return
        calls, self._pending = self._pending, []
        self._written_at = time.monotonic()
        tables = tables_of(
            [call for call in calls if isinstance(call, Rollouts)], self._attempt, self._rank, self._fail
        )
        metrics = metrics_by_step(call for call in calls if isinstance(call, Metrics))
        self._unless_it_fails(partial(self._do, partial(self._write_rollouts, tables)))
        self._unless_it_fails(partial(self._do, partial(self._write_metrics, metrics)))
        if self._journal is not None and self._error is None:
            self._journal.clear()

    def _do(self, write: Callable[[], None]) -> None:
        try:
            self._check_location()
            write()
        except Exception as error:
            self._use_fallback(error)
            write()

    def _use_fallback(self, error: Exception) -> None:
        """Switch to the fallback folder after an error; without one, raise the error."""
        if self._fallback is None or isinstance(error, UserError):
            raise error
        self._files, self._lock, self._newest_file = Folder(self._fallback), None, ""
        self.unreachable = self.unreachable or error

    def _is_own_location(self) -> bool:
        """Return whether the run is still there and no other process has taken it over."""
        try:
            self._check_location()
        except Exception:
            return False  # writing raises it again
        return True

    def _check_location(self) -> None:
        """Check that the run still exists, so that no incomplete record is written."""
        there = not self._newest_file or self._files.exists(self._newest_file)
        if self._lock is not None:
            self._lock.check()  # after the look at the file: if the whole run was deleted, the error names the run
        if not there:
            raise UserError(f"{self._files.path('record')} was deleted or moved while it was being written")

    def _merge_failed(self, error: BaseException) -> None:
        """Leave the segments as they are if the storage may be unreachable; a later merge includes them."""
        if self._fallback is None or isinstance(error, UserError):
            self._fail(error)
            return
        if not self._merge_has_failed:
            _LOGGER.warning(
                "small files of the record in %s could not be merged (%s); later merges include them",
                self.location,
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

    def _write_rollouts(self, tables: Tables | None) -> None:
        if tables is not None:
            self._newest_file = write_segment(self._files, self._attempt, self._rank, tables)
            self._compact("rows", int(tables.rows["step"].to_numpy().max()))

    def _write_metrics(self, rows: Rows) -> None:
        """Write metrics; those of a step that has some already are added to its segment."""
        newest = max(self._rows, default=-1)
        if newest in rows:
            self._rows = {**self._rows, newest: self._rows[newest] | rows[newest]}
            self._newest_file = write_metrics(self._files, self._attempt, self._rank, self._rows)
        if later := {step: values for step, values in rows.items() if step != newest}:
            self._newest_file = write_metrics(self._files, self._attempt, self._rank, later)
            self._rows = later
            self._compact("steps", max(later))

    def _compact(self, kind: Kind, step: int) -> None:
        """Request a merge of the closed segments once more than ``WAITING`` have accumulated."""
        self._waiting += step != self._written.get(kind)
        self._written[kind] = step
        if self._waiting > WAITING and self.unreachable is None:
            self._waiting = 0
            self._merger.merge(before=(self._attempt, min(self._written.values())))
