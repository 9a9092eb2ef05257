"""A run of the benchmark that may end early."""

import traceback
from collections.abc import Callable
from pathlib import Path

from cavesson.errors import SignalledError


def attempt(folder: Path, train: Callable[[], None]) -> None:
    """Train a run; what went wrong stands in ``failed.txt`` of its folder.

    A fault may end a run early: its record up to there is what a user would have.

    Raises:
        SignalledError: it was stopped from outside, and is trained again the next time.
    """
    try:
        train()
    except SignalledError:
        raise
    except Exception:
        folder.mkdir(exist_ok=True)
        (folder / "failed.txt").write_text(traceback.format_exc(), encoding="utf-8")
