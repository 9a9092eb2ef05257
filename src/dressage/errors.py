"""What a user sees when something is wrong: one or two plain lines, and an exit code."""

import errno
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """A mistake the user can mend; the message names the place and the way out."""

    exit_code = 2


class StoppedError(UserError):
    """A run was stopped on purpose and can be continued; the message says why and how."""

    exit_code = 3


class NonFiniteError(UserError):
    """A NaN or an infinity appeared while training; the message names the step and the tensor."""


def is_disk_full(error: BaseException) -> bool:
    """Whether writing failed for want of room: a full disk, or a quota that is used up."""
    numbers = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError):
        return error.errno in numbers
    # safetensors has the number in its text only.
    return any(f"(os error {number})" in str(error) for number in numbers)


@contextmanager
def told(what: str) -> Iterator[None]:
    """Turns whatever a user's function raises into a line that names its last place in the user's own files."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        paths = sysconfig.get_paths()
        others = (str(Path(__file__).parent), paths["stdlib"], paths["purelib"], paths["platlib"])
        frames = traceback.extract_tb(error.__traceback__)
        place = next((one for one in reversed(frames) if not one.filename.startswith(others)), frames[-1])
        raised = f"{type(error).__name__}: {error} ({place.filename}, line {place.lineno})"
        raise UserError(f"{what} stops with {raised}") from error
