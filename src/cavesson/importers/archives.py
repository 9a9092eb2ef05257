"""Read files that are archives: logs of Inspect, what PyTorch saved, batches of SkyRL. Nothing in them is executed."""

import json
import lzma
import pickle
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cavesson.record.precision import Array

EVAL = ".eval"
SAVED = ".pt"
BATCH = "training_input.pkl"
ARCHIVES = (EVAL, SAVED, BATCH)
"""Ends of the names of these files."""
# What zipfile and pickle raise for a damaged file: by their documentation, anything.
_UNREADABLE = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, pickle.UnpicklingError, OSError, EOFError),
    *(RuntimeError, AttributeError, IndexError, KeyError, TypeError),
)


def archive_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of an archive; raise ValueError if it cannot be read, or is still being written."""
    try:
        if path.name.endswith(BATCH):
            yield from _batch(path)
            return
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


def _batch(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the samples of a batch: the ids of prompt and response, and the list of each tensor of response tokens."""
    with path.open("rb") as file:
        state = _BatchUnpickler(file).load()
    tensors, metadata = state["batch_dict"], state.get("metadata") or {}
    arrays = {name: array for name, one in tensors.items() if (array := _array(one)) is not None}
    if not {"sequences", "attention_mask", "response_mask"} <= arrays.keys():
        raise ValueError("it is not a batch of SkyRL")
    ids, is_token, is_response = arrays["sequences"], arrays["attention_mask"] != 0, arrays["response_mask"] != 0
    width = is_response.shape[1]
    lists = [name for name, array in arrays.items() if array.shape == is_response.shape and name != "response_mask"]
    unread = sorted(name for name, one in tensors.items() if one is not None and name not in arrays)
    for place in range(len(ids) - metadata.get("pad_size", 0)):
        own = is_response[place]
        is_prompt = is_token[place] & ~np.concatenate([np.zeros(ids.shape[1] - width, np.bool_), own])
        sample = {"prompt_token_ids": ids[place][is_prompt], "response_ids": ids[place, -width:][own]}
        sample |= {name: arrays[name][place][own] for name in lists}
        record: dict[str, Any] = {name: array.tolist() for name, array in sample.items()}
        of_sample = {name: values[place] for name, values in metadata.items() if _is_of_samples(values, len(ids))}
        yield record | of_sample | ({"not_read": unread} if unread else {})


def _is_of_samples(values: Any, count: int) -> bool:
    return isinstance(values, list) and len(values) == count


def _array(tensor: Any) -> Array | None:
    """Return a tensor that SkyRL wrote as bytes; None for one that only PyTorch can read."""
    if not isinstance(tensor, dict) or not {"data", "dtype", "shape"} <= tensor.keys():
        return None
    return np.frombuffer(tensor["data"], np.dtype(tensor["dtype"])).reshape(tensor["shape"])


class _PlainUnpickler(pickle.Unpickler):
    """Reads lists, dictionaries, texts and numbers, and refuses everything that would call code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it contains {module}.{name}, and only texts, numbers, lists and dicts are read")


class _BatchUnpickler(_PlainUnpickler):
    """Reads a batch of SkyRL as the state that it was saved as."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "device"):
            return str
        if not module.endswith(".training_batch"):
            return super().find_class(module, name)
        return _state if name == "_rebuild_tensor_batch" else name


def _state(kind: Any, state: Any) -> Any:
    return state
