"""Other trainers' logs into a run folder."""

from collections.abc import Callable
from pathlib import Path

from dressage.importers import rl_logging_board

IMPORTERS: dict[str, Callable[[Path, Path], int]] = {
    "rl-logging-board": rl_logging_board.import_,
}
"""Format → a function of the source and the run folder to write, which returns the number of rollouts."""
