"""The log of a run: `log.txt` in its folder, with the printed output, warnings and tracebacks of all attempts."""

import logging
import shlex
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cavesson.record.run_folder import attempts
from cavesson.record.storage import Location, reaching, storage
from cavesson.text.masking import masked

NAME = "log.txt"
LOGGER = logging.getLogger("cavesson")
"""Whatever is said to the user about a run is said to this logger as well."""
# Loggers of libraries that do not propagate to the root logger.
_APART = ("transformers", "datasets")


@contextmanager
def logging_to(folder: Path, record: Location, rank: int) -> Iterator[None]:
    """Write messages from inside the block to the log of the run in `folder`, which must exist.

    Otherwise logging is unchanged: warnings and messages of other libraries are shown as before. Processes with other
    ranks than 0 log only errors, and warnings of Cavesson's own modules.
    """
    handler = logging.FileHandler(folder / NAME, encoding="utf-8", errors="backslashreplace")
    handler.setLevel(logging.WARNING if rank else logging.INFO)
    if rank:
        handler.addFilter(lambda entry: entry.levelno >= logging.ERROR or entry.name.startswith("cavesson."))
    process = f" process {rank}" if rank else ""
    formatter = _Masked(f"%(asctime)s{process} %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    with _listening(handler), _warnings_too():
        with reaching(record):
            number, step, _ = attempts(storage(record))[-1]
        LOGGER.info("attempt %d from step %d: cavesson %s: %s", number, step, version("cavesson"), shlex.join(sys.argv))
        try:
            yield
        except KeyboardInterrupt:
            LOGGER.error("interrupted")
            raise
        except BaseException as error:
            LOGGER.error("ended by %s", type(error).__name__, exc_info=error)
            raise
        LOGGER.info("finished")


class _Masked(logging.Formatter):
    """Formats messages and tracebacks without the secrets in them."""

    def format(self, record: logging.LogRecord) -> str:
        return masked(super().format(record))  # type: ignore[no-any-return]


@contextmanager
def _listening(handler: logging.Handler) -> Iterator[None]:
    """Add a handler to all loggers inside the block.

    If the root logger has no other handlers, messages still reach stderr, as they do without any handler.
    """
    root = logging.getLogger()
    last_resort = None if root.handlers else logging.lastResort
    loggers = [root, LOGGER, *map(logging.getLogger, _APART)]
    level, propagate = LOGGER.level, LOGGER.propagate
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False  # its messages have already been printed
    for logger in loggers:
        logger.addHandler(handler)
    if last_resort is not None:
        root.addHandler(last_resort)
    try:
        yield
    finally:
        if last_resort is not None:
            root.removeHandler(last_resort)
        for logger in loggers:
            logger.removeHandler(handler)
        LOGGER.setLevel(level)
        LOGGER.propagate = propagate
        handler.close()


@contextmanager
def _warnings_too() -> Iterator[None]:
    """Log Python's warnings in addition to showing them."""
    show = warnings.showwarning

    def shown(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any, **named: Any
    ) -> None:
        LOGGER.warning("%s:%d: %s: %s", filename, lineno, category.__name__, message)
        show(message, category, filename, lineno, *rest, **named)

    warnings.showwarning = shown
    try:
        yield
    finally:
        warnings.showwarning = show
