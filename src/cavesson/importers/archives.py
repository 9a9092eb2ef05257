"""Read files that are archives: logs of Inspect, and what PyTorch saved. Nothing in them is executed."""

import json
import lzma
import pickle
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EVAL = ".eval"
SAVED = ".pt"
ARCHIVES = (EVAL, SAVED)
# What zipfile and pickle raise for a damaged file: by their documentation, anything.
_UNREADABLE = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, pickle.UnpicklingError, OSError, EOFError),
    *(RuntimeError, AttributeError, IndexError, KeyError, TypeError),
)


def archive_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of an archive; raise ValueError if it cannot be read, or is still being written."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield from _samples(archive) if path.suffix == EVAL else _saved(archive)
    except _UNREADABLE as error:
        raise ValueError(str(error) or type(error).__name__) from error


def _samples(archive: zipfile.ZipFile) -> Iterator[dict[str, Any]]:
    """Yield the samples of an evaluation, each with ``eval``, what the log says of the task and the model."""
    names = archive.namelist()
    header = next((name for name in ("header.json", "_journal/start.json", "start.json") if name in names), None)
    about = json.loads(archive.read(header)).get("eval", {}) if header else {}
    kept = {name: about[name] for name in ("task", "model", "run_id", "created") if name in about}
    for name in names:
        if name.startswith("samples/") and name.endswith(".json"):
            sample = json.loads(archive.read(name))
            yield sample | {"eval": kept} if isinstance(sample, dict) else {"sample": sample}
    if "header.json" not in names and "results.json" not in names:
        raise ValueError("the evaluation has not ended")


def _saved(archive: zipfile.ZipFile) -> Iterator[dict[str, Any]]:
    """Yield the samples of a dump, each with the other values of the dump."""
    name = next((name for name in archive.namelist() if name.endswith("data.pkl")), None)
    if name is None:
        raise ValueError("it was not saved by PyTorch")
    with archive.open(name) as file:
        content = _PlainUnpickler(file).load()
    samples = content.get("samples") if isinstance(content, dict) else None
    if not isinstance(samples, list):
        raise ValueError("expected an object with samples")
    others = {key: value for key, value in content.items() if key != "samples"}
    for sample in samples:
        yield others | sample if isinstance(sample, dict) else others | {"sample": sample}


class _PlainUnpickler(pickle.Unpickler):
    """Reads lists, dictionaries, texts and numbers, and refuses everything that would call code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it contains {module}.{name}, and only texts, numbers, lists and dicts are read")
