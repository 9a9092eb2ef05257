"""What a user sees when something is wrong: one or two plain lines, and an exit code."""

import errno
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from cavesson.text.visible import visible


class UserError(Exception):
    """A mistake the user can mend; the message names the place and the way out."""

    exit_code = 2


class StoppedError(UserError):
    """A run was stopped on purpose and can be continued; the message says why, a note how."""

    exit_code = 3


class SignalledError(StoppedError):
    """A run was ended by a signal and can be continued; the exit code is the one that shells give to that signal.

    Args:
        message: says where.
        number: of the signal.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class TerminatedError(BaseException):
    """SIGTERM asked a command to end; nothing but the command line handles it."""


class NonFiniteError(UserError):
    """A NaN or an infinity appeared while training; the message names the step and the tensor."""


class UserCodeError(UserError):
    """The user's own function raised something, or returned what it must not; the message names it and its line."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its class where the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def print_exception(error: BaseException) -> None:
    """Print a traceback; what it quotes from files cannot act on the terminal."""
    print(visible("".join(traceback.format_exception(error))), file=sys.stderr, end="")


class NoRoomError(UserError):
    """There was no room to write what a run needs; the message says where and why, and a note how it is continued."""


class NoRoom(NamedTuple):
    """Why there was no room to write, and what to do."""

    reason: str
    advice: str


_NO_ROOM = {
    errno.ENOSPC: NoRoom("the disk is full", "free space"),
    errno.EDQUOT: NoRoom("the disk quota is used up", "free space"),
    errno.EFBIG: NoRoom("the limit on the size of a file is reached", "raise it (ulimit -f)"),
}


def no_room(error: BaseException) -> NoRoom | None:
    """Returns why writing failed for want of room, and None where it failed for another reason."""
    if isinstance(error, OSError):
        return _NO_ROOM.get(error.errno or 0)
    # safetensors has the number in its text only.
    return next((room for number, room in _NO_ROOM.items() if f"(os error {number})" in str(error)), None)


def of_the_system(error: BaseException) -> str | None:
    """Returns a line for an error of the operating system about a file, and None for any other error."""
    room = no_room(error)
    if room is not None:
        return f"{room.reason} ({error}): {room.advice}"
    if isinstance(error, OSError) and isinstance(error.filename, str):
        return f"{error.filename}: {error.strerror}"
    return None


@contextmanager
def told(what: str) -> Iterator[None]:
    """Turns whatever a user's function raises, `sys.exit` too, into a line that names its place in the user's files."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"{what} raised {_in_a_line(error)}") from error


def _in_a_line(error: BaseException) -> str:
    """The exception with its last place in the user's own files; all of it is in the exception that it causes."""
    message = " ".join((error.msg if isinstance(error, SyntaxError) else str(error)).split())
    if len(message) > 300:
        message = f"{message[:300]}…"
    name = type(error).__name__
    return (f"{name}: {message}" if message else name) + _place(error)


def _place(error: BaseException) -> str:
    """The last place in the user's own files, else in an installed package's; none in ours and Python's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}, line {error.lineno})"
    paths = sysconfig.get_paths()
    installed = (paths["purelib"], paths["platlib"])
    ours = (str(Path(__file__).parent), paths["stdlib"], "<frozen ")
    frames = reversed(traceback.extract_tb(error.__traceback__))
    theirs = [one for one in frames if one.filename.startswith(installed) or not one.filename.startswith(ours)]
    place = next((one for one in theirs if not one.filename.startswith(installed)), next(iter(theirs), None))
    return f" ({place.filename}, line {place.lineno})" if place else ""
