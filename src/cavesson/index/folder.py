"""The files of an index and its state: a JSON file whose atomic rename makes everything added before it visible."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from filelock import FileLock, Timeout

from cavesson.record.files import write_text

BLOCK = 1 << 16
"""Rows whose words are kept together."""
PROBLEM = "problem.txt"
"""Why the index does not grow; the file is there only while that is so."""
TEXT_ROWS = 32
"""Rows whose texts are kept together."""
KINDS_OF_FILES: tuple[Literal["words", "rows", "patterns"], ...] = ("words", "rows", "patterns")
"""Of a piece of the words."""
CALL_COLUMNS = {"row": "<i4", "tool": "<i4", "failed": "|u1", "seconds": "<f4"}
"""The files of the calls of tools, and the dtype of each."""
UNUSED_SECONDS = 60
OURS = re.compile(
    r"state\.json|problem\.txt|dead|prompts|texts|texts-places|turns|turns-places|calls-[a-z]+|column-\d{3,}"
    r"|order-\d{3,}-\d+|rescore-\d+|rollups-[a-z_]+|metrics-\d+\.arrow|(words|rows)-\d{6,}\.arrow|patterns-\d{6,}-\d+\.arrow|\.[\w.-]+"
)
"""Names of the files of an index. Whatever else is in its folder is somebody else's: never opened, never removed."""
VERSION = 8
"""Raised whenever the files change their meaning: an index of another version is built anew."""


@dataclass(frozen=True)
class ColumnFile:
    """One column: a raw little-endian file of ``rows`` numbers; ``missing`` is True if any of them was not measured."""

    file: str
    dtype: str
    missing: bool = False


@dataclass(frozen=True)
class Piece:
    """The features of rows ``first`` to ``stop`` − 1, all of one block; new features are numbered from ``features``."""

    number: int
    first: int
    stop: int
    features: int
    new: int
    dead: int = 0
    """How many superseded rows were known when its patterns were counted."""

    @property
    def block(self) -> int:
        return self.first // BLOCK

    def name(self, kind: Literal["words", "rows", "patterns"]) -> str:
        """Return the name of one of the files of the piece."""
        return f"{kind}-{self.number:06d}" + (f"-{self.dead:d}" if kind == "patterns" else "") + ".arrow"


@dataclass(frozen=True)
class State:
    """Which parts of the files are valid. Files only grow, so an older state remains readable."""

    run: str
    cursor: str | None = None
    rows: int = 0
    recorded: int = 0
    """Rows that the index will have once everything is added that the record had when it was last looked at."""
    dead: int = 0
    columns: dict[str, ColumnFile] = field(default_factory=dict)
    codes: dict[str, list[str]] = field(default_factory=dict)
    prompts: int = 0
    """Different prompts so far."""
    orders: dict[str, str] = field(default_factory=dict)
    ordered_rows: int = 0
    texts: int = 0
    """Rows whose texts are stored."""
    turns: int = 0
    """Rows whose turns are stored."""
    calls: int = 0
    """Calls of tools."""
    tools: tuple[str, ...] = ()
    """The names of the tools that were called; '' for calls without a name."""
    rollups: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Lines and bins of the roll-ups of rows and of tokens."""
    rollup_columns: tuple[str, ...] = ()
    metrics: int = 0
    """Number of the newest file of metrics."""
    metrics_cursor: str = ""
    rescored: dict[str, str] = field(default_factory=dict)
    """The names of rewards that were computed again, and what tells whether there are more of them."""
    rescored_files: int = 0
    """Number of the newest file of such rewards."""
    pieces: tuple[Piece, ...] = ()
    text_rows: int = 0
    version: int = VERSION

    def with_(self, **changes: Any) -> Self:
        return replace(self, **changes)


def read_state(folder: Path) -> State | None:
    """Return the state, or None if there is no state that this version can read."""
    try:
        content = json.loads((folder / "state.json").read_bytes())
        if content["version"] != VERSION:
            return None
        columns = {name: ColumnFile(**column) for name, column in content["columns"].items()}
        pieces = tuple(Piece(**piece) for piece in content["pieces"])
        rollups = {level: (lines, bins) for level, (lines, bins) in content["rollups"].items()}
        content |= {"columns": columns, "pieces": pieces, "rollups": rollups}
        state = State(**content | {name: tuple(content[name]) for name in ("rollup_columns", "tools")})
        return state if _is_whole(folder, state) else None
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _is_whole(folder: Path, state: State) -> bool:
    """Return whether all files of the state have valid names and at least their expected sizes."""
    sizes = {column.file: int(column.dtype[-1]) * state.rows for column in state.columns.values()}
    sizes |= dict.fromkeys(state.orders.values(), 4 * state.ordered_rows)
    sizes |= {"dead": 4 * state.dead, "prompts": 8 * state.prompts}
    for name, rows in (("texts", state.texts), ("turns", state.turns)):
        sizes |= {name: 1, f"{name}-places": 16 * (1 + rows // TEXT_ROWS)} if rows else {}
    if state.calls:
        sizes |= {f"calls-{name}": int(dtype[-1]) * state.calls for name, dtype in CALL_COLUMNS.items()}
    sizes |= {piece.name(kind): 1 for piece in state.pieces for kind in KINDS_OF_FILES}
    sizes |= {metrics_name(state.metrics): 1} if state.metrics else {}
    return all(
        OURS.fullmatch(name) and (not size or (folder / name).stat().st_size >= size) for name, size in sizes.items()
    )


def write_state(folder: Path, state: State) -> None:
    write_text(folder / "state.json", json.dumps(asdict(state)))


def clear(folder: Path) -> None:
    """Remove an index; processes that are reading it keep their open files."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if OURS.fullmatch(path.name) and not path.is_dir():
            path.unlink()


def sweep(folder: Path, state: State) -> None:
    """Remove files that the state no longer refers to, once no reader can be about to open them."""
    meant = {piece.name(kind) for piece in state.pieces for kind in KINDS_OF_FILES}
    for path in folder.glob("*.arrow"):
        if (
            not path.name.startswith("metrics")
            and path.name not in meant
            and time.time() - path.stat().st_mtime > UNUSED_SECONDS
        ):
            path.unlink()


def metrics_name(number: int) -> str:
    """Return the name of a file of metrics."""
    return f"metrics-{number:d}.arrow"


@contextmanager
def only_writer(folder: Path) -> Iterator[bool]:
    """Yield whether this process may write the index; a second board of the same run only reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "lock", blocking=False)
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()
