"""What a reward may change for the rest of the process, and what is put back after it."""

import locale
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread, current_thread, main_thread
from typing import Any

import numpy as np
import torch
from torch.backends import cudnn

from cavesson.errors import print_error

_LOGGER = logging.getLogger(__name__)
MINUTE = 60.0
"""Seconds between two lines about a reward that still runs."""

_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, lambda device: torch.set_default_device(None if device.type == "cpu" else device)),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (lambda: cudnn.benchmark, lambda is_on: setattr(cudnn, "benchmark", is_on)),
    (lambda: cudnn.deterministic, lambda is_on: setattr(cudnn, "deterministic", is_on)),
    (np.geterr, lambda how: np.seterr(**how)),
    (lambda: locale.setlocale(locale.LC_ALL), lambda name: locale.setlocale(locale.LC_ALL, name)),
    (lambda: list(warnings.filters), lambda filters: setattr(warnings, "filters", filters)),
    (lambda: logging.root.manager.disable, logging.disable),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (os.getcwd, os.chdir),
)
"""Settings of the whole process, each with a function that reads it and one that sets it."""


@contextmanager
def put_back() -> Iterator[None]:
    """Put back after the block what a reward may have changed, and would otherwise change for the run.

    docs/rewards.md lists it.
    """
    before = [(set_to, read, _read(read)) for read, set_to in _SETTINGS]
    with _lent_streams(), _signals():
        try:
            yield
        finally:
            for set_to, read, value in before:
                if value is not None and _read(read) != value:
                    set_to(value)


@contextmanager
def still_running(what: str, every: float = MINUTE) -> Iterator[None]:
    """Print a line every `every` seconds until the block ends."""
    ended = Event()

    def say() -> None:
        rounds = 1
        while not ended.wait(every):
            line = f"{what} is still running after {rounds * every:g} s"
            _LOGGER.info(line)
            print_error(f"cavesson: {line}")
            rounds += 1

    Thread(target=say, name="still-running", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


class _Lent:
    """A stream that looks like another, but does not close it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def close(self) -> None:
        """Write what was printed."""
        self._stream.flush()

    def __enter__(self) -> "_Lent":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _lent_streams() -> Iterator[None]:
    """Lend stdout and stderr to the block: neither closing nor replacing them, or their files, has an effect later."""
    streams, files = (sys.stdout, sys.stderr), {}
    for number in (1, 2):
        with suppress(OSError):  # a process need not have them
            files[number] = os.dup(number)
    sys.stdout, sys.stderr = (stream and _Lent(stream) for stream in streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for number, copy in files.items():
            os.dup2(copy, number)
            os.close(copy)


@contextmanager
def _signals() -> Iterator[None]:
    """Put back the handlers of signals and the timer after the block."""
    if current_thread() is not main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    timer = signal.getitimer(signal.ITIMER_REAL) if hasattr(signal, "getitimer") else None  # not on Windows
    try:
        yield
    finally:
        if timer is not None:
            signal.setitimer(signal.ITIMER_REAL, *timer)
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _read(read: Callable[[], Any]) -> Any:
    with suppress(OSError):  # the working directory may have been removed
        return read()
