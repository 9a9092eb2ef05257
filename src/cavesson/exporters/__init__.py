"""Export a run folder to the formats of other tools."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from cavesson.exporters import conversations, openenv, rl_logging_board, tables, trl
from cavesson.record.storage import Location

EXPORTERS: dict[str, Callable[[Location, Path, bool], int]] = {
    "rl-logging-board": rl_logging_board.export,
    "trl": trl.export,
    "openenv": openenv.export,
    "csv": partial(tables.export, format="csv"),
    "jsonl": partial(tables.export, format="jsonl"),
    "parquet": partial(tables.export, format="parquet"),
    "sft": partial(conversations.export, format="sft"),
    "preference": partial(conversations.export, format="preference"),
}
"""Format → a function of the run's place, the folder or file to write and whether the record may be at another place
that the run names; it returns the number of rollouts, or of lines in a file."""
