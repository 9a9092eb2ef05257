"""The table of all runs on the board, made from what their folders say: no run is opened or indexed for it."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cavesson.board.opening import CHANGING, changed
from cavesson.board.runs import LIVE_SECONDS, Board, Listed, reading
from cavesson.board.selection import NoQuery
from cavesson.errors import UserError
from cavesson.findings.stored import Findings, findings_file, read_findings
from cavesson.ops.intervals import mean_interval
from cavesson.record import Run
from cavesson.record.read.both_rewards import prompt_numbers
from cavesson.record.read.index_folder import fingerprint, index_folder, local_folder
from cavesson.record.read.reader import run_info
from cavesson.record.segments import LiveSegments, Segment
from cavesson.record.splits import is_held_out
from cavesson.record.storage import storage
from cavesson.text.masking import masked

MAX_FILES = 16
"""Files of the newest steps in which a reward, or a held-out one, is looked for."""
SEEDS = {"seed", "data_seed"}
PLACES = {"run", "record", "output_dir", "run_name", "logging_dir"}
"""Settings that are different for every run, whatever it does."""
MAX_VALUE = 200
"""Characters of a setting."""
Reading = dict[str, Any]


def table(board: Board, query: NoQuery) -> dict[str, Any]:
    """Return a line for every run: what it is, how far it has come, its last reward, its findings and settings.

    ``reward`` is that of the last step, and ``gain`` how much higher the rewards of held-out prompts were at the last
    evaluation than before training, or than the reference's: mean and 95 % interval. ``settings`` are those whose
    value is not the most common one, which ``usual`` has. Runs with the same ``group`` differ in nothing but the seed.
    """
    lines = [board.known(one.path, _stamp(one), partial(_read, one)) for one in board.listed()]
    usual = _usual([line["config"] for line in lines if line["config"]])
    return {
        "folders": [str(folder) for folder in board.folders],
        "usual": usual,
        "runs": [_shown(line, usual) for line in lines],
    }


def _shown(line: Reading, usual: Mapping[str, str | None]) -> Reading:
    config = line["config"]
    settings = {name: config.get(name) for name, value in usual.items() if config and config.get(name) != value}
    return {name: value for name, value in line.items() if name != "config"} | {
        "state": _state(line), "settings": settings, "group": _group(line),
    }  # fmt: skip


def _state(line: Reading) -> str:
    """Return whether a run is broken, in training, or over: finished, or stopped before the steps it was to have."""
    if line["problem"] is not None:
        return "broken"
    if line["recorded"] is not None and time.time() - line["recorded"] < LIVE_SECONDS:
        return "training"
    return "finished" if line["planned"] is None or (line["steps"] or 0) >= line["planned"] else "stopped"


def _group(line: Reading) -> str | None:
    if not line["config"]:
        return None
    told = [line["algorithm"], line["model"], sorted(line["config"].items())]
    return hashlib.sha256(json.dumps(told, default=str).encode()).hexdigest()[:16]


def _usual(configs: Sequence[Mapping[str, str]]) -> dict[str, str | None]:
    """Return the most common value of every setting that differs; of equally common ones, that of the first run."""
    names = dict.fromkeys(name for config in configs for name in config)
    counts = {name: Counter(config.get(name) for config in configs) for name in names}
    return {name: found.most_common(1)[0][0] for name, found in counts.items() if len(found) > 1}


def _stamp(one: Listed) -> Any:
    """Return a value that changes when the folder of a run says something else."""
    places = [*(Path(one.path) / name for name in CHANGING), Path(one.path) / "index" / "findings.json"]
    return tuple(changed(place) for place in places)


def _read(one: Listed) -> Reading:
    """Return what the folder of a run says."""
    line: Reading = dict.fromkeys(
        ("algorithm", "model", "seed", "steps", "planned", "reward", "gain", "findings", "recorded", "began", "problem")
    )
    line |= {"run": one.key, "name": one.name, "path": one.path, "config": {}}
    try:
        files = storage(one.path)
        run = Run(files, masked(run_info(files)))
        line |= _described(run.info)
        line |= _findings(run)
        with reading():
            line |= _recorded(run)
    except UserError as error:
        line["problem"] = " ".join(str(error).split("\n"))
    return line


def _described(info: Mapping[str, Any]) -> Reading:
    model, config = info.get("model"), info.get("config")
    config = config if isinstance(config, dict) else {}
    start = config.get("model")
    known = model.get("name") if isinstance(model, dict) else model
    given = start.get("path") if isinstance(start, dict) else start
    steps = info.get("steps")
    seed = config.get("seed")
    return {
        "algorithm": _text(info.get("algorithm")),
        "model": _text(known or given),
        "seed": seed if isinstance(seed, int) else None,
        "planned": steps if isinstance(steps, int) else None,
        "config": dict(_flat("", config)),
    }


def _text(value: Any) -> str | None:
    return value[:MAX_VALUE] if isinstance(value, str) else None


def _flat(prefix: str, value: Any) -> Iterable[tuple[str, str]]:
    """Yield every setting by its path, but for those that no two runs share."""
    if isinstance(value, dict) and (value or not prefix):
        for name, inner in value.items():
            if prefix or name not in SEEDS | PLACES:
                yield from _flat(f"{prefix}.{name}" if prefix else str(name), inner)
    else:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        yield prefix, text[:MAX_VALUE]


def _findings(run: Run) -> Reading:
    """Return how many findings of each severity the doctor stored, and their titles by language; None without any."""
    seen: Findings | None = read_findings(findings_file(index_folder(run)))
    if seen is None or seen.run != fingerprint(run):
        return {"findings": None}
    counts = Counter(finding.severity for finding in seen.findings.get("en", ()))
    titles = {language: [finding.title for finding in found] for language, found in seen.findings.items()}
    return {"findings": {"error": 0, "warning": 0, "note": 0} | dict(counts) | {"titles": titles}}


def _recorded(run: Run) -> Reading:
    live = run.consistent(lambda live: live)
    folder = local_folder(run)
    last = [segment.stop - 1 for segment in (*live.rows, *live.steps)]
    return {
        "steps": max(last) + 1 if last else None,
        "reward": _newest(run, live, "reward", held_out=False),
        "gain": _newest(run, live, "gap", held_out=True),
        "recorded": None if folder is None else changed(folder / "record") / 1e9 or None,
    }


def _newest(run: Run, live: LiveSegments, column: str, *, held_out: bool) -> Reading | None:
    """Return the mean and the 95 % interval of a column of the newest step that has it in training, or held out."""
    for segment in islice(reversed(live.rows), MAX_FILES):
        found = _lines(run, segment, column, held_out=held_out)
        if found is not None and found.num_rows:
            return _interval(run, pc.max(found["step"]).as_py(), column, held_out=held_out)
    return None


def _lines(run: Run, segment: Segment, column: str, *, held_out: bool) -> pa.Table | None:
    names = ["step", "split", "level", "column", "count"]
    try:
        lines = run.storage.parquet(segment.name("rollups")).read(names)
    except FileNotFoundError:
        return None
    chosen = is_held_out(lines["split"]) if held_out else pc.invert(is_held_out(lines["split"]))
    for one in (
        pc.equal(lines["level"], "row"), pc.equal(lines["column"], column), pc.less(lines["step"], segment.stop),
        pc.greater(lines["count"], 0),
    ):  # fmt: skip
        chosen = pc.and_(chosen, one)
    return lines.filter(chosen)


def _interval(run: Run, step: int, column: str, *, held_out: bool) -> Reading | None:
    """Return the mean of the rewards of a step, or of their gaps, with its interval; prompts count as independent."""
    rows = run.rows(["split", "group", "reward", "ref_reward"], [step])
    values = pc.subtract(rows["reward"], rows["ref_reward"]) if column == "gap" else rows["reward"]
    mine = is_held_out(rows["split"]) if held_out else pc.invert(is_held_out(rows["split"]))
    known = pc.and_(mine, pc.fill_null(pc.is_finite(values), False)).to_numpy()
    numbers = values.to_numpy()[known]
    if not len(numbers):
        return None
    found = mean_interval(numbers.tolist(), prompt_numbers(run, rows, [step])[known].tolist())
    return {"mean": found.mean, "low": found.low, "high": found.high, "count": len(numbers), "step": step}
