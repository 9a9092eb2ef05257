"""What is said of a source in no known format: what it holds, which format is nearest, and what would read it."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cavesson.importers.archives import ARCHIVES, EVAL, archive_rows
from cavesson.importers.databases import inside, nothing_in
from cavesson.importers.rollout import Format
from cavesson.importers.steps import STEP_COLUMNS

First = Mapping[str, Any]
USUAL = {
    "prompt": ("prompt", "question", "query", "input", "input_prompt", "problem", "instruction", "prompt_text"),
    "response": (
        "response", "completion", "answer", "output", "output_response", "model response", "generated_text",
        "response_text", "generation", "prediction", "text", "responses", "completions", "outputs",
    ),
    "reward": ("reward", "score", "rewards", "total_reward", "final_reward", "scores", "return", "label", "acc"),
    "step": STEP_COLUMNS,
}  # fmt: skip
"""Usual names of what a rollout needs; with them, a mapping can be proposed."""
_INSTEAD = {
    (".pth", ".pkl", ".pickle"): "{} can execute code when it is read: write its rollouts as JSON Lines",
    (".gz", ".zst", ".xz", ".bz2", ".zip", ".tar", ".tgz"): "unpack {}",
    (".json", ".csv", ".tsv", ".npy", ".npz", ".arrow", ".html"): "write {} as JSON Lines",
}
_COLUMNS = 12
_WITHOUT_TEXTS = {
    frozenset({"schema_version", "iteration", "group_idx", "traj_idx", "total_reward", "steps"}): (
        "these are the rollout summaries of tinker-cookbook, which have rewards and lengths but no prompts and no "
        "responses; record its trajectories with cavesson.Recorder, and read its metrics.jsonl with --metrics"
    ),
}
"""Keys of records in which tools write no texts → what is said of them."""


def unknown(source: Path, files: Iterable[Path], firsts: Mapping[Path, First | None], known: Iterable[Format]) -> str:
    """Return the message for a source without rollouts in a known format.

    ``firsts`` are the files that can be read, each with the first of its records that is an object.
    """
    if not firsts and inside(source) is not None:
        return f"{source} has no rollouts: {nothing_in(source)}"
    if not firsts:
        return _nothing_to_read(source, [*files])
    holds = f" ({holding(files)})" if source.is_dir() else ""
    objects = {path: record for path, record in firsts.items() if record}
    if not objects and (path := next((path for path in firsts if path.name.endswith(ARCHIVES)), None)):
        name = path.relative_to(source) if source.is_dir() else "it"
        return f"{source} is not in a known format{holds}: {name} cannot be read: {_why_not(path)}"
    if not objects:
        first = next(iter(firsts)).name if source.is_dir() else "it"
        begins = f"{first} does not begin with a JSON object on one line, nor with the rows of a table"
        return f"{source} is not in a known format{holds}: {begins}"
    path, record = max(objects.items(), key=lambda one: len(_proposed(one[1])))
    for keys, why in _WITHOUT_TEXTS.items():
        if keys <= record.keys():
            return f"{source} cannot be imported{holds}: {why}"
    name = path.relative_to(source) if source.is_dir() else "it"
    columns = ", ".join([*map(str, list(record)[:_COLUMNS]), *["…"][: len(record) > _COLUMNS]])
    return f"{source} is not in a known format{holds}: {name} has the columns {columns}\n{_way_out(record, known)}"


def _why_not(archive: Path) -> str:
    try:
        return "it holds no samples" if next(archive_rows(archive), None) is None else "its samples are not objects"
    except (ValueError, OSError) as error:
        instead = "" if archive.suffix == EVAL else "; write its rollouts as JSON Lines"
        return f"{error}{instead}"


def holding(files: Iterable[Path]) -> str:
    """Return how many files of each kind there are: "3 .jsonl files, 1 .png file"."""
    kinds = Counter(path.suffix or "nameless" for path in files)
    return ", ".join(f"{count} {kind} {'file' if count == 1 else 'files'}" for kind, count in kinds.most_common())


def _nothing_to_read(source: Path, files: Sequence[Path]) -> str:
    found = f"it holds {holding(files)}" if files else "it is empty"
    text = f"{source} has no .jsonl, .parquet or .table.json files: {found}"
    if database := next((path for path in sorted(files) if inside(path) is not None), None):
        return f"{text}\n{database.relative_to(source)}: {nothing_in(database)}"
    for ends, advice in _INSTEAD.items():
        if path := next((path for path in sorted(files) if path.name.endswith(ends)), None):
            return f"{text}\n{advice.format(path.relative_to(source))}"
    return text


def _way_out(record: First, known: Iterable[Format]) -> str:
    proposed = _proposed(record)
    names = {name: proposed.get(name, "COLUMN") for name in ("prompt", "response", "reward")} | proposed
    maps = [f"--map {name}={_quoted(column)}" for name, column in names.items() if name != column]
    near = min((lacking for format in known if (lacking := _lacking(format, record)).keys), default=None)
    nearest = f"the nearest format is {near.format}, without {', '.join(near.keys)}; " if near else ""
    return f"{nearest}to read any other table, name its columns: {' '.join(maps)}"


class _Lacking(NamedTuple):
    number: int
    format: str
    keys: list[str]


def _lacking(format: Format, record: First) -> _Lacking:
    wanting = [keys for keys in format.keys if keys - record.keys()]
    keys = min(wanting, key=lambda keys: len(keys - record.keys()), default=frozenset[str]())
    lacking = sorted(keys - record.keys())
    return _Lacking(len(lacking), format.name, lacking if 2 * len(lacking) <= len(keys) else [])


def _quoted(column: str) -> str:
    return f"'{column}'" if " " in column else column


def _proposed(record: First) -> dict[str, str]:
    """Return the columns that are likely what a rollout needs, each for one name only."""
    found: dict[str, str] = {}
    for name, usual in USUAL.items():
        column = next((column for column in usual if column in record and column not in found.values()), None)
        if column is not None:
            found[name] = column
    return found
