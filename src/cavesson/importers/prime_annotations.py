"""Annotations that prime-rl writes after a trace: ``traces/annotations/<producer>/*.jsonl``, or one file each.

A line names a trace; it has an ``info`` to be merged into that of the trace and, per branch, numbers for each token:
advantages from the orchestrator, log-probabilities and entropies from the trainer. If there are several, the last one
counts.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from cavesson.importers.fields import nested
from cavesson.importers.reading import SEALED, File, Record, in_order, parse, readable, unsealed
from cavesson.importers.rollout import Broken

LATER = 2
"""Steps after which what is written about a trace has arrived, in a run that is followed."""
_TOKENS = ("advantages", "trainer_logprobs", "entropies")


class Annotations:
    """Annotations of many traces: their lines are kept in a temporary file, and only their offsets in memory."""

    def __init__(self) -> None:
        self._files: dict[Path, File] = {}
        self._places: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        self._kept = TemporaryFile()  # noqa: SIM115  it is closed, and with that gone, with this object
        self._size = 0

    def read(self, streams: Sequence[Path], last: bool) -> list[tuple[Path, Record | None, str]]:
        """Read new annotations of some trace streams.

        Returns:
            The broken lines, each with its file and the reason; None for a file that cannot be read.
        """
        broken: list[tuple[Path, Record | None, str]] = []
        folders = {path.parents[path.parent.name == "stream"] / "annotations" for path in streams}
        for path in in_order([path for folder in folders for path in _lines_in(folder)]):
            file = self._files.setdefault(path, File(path))
            if file.grown():
                self._read(file, last, broken)
        self._kept.flush()
        return broken

    def _read(self, file: File, last: bool, broken: list[tuple[Path, Record | None, str]]) -> None:
        for record in readable(file, last, lambda reason: broken.append((file.path, None, reason))):
            try:
                self._keep(record)
            except Broken as reason:
                broken.append((file.path, record, str(reason)))

    def _keep(self, record: Record) -> None:
        if not isinstance(record.content, bytes):
            raise Broken(record.problem)
        if not record.content.strip():
            return
        update = parse(record.content)
        if not isinstance(update, dict) or not isinstance(update.get("trace_id"), str):
            raise Broken("an annotation has no 'trace_id'")
        self._places[update["trace_id"]].append((self._size, len(record.content)))
        self._size += self._kept.write(record.content)

    def add_to(self, record: Mapping[str, Any]) -> None:
        """Merge the annotations read so far into the traces of an episode."""
        traces = record.get("traces", [record])
        for trace in traces if isinstance(traces, list) else ():
            if isinstance(trace, dict) and isinstance(trace.get("id"), str):
                for place, size in self._places.get(trace["id"], ()):
                    _add(trace, parse(self._line(place, size)))

    def _line(self, place: int, size: int) -> bytes:
        if sys.platform == "win32":
            self._kept.seek(place)
            line = self._kept.read(size)
            self._kept.seek(self._size)  # the next line is written there
            return line
        # Forked processes, which Windows lacks, share the file, so each reads at an explicit offset.
        return os.pread(self._kept.fileno(), size, place)


def _lines_in(folder: Path) -> set[Path]:
    """Return the files of lines in a folder, by their names before compression and without index files."""
    found = [path for end in ("", *SEALED) for path in folder.glob(f"**/*.jsonl{end}")]
    return {path for path in map(unsealed, found) if not path.name.endswith(".index.jsonl")}


def _add(trace: dict[str, Any], update: Mapping[str, Any]) -> None:
    if isinstance(info := update.get("info"), dict):
        trace["info"] = _merged(trace.get("info"), info)
    nodes = trace.get("nodes")
    branches = update.get("branches")
    if not isinstance(nodes, list) or not all(isinstance(node, dict) for node in nodes):
        return  # the importer reports the broken trace
    paths = list(paths_of(nodes))
    for branch in branches if isinstance(branches, list) else ():
        index = branch.get("index") if isinstance(branch, dict) else None
        if type(index) is int and 0 <= index < len(paths):
            for name in _TOKENS:
                _spread(paths[index], name, branch.get(name))


def _merged(old: Any, new: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return old | {key: _merged(old.get(key), value) for key, value in new.items()}


def _spread(path: Sequence[dict[str, Any]], name: str, values: Any) -> None:
    """Give each node its part of a branch's per-token values, if there is one for each of its sampled tokens."""
    start = 0
    for node in path:
        ids, mask = node.get("token_ids") or [], node.get("mask") or []
        if not isinstance(ids, list) or not isinstance(mask, list) or not isinstance(values, list):
            return
        part = values[start : start + len(ids)]
        start += len(ids)
        sampled = [value for value, is_sampled in zip(part, mask, strict=False) if is_sampled]
        if len(part) == len(ids) and sampled and None not in sampled:
            node[name] = sampled


def paths_of(nodes: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield every path from a root to a leaf, in the order of the leaves.

    Raises:
        Broken: A node's parent is not an earlier node.
    """
    parents = [node.get("parent") for node in nodes]
    if any(p is not None and (type(p) is not int or not 0 <= p < i) for i, p in enumerate(parents)):
        raise Broken("a node's 'parent' is not an earlier node")
    for leaf in sorted(set(range(len(nodes))) - {p for p in parents if p is not None}):
        path: list[dict[str, Any]] = []
        at: int | None = leaf
        while at is not None:
            path.append(nodes[at])
            at = parents[at]
        yield path[::-1]


def arrival(content: bytes) -> int | None:
    """Return the step at which an episode arrived, or else was dispatched; None if it has neither."""
    try:
        record = parse(content)
    except Broken:
        return None
    steps = nested(record, "traces", 0, "info", "arrival", "step"), nested(record, "run", "work", "step")
    return next((step for step in steps if type(step) is int), None)
