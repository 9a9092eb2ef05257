"""What other trainers would have left of the planted runs, and what the doctor says of it once it is imported.

Each format is written as its trainer writes it, field by field, from what the planted run recorded: what the trainer
does not write is not there. Held-out rollouts, which verl and TRL keep elsewhere, are left out.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import cavesson
from benchmarks.faults.case import CALIBRATION_SEEDS, Case
from benchmarks.faults.fault import ONLINE
from benchmarks.faults.planted import FAULTS
from benchmarks.faults.results import Result, case_of, said_of
from cavesson.exporters import EXPORTERS
from cavesson.importers import import_run
from cavesson.importers.fields import to_json
from cavesson.record import Run

COLUMNS = ("step", "sample", "split", "prompt", "response", "ground_truth", "reward", "reward_parts")


def write_verl(folder: Path, out: Path) -> None:
    """Write what verl leaves in ``trainer.rollout_data_dir``: one ``{step}.jsonl`` per step, counted from 1.

    ``reward_extra_info`` is what the reward function returned beside the score: its parts, where there are several.
    """
    for step, rows in _steps(cavesson.open(folder)):
        with (out / f"{step + 1}.jsonl").open("w", encoding="utf-8") as file:
            for row in rows:
                line = {"input": row["prompt"], "output": row["response"], "gts": row["ground_truth"]}
                line |= {"score": row["reward"], "step": step + 1}
                parts = dict(row["reward_parts"] or ())
                file.write(to_json(line | (parts if len(parts) > 1 else {})) + "\n")


def write_trl(folder: Path, out: Path) -> None:
    """Write what TRL's GRPO and RLOO leave with ``log_completions`` and ``logging_steps=1``: a Parquet file per step.

    The rewards are those of each function, without weights; the advantage is one number per response.
    """
    run = cavesson.open(folder)
    advantage = _advantages(run)
    (out / "completions").mkdir()
    for step, rows in _steps(run):
        parts = [dict(row["reward_parts"] or {"reward": row["reward"]}) for row in rows]
        table: dict[str, Any] = {
            "step": [step + 1] * len(rows),
            "prompt": [row["prompt"] for row in rows],
            "completion": [row["response"] for row in rows],
        }
        table |= {name: [part.get(name) for part in parts] for name in parts[0]}
        table["advantage"] = [advantage.get((step, row["sample"])) for row in rows]
        pq.write_table(pa.table(table), out / "completions" / f"completions_{step + 1:05d}.parquet")


def _steps(run: Run) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield the rollouts of each step that were trained on."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for row in run.rows(COLUMNS).to_pylist():
        if row["split"] != "eval":
            by_step.setdefault(row["step"], []).append(row)
    yield from by_step.items()


def _advantages(run: Run) -> dict[tuple[int, int], float]:
    """Return the advantage of each response, which is the same at all of its tokens."""
    tokens = run.arrow("tokens", ["step", "sample", "advantage"])
    keys = zip(tokens["step"].to_pylist(), tokens["sample"].to_pylist(), strict=True)
    return dict(zip(keys, tokens["advantage"].to_pylist(), strict=True))


def write_board(run: Path, out: Path) -> None:
    """Export a run to RL Logging Board, without the responses to held-out prompts, which would count as trained on."""
    EXPORTERS["rl-logging-board"](run, out)
    rmtree(out / "held-out", ignore_errors=True)


WRITERS: dict[str, Callable[[Path, Path], Any]] = {
    "rl-logging-board": write_board,
    "verl": write_verl,
    "trl": write_trl,
}
"""Format → what writes a run folder in it. Not here: OpenRLHF, which logs one response per step."""
ALGORITHMS = {"trl": ("grpo", "rloo")}
"""What a trainer writes the format for, where it is not everything."""


def chosen(folders: Iterable[Path]) -> list[Path]:
    """Return one run per fault, at one level, and every healthy one, of the first seed that is held out."""
    seed = CALIBRATION_SEEDS.stop
    levels = {name: turn % 3 for turn, name in enumerate(FAULTS)}
    wanted = {folder: case_of(folder) for folder in folders}
    return [
        folder
        for folder, case in wanted.items()
        if case.part == "held out" and case.seed == seed and case.level == levels.get(case.name, -1)
    ]


def imported(folder: Path) -> dict[str, Result]:
    """Return what is said of a run that was written in each format and imported again; nothing of one without rows."""
    case = case_of(folder)
    if not any((folder / "record").glob("rows-*")):
        return {}
    fit = [name for name in WRITERS if case.algorithm in ALGORITHMS.get(name, ONLINE)]
    return {name: _imported(folder, case, name) for name in fit}


def _imported(folder: Path, case: Case, name: str) -> Result:
    with TemporaryDirectory() as place:
        out, run = Path(place, "theirs"), Path(place, "run")
        out.mkdir()
        WRITERS[name](folder, out)
        import_run(out, run, name)
        return said_of(cavesson.open(run), case)
