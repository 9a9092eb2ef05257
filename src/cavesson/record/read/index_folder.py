"""Locate the data derived from a run: the board's index and the doctor's findings."""

import hashlib
import json
import os
from pathlib import Path

from cavesson.record.read.reader import Run


def index_folder(run: Run) -> Path:
    """Return ``RUN/index``, or a folder in the user's cache if the run is remote or not writable."""
    root = local_folder(run)
    # A folder that is yet to become a run is left unchanged until then.
    if root is not None and run.info and _may_be_written(root / "index"):
        return root / "index"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    location = run.folder if root is None else os.path.abspath(root)
    name = hashlib.sha256(location.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return cache / "cavesson" / "index" / name


def _may_be_written(folder: Path) -> bool:
    """Whether a folder may be written: a run from an untrusted source may contain links to files outside it, or pipes.

    Such a run gets its index in the user's cache.
    """
    if not os.path.lexists(folder):
        return os.access(folder.parent, os.W_OK)
    is_folder = folder.is_dir() and not folder.is_symlink() and os.access(folder, os.W_OK)
    return is_folder and all((path.is_file() or path.is_dir()) and not path.is_symlink() for path in folder.iterdir())


def local_folder(run: Run) -> Path | None:
    """Return the folder of a run, or None if it is not on this machine."""
    return Path(run.storage.root) if run.storage.filesystem is None else None


def fingerprint(run: Run) -> str:
    """Return a hash that distinguishes a run from another one that is put into the same folder later."""
    return hashlib.sha256(json.dumps(run.info, sort_keys=True, default=str).encode()).hexdigest()[:16]
