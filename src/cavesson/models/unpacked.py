"""GGUF files are read once: what they contain is kept as ordinary folders, which load in a fraction of a second."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from filelock import FileLock
from safetensors import SafetensorError

LARGEST = 256 << 20
"""Bytes of a GGUF file that is kept unpacked, which takes up to eight times as much room."""


def kept(file: Path, what: Literal["model", "tokenizer"], save: Callable[[Path], object]) -> Path | None:
    """Return the folder with the model or the tokenizer, `what`, of a GGUF file, unpacked.

    `save` reads the file and writes the folder, or does not write anything if it should not be kept.

    Returns:
        None if it is not kept: the file is too large, there is no room for it, or `save` has not written anything.
    """
    try:
        if file.stat().st_size > LARGEST:
            return None
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = cache / "cavesson" / "unpacked" / f"{_fingerprint(file)}-{what}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                _write(folder, save)
        return folder if folder.exists() else None
    except (OSError, RuntimeError, SafetensorError):  # reading the file without keeping it says what is wrong with it
        return None


def _write(folder: Path, save: Callable[[Path], object]) -> None:
    unfinished = folder.with_name(f".{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)  # what a killed process has left
    try:
        save(unfinished)
        if unfinished.exists():
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _fingerprint(file: Path) -> str:
    with file.open("rb") as opened:
        content = hashlib.file_digest(opened, "sha256").hexdigest()
    readers = " ".join(version(name) for name in ("transformers", "tokenizers", "gguf"))
    return hashlib.sha256(f"{content} {readers}".encode()).hexdigest()[:32]


@contextmanager
def read_once() -> Iterator[None]:
    """Let transformers parse a GGUF file and map the names of its weights once.

    Otherwise it would parse the file, with every word of the vocabulary, for the config and again for the weights, and
    map the names of all weights for each of the modules.
    """
    import gguf  # slow to import, and few models come as GGUF

    readers = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, reader in readers.items():
            setattr(gguf, name, cache(reader))
        yield
    finally:
        for name, reader in readers.items():
            setattr(gguf, name, reader)
