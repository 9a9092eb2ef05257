"""Where what is derived from a run lies: the board's index, and what the doctor found."""

import hashlib
import json
import os
from pathlib import Path

from cavesson.record.reader import Run


def index_folder(run: Run) -> Path:
    """Returns ``RUN/index``, or a folder in the user's cache where the run is remote or may not be written."""
    root = local_folder(run)
    # A folder that is to become a run stays as it is until then.
    if root is not None and run.info and _may_be_written(root / "index"):
        return root / "index"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = run.folder if root is None else os.path.abspath(root)
    name = hashlib.sha256(place.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return cache / "cavesson" / "index" / name


def _may_be_written(folder: Path) -> bool:
    """Whether a folder is ours to write: a run from somebody else may hold links to files that are not part of it."""
    if not os.path.lexists(folder):
        return os.access(folder.parent, os.W_OK)
    is_folder = folder.is_dir() and not folder.is_symlink() and os.access(folder, os.W_OK)
    return is_folder and not any(path.is_symlink() for path in folder.iterdir())


def local_folder(run: Run) -> Path | None:
    """Returns the folder of a run, or None if it is not on this machine."""
    return Path(run.storage.root) if run.storage.filesystem is None else None


def fingerprint(run: Run) -> str:
    """Returns what tells one run from another that was put into the same folder later."""
    return hashlib.sha256(json.dumps(run.info, sort_keys=True, default=str).encode()).hexdigest()[:16]
