"""Errors shown to the user as one or two plain lines, with an exit code."""

import errno
import json
import os
import re
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from cavesson.handlers import arrivals
from cavesson.text.masking import masked
from cavesson.text.visible import shortened, visible

_PATHS = sysconfig.get_paths()
_INSTALLED = (_PATHS["purelib"], _PATHS["platlib"])
_OURS = (str(Path(__file__).parent), _PATHS["stdlib"], "<frozen ")


class UserError(Exception):
    """An error that the user can fix; the message says where it is and how to fix it."""

    exit_code = 2


class StoppedError(UserError):
    """A run was stopped on purpose and can be continued; the message says why, and a note says how."""

    exit_code = 3


class SignalledError(StoppedError):
    """A run was ended by a signal and can be continued; the exit code is the one that shells use for that signal."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class TerminatedError(BaseException):
    """SIGTERM asked a command to end; only the command line handles it."""


class NonFiniteError(UserError):
    """A NaN or infinity appeared during training; the message names the step and the tensor."""


class UserCodeError(UserError):
    """The user's function raised an exception or returned an invalid value; the message names the function and line."""


class ServerError(UserCodeError):
    """A server that a run depends on failed or answered something wrong; the message names the server."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def print_error(line: str) -> None:
    """Print a line to stderr in one write, so that lines of several processes do not run into each other.

    Secrets in it are masked.
    """
    sys.stderr.write(f"{masked(line)}\n")
    sys.stderr.flush()


def print_exception(error: BaseException) -> None:
    """Print a traceback, masked and with control characters made visible, so that quoted text has no effect."""
    print(visible(masked("".join(traceback.format_exception(error)))), file=sys.stderr, end="")


def leave_for_launcher(line: str, exit_code: int, is_whole: bool = False) -> None:
    """Write down what ended this process, where torchrun's agent reads it; has no effect if no agent started it.

    The line names the process itself if it `is_whole`, or else is only about other processes.
    """
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if place:
        path = Path(place)
        extra = {"timestamp": str(int(time.time()))}
        error = {"message": masked(line), "errorCode": exit_code, "isWhole": is_whole, "extraInfo": extra}
        unfinished = path.with_suffix(".tmp")  # the agent cannot read half a file
        unfinished.write_text(json.dumps({"message": error}), "utf-8")
        unfinished.replace(path)


class NoRoomError(UserError):
    """There was no room to write what a run needs; the message says where and why, and a note how to continue."""


class NoMemoryError(UserError):
    """The memory of a device was not enough; the message says where and what needs less, and a note how to continue."""


class NoRoom(NamedTuple):
    """Why there was no room to write, and what to do about it."""

    reason: str
    advice: str


_NO_ROOM = {
    errno.ENOSPC: NoRoom("the disk is full", "free space"),
    errno.EDQUOT: NoRoom("the disk quota is used up", "free space"),
    errno.EFBIG: NoRoom("the limit on the size of a file is reached", "raise it (ulimit -f)"),
}


def no_room(error: BaseException) -> NoRoom | None:
    """Return why there was no room to write, or None if the error has another cause."""
    if isinstance(error, OSError):
        return _NO_ROOM.get(error.errno or 0)
    # safetensors gives the error number only in its message.
    return next((room for number, room in _NO_ROOM.items() if f"(os error {number})" in str(error)), None)


def no_memory(error: BaseException) -> str | None:
    """Return a line about a device without enough memory, or None if the error has another cause."""
    # PyTorch raises a RuntimeError for the CPU, and for what CUDA's libraries need.
    words = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
    if not isinstance(error, MemoryError) and not (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    ):
        return None
    wanted = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
    return f"out of memory: {wanted[1]} more could not be allocated" if wanted else "out of memory"


def of_the_system(error: BaseException) -> str | None:
    """Return a one-line message for an operating-system error about a file, or None for any other error."""
    room = no_room(error)
    if room is not None:
        return f"{room.reason} ({error}): {room.advice}"
    if isinstance(error, OSError) and isinstance(error.filename, str):
        return f"{error.filename}: {error.strerror}"
    return None


LOST_PROCESS = "another process of this run has ended, and this one cannot continue without it"


def lost_process(error: BaseException) -> str | None:
    """Return a one-line message if another process of a run has ended while this one waited for it, else None."""
    # PyTorch raises what its libraries for communication say, as a RuntimeError.
    lost = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "ncclRemoteError")
    if isinstance(error, RuntimeError) and any(words in str(error) for words in lost):
        return LOST_PROCESS
    return None


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Convert whatever a user's function, `what`, raises, including `sys.exit`, to a UserCodeError with its location.

    Raises:
        UserCodeError: the function raised something other than a UserError.
    """
    process, exit_code = os.getpid(), 1
    try:
        with arrivals(signal.SIGINT) as pressed:
            yield
        exit_code = 0
    except (UserError, TerminatedError):
        raise
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            exit_code = 0
        if isinstance(error, KeyboardInterrupt) and pressed:
            raise
        raise UserCodeError(f"{what} raised {in_a_line(error)}{place_of(error)}") from error
    finally:
        if os.getpid() != process:
            os._exit(exit_code)


def in_a_line(error: BaseException) -> str:
    """Return the class and message of a user's exception in one line, shortened."""
    message = shortened(" ".join(_message(error).split()), 300)
    name = type(error).__name__
    return f"{name}: {message}" if message else name


def _message(error: BaseException) -> str:
    """Return the message of an exception; the class of a user's exception may fail to write one."""
    try:
        return error.msg if isinstance(error, SyntaxError) else str(error)
    except BaseException:
        return ""


def place_of(error: BaseException) -> str:
    """Return the last location in the user's files, else in an installed package, or "" if there is neither.

    Frames of Cavesson and of Python's standard library are ignored.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}, line {error.lineno})"
    frames = [*reversed(traceback.extract_tb(error.__traceback__))]
    theirs = [one for one in frames if one.filename.startswith(_INSTALLED) or not one.filename.startswith(_OURS)]
    place = next((one for one in theirs if is_of_user(one.filename)), next(iter(theirs), None))
    return f" ({place.filename}, line {place.lineno})" if place else ""


def is_of_user(filename: str) -> bool:
    """Return whether a source file is the user's: not of Cavesson, Python's standard library or a package."""
    return not filename.startswith((*_INSTALLED, *_OURS))
