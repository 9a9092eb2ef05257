"""Environments that were played by a learner, on their way to a reward worker: as copies."""

import pickle
from collections.abc import Iterable
from typing import Any

from cavesson.errors import UserCodeError, first_line
from cavesson.functions import load_function
from cavesson.rollout.settings import EnvironmentSettings


class NotSent:
    """An environment that could not be sent. A reward that does not use it is not affected; others raise the reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        raise UserCodeError(self._reason)


def packed(environments: Iterable[Any]) -> list[bytes | str]:
    """Return environments as bytes; for one that cannot be pickled, the reason."""
    return [_packed(one) for one in environments]


def unpacked(environments: Iterable[bytes | str]) -> list[Any]:
    """Return copies of the environments that were packed."""
    return [NotSent(one) if isinstance(one, str) else _unpacked(one) for one in environments]


def load_classes(settings: EnvironmentSettings) -> None:
    """Import the code of environments, whose instances refer to it, or raise a UserError."""
    for name in settings.named.values():
        load_function(name, "environment")


def _packed(environment: Any) -> bytes | str:
    try:
        return pickle.dumps(environment)
    except Exception as error:  # the user's object may have any, and a reward may not need it
        return _reason(type(environment).__name__, error)


def _unpacked(environment: bytes) -> Any:
    try:
        return pickle.loads(environment)
    except Exception as error:  # see _packed
        return NotSent(_reason("of this episode", error))


def _reason(which: str, error: Exception) -> str:
    return (
        f"the environment {which} cannot be sent to a reward worker ({first_line(error)}): define __getstate__ so that "
        "it can be pickled, or set ray.reward_workers.count to 0"
    )
