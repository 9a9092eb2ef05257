"""What a user sees when something is wrong: one or two plain lines, and an exit code."""

import errno


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
