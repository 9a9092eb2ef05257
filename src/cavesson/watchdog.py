"""The watchdog of a run in several processes: it ends the run if one of them hangs, and names it and what it does.

Every process publishes how far it is in the store of the process group. A thread in each of them compares: the process
that is furthest behind is the one for which the others wait.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from threading import Event, Lock, Thread
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from cavesson.errors import LOST_PROCESS, leave_for_launcher, print_error
from cavesson.text.visible import visible

EXIT_CODE = 2
_LONGEST_PERIOD = 10.0
_SHORTEST_PERIOD = 0.05
_NAMED = 8
"""Processes that the message names at most."""
_ENDED, _LEAVING = "ended", "leaving"
_numbers = count()
"""Every watchdog of a process has the next number; all processes make the same ones in the same order."""


class Place(NamedTuple):
    """How far a process is."""

    arrivals: int = 0
    """stages and exchanges with other processes that it has begun; all processes begin the same ones"""
    beats: int = 0
    """signs of progress within a stage, which may differ between processes"""
    stage: str = "start"


class Seen(NamedTuple):
    """Where a process was seen, and for how many seconds it has been there."""

    place: Place
    seconds: float = 0.0

    def then(self, place: Place, seconds: float) -> "Seen":
        """Return what is seen when the process is found at `place`, `seconds` later."""
        return Seen(place, self.seconds + seconds) if place == self.place else Seen(place)


def hanging(seen: Sequence[Seen], longest: float) -> list[int]:
    """Return the processes that are furthest behind, if none of them has moved for `longest` seconds; else none."""
    last = min(one.place.arrivals for one in seen)
    behind = [rank for rank, one in enumerate(seen) if one.place.arrivals == last]
    return behind if min(seen[rank].seconds for rank in behind) >= longest else []


def sentence(seen: Sequence[Seen], ranks: Sequence[int], timeout: float) -> str:
    """Return what the user is told about the processes that hang."""
    first = seen[ranks[0]]
    doing = f'no progress in "{first.place.stage}" for {first.seconds:.0f} s'
    limit = f"parallel.timeout is {timeout:g} s"
    if len(ranks) == len(seen):
        return f"all {len(seen)} processes have made {doing} ({limit}; raise it if that stage takes longer)"
    names = [str(rank) for rank in ranks[:_NAMED]] + ["…"] * (len(ranks) > _NAMED)
    listed = " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
    has = f"process {listed} of {len(seen)} (counted from 0) has"
    have = f"processes {listed} of {len(seen)} (counted from 0) have"
    return f"{has if len(ranks) == 1 else have} made {doing} while the others wait ({limit})"


class Watchdog:
    """Watches the processes of a run until it is closed; all of them must make it at the same place.

    A process without progress for `timeout` seconds hangs. `resume_hint` returns the command that continues the run, or
    None if there is nothing to continue.
    """

    def __init__(self, rank: int, count: int, timeout: float, resume_hint: Callable[[], str | None]) -> None:
        self._rank, self._count, self._timeout, self._resume_hint = rank, count, timeout, resume_hint
        self._period = min(max(timeout / 20, _SHORTEST_PERIOD), _LONGEST_PERIOD)
        shared: Any = _get_default_store()  # PyTorch's type stubs lack `clone`
        # A separate connection: the one of the process group may be waiting for an answer.
        self._store = PrefixStore(f"watchdog-{next(_numbers)}", shared.clone())
        self._place, self._lock = Place(), Lock()
        self._seen = [Seen(Place()) for _ in range(count)]
        self._awake, self._closed, self._ending = Event(), Event(), Event()
        self._thread = Thread(target=self._watch, name="cavesson-watchdog", daemon=True)
        self._thread.start()

    def enter(self, stage: str) -> None:
        """Note that this process begins a stage, which all processes begin in the same order."""
        with self._lock:
            self._place = Place(self._place.arrivals + 1, 0, stage)
        self._awake.set()  # at once: a process that is stopped within the stage cannot publish it any more

    def arrive(self) -> None:
        """Note that this process begins an exchange with the others, in which it may wait for them."""
        with self._lock:
            self._place = self._place._replace(arrivals=self._place.arrivals + 1)

    def beat(self) -> None:
        """Note that this process makes progress within its stage."""
        with self._lock:
            self._place = self._place._replace(beats=self._place.beats + 1)

    def close(self) -> None:
        """End the thread: Python must not exit while it is inside PyTorch."""
        self._closed.set()
        self._awake.set()
        while self._ending.is_set():  # the end of another process, or a launcher's signal, must not be reported too
            with suppress(BaseException):
                time.sleep(1)
        self._thread.join(60)  # not for ever: a store whose process is stopped does not answer

    def _watch(self) -> None:
        last = time.monotonic()
        with suppress(RuntimeError):  # the store is gone, as its process has ended, which others report
            while True:
                self._awake.wait(self._period)
                self._awake.clear()
                if self._closed.is_set():
                    return
                self._store.set(str(self._rank), json.dumps(self._place))
                now = time.monotonic()
                if now - last >= self._period:
                    # While this process itself was stopped, nobody hung.
                    self._look(min(now - last, 2 * self._period))
                    last = now

    def _look(self, seconds: float) -> None:
        """Compare all processes, `seconds` after the last time, and end this one if any of them hangs."""
        store, names = self._store, [str(rank) for rank in range(self._count)]
        if store.check([_ENDED]):
            self._end(LOST_PROCESS)
        known = names if store.check(names) else [name for name in names if store.check([name])]
        places = dict(zip(known, (Place(*json.loads(text)) for text in store.multi_get(known)), strict=True))
        self._seen = [one.then(places.get(name, Place()), seconds) for name, one in zip(names, self._seen, strict=True)]
        # What a process publishes is seen up to two periods later.
        ranks = hanging(self._seen, self._timeout + 2 * self._period)
        if ranks:
            name = names[self._rank]
            is_first = store.compare_set(_ENDED, "", name).decode() == name
            self._end(self._line(ranks) if is_first else LOST_PROCESS)

    def _line(self, ranks: Sequence[int]) -> str:
        way = self._resume_hint()
        line = sentence(self._seen, ranks, self._timeout)
        return visible(line if way is None else f"{line}; continue with: {way}")

    def _end(self, line: str) -> None:
        """End this process as soon as the others are about to end too.

        Those that wait for a process fail when it ends, and must not report that.
        """
        self._ending.set()
        try:
            if line != LOST_PROCESS:
                print_error(f"cavesson: {line}")
            leave_for_launcher(line, EXIT_CODE, is_whole=True)
            deadline = time.monotonic() + 3 * self._period + 1
            self._store.add(_LEAVING, 1)
            while time.monotonic() < deadline and self._store.add(_LEAVING, 0) < self._count:
                time.sleep(0.02)
            if self._rank:
                time.sleep(0.5)  # the first process goes first: an error in it may remove the run's folder
        finally:
            os._exit(EXIT_CODE)
