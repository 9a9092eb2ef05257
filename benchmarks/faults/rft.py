"""Scores the doctor on RFT-FaultBench: python -m benchmarks.faults.rft FOLDER.

RFT-FaultBench (arXiv 2605.04431, Zenodo record 20044882) has 779 runs of OpenRLHF with 16 kinds of faults, recorded by
its authors' own logger. FOLDER is its archive, unpacked. This script was written without the archive, from a published
reading of it (tplane/docs/results/rft-faultbench.md and tplane/scripts/rft_faultbench in github.com/ilovehhhyn/cado).
That reading names the following, and nothing else is used here:

    GROUP/RUN/LOGS/openrlhf_train_train_step.jsonl    a line per step: {"metrics": {NAME: number}}
    GROUP/RUN/LOGS/openrlhf_train_trajectory.jsonl    a line per response: {"metrics": {}, "metadata": {}, "flags": {}}

GROUP begins with rf, pg, od, ca or te, the family of its fault, and ends with easy_fault or hard_fault; every other
group has baselines. Of a response, ``metrics`` has ``reward``, ``response_length``, ``advantage_mean`` and more,
``metadata`` has ``rollout_step`` (from 1) and, where a fault was injected, ``fault_injection`` with
``fault_injection_type`` and ``fault_injection_strength``.

Not known: the names of the metrics of a step, whether the lines hold the texts of prompts and responses, and which
responses share a prompt. Metrics are recorded under the names that they have. Prompts, responses and groups are not
recorded, so rules that read them are skipped. If a file or a key of the above is not there, the script ends with one
line that says what it expected and what it found.

A run is flagged if the doctor has a finding of severity error or warning; nothing is fitted to the benchmark. The
protocol is the one called B in that reading: half of the runs in each group of hard faults are controls, in whose
responses nothing was injected, and they count as normal. For each family, F1 is computed over its runs and the
baselines, and then averaged.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pyarrow as pa

import cavesson
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.rules import RULES
from cavesson.errors import UserError
from cavesson.record import Recorder, begin_attempt, write_rollouts, write_run
from cavesson.record.schema import ROW_COLUMNS, TOKEN_COLUMNS, arrow_schema

STEPS, TRAJECTORIES = "openrlhf_train_train_step.jsonl", "openrlhf_train_trajectory.jsonl"
FAMILIES = ("rf", "pg", "od", "ca", "te")
SETTINGS = ("easy", "hard")
RUNS, NORMAL = 779, 235
"""What the whole benchmark has."""
PUBLISHED = {"easy": 91.64, "hard": 85.58}
"""F1 of the best detector in that reading, which learns what is normal from the benchmark's own normal runs; its false
alarms are 4 of the 235 normal runs."""


class Judged(NamedTuple):
    """What is known of a run, and what the doctor says of it."""

    group: str
    fault: str | None
    """The type of the injected fault; None if nothing was injected."""
    named: tuple[str, ...]
    """The causes of severity error and warning."""

    @property
    def family(self) -> str | None:
        """The family of the group's fault; None for baselines."""
        return self.group[:2] if self.setting is not None and self.group[:2] in FAMILIES else None

    @property
    def setting(self) -> str | None:
        """``easy`` or ``hard``; None for baselines."""
        return next((name for name in SETTINGS if self.group.endswith(f"{name}_fault")), None)


class Score(NamedTuple):
    """Precision, recall and F1 in per cent."""

    precision: float
    recall: float
    f1: float


def scored(faulty: Sequence[bool], flagged: Sequence[bool]) -> Score:
    """Return the score of flags; a share of nothing is 0."""
    right = sum(both for both in map(all, zip(faulty, flagged, strict=True)))
    precision, recall = (100 * right / count if count else 0.0 for count in (sum(flagged), sum(faulty)))
    return Score(precision, recall, 2 * precision * recall / (precision + recall) if right else 0.0)


def by_family(runs: Sequence[Judged], setting: str, flag_all: bool = False) -> dict[str, Score]:
    """Return the score over the runs of each family in a setting and the baselines, for families that have runs."""
    found = {}
    for family in FAMILIES:
        own = [run for run in runs if (run.family, run.setting) == (family, setting)]
        of_family = [*own, *(run for run in runs if run.family is None)]
        if own:
            flags = [flag_all or bool(run.named) for run in of_family]
            found[family] = scored([run.fault is not None for run in of_family], flags)
    return found


def average(scores: dict[str, Score]) -> float:
    """Return the mean F1 of the families; NaN without any."""
    return sum(score.f1 for score in scores.values()) / len(scores) if scores else float("nan")


def folders_in(root: Path) -> list[Path]:
    """Return the folders with the log files of a run each."""
    found = sorted(path.parent for path in root.rglob(STEPS))
    if not found:
        there = ", ".join(sorted(path.name for path in root.iterdir())[:5]) if root.is_dir() else "no such folder"
        raise UserError(f"{root}: expected GROUP/RUN/LOGS/{STEPS}, found {there or 'nothing'}")
    for folder in found:
        if not (folder / TRAJECTORIES).is_file():
            there = ", ".join(sorted(path.name for path in folder.iterdir()))
            raise UserError(f"{folder}: expected {TRAJECTORIES} beside {STEPS}, found {there}")
    return found


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                try:
                    line = json.loads(text)
                except ValueError:
                    line = text
                if not isinstance(line, dict) or not isinstance(line.get("metrics"), dict):
                    raise UserError(f"{path}, line {number}: expected an object with 'metrics', found {text[:80]!r}")
                yield number, line


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}


def record(logs: Path, run: Path) -> str | None:
    """Write the record of a run, without prompts and responses; return the injected fault, None if there is none.

    Responses without a step are left out, and a reward or a length that is null is not measured.
    """
    path = logs / TRAJECTORIES
    rows: list[dict[str, Any]] = []
    samples: Counter[int] = Counter()
    fault = None
    for number, line in _lines(path):
        metadata = line.get("metadata")
        if not isinstance(metadata, dict) or "rollout_step" not in metadata:
            raise UserError(f"{path}, line {number}: expected metadata.rollout_step, found {sorted(line)}")
        fault = fault or _injected(metadata)
        step, metrics = metadata["rollout_step"], _numbers(line["metrics"])
        if step is not None:
            length = metrics.get("response_length")
            row = {"step": step, "sample": samples[step], "reward": metrics.get("reward")}
            rows.append(row | {"length": None if length is None else round(length)})
            samples[step] += 1
    for name, key in (("reward", "reward"), ("length", "response_length")):
        if all(row[name] is None for row in rows):
            raise UserError(f"{path}: expected numbers in metrics.{key}, found none in {len(rows)} responses")
    _write(run, rows, [_numbers(line["metrics"]) for _, line in _lines(logs / STEPS)])
    return fault


def _injected(metadata: dict[str, Any]) -> str | None:
    """Return the type of the fault that was injected into a response; one of strength 0 is none."""
    given = metadata.get("fault_injection") or {}
    kind = given.get("fault_injection_type")
    return str(kind) if kind and given.get("fault_injection_strength") not in (None, 0, "0") else None


def _write(run: Path, rows: list[dict[str, Any]], metrics: list[dict[str, float]]) -> None:
    write_run(run, {"trainer": "openrlhf"})
    attempt = begin_attempt(run, 0)
    types = pa.schema([(column.name, column.type) for column in ROW_COLUMNS if column.name in rows[0]])
    write_rollouts(run, attempt, pa.Table.from_pylist(rows, types), arrow_schema(TOKEN_COLUMNS).empty_table())
    with Recorder(run, attempt=attempt) as recorder:
        for step, values in enumerate(metrics, 1):
            recorder.metrics(step, {name: value for name, value in values.items() if name not in ("step", "attempt")})


def judged(logs: Path) -> Judged:
    """Imports a run and diagnoses it."""
    with TemporaryDirectory() as folder:
        fault = record(logs, Path(folder) / "run")
        found = diagnose(RunData(cavesson.open(Path(folder) / "run")), RULES)
    named = tuple(one.rule.name for one in found.causes if one.severity != "note")
    return Judged(logs.parent.parent.name, fault, named)


def report(runs: Sequence[Judged]) -> str:
    """Return the table of scores, the false alarms, and which rules gave them."""
    normal = [run for run in runs if run.fault is None]
    lines = [f"{len(runs)} runs, {len(normal)} of them normal (the whole benchmark: {RUNS}, {NORMAL})"]
    for setting in SETTINGS:
        lines.append(f"\n{setting}: P / R / F1 in per cent")
        scores = by_family(runs, setting)
        lines += [f"  {name}  {one.precision:6.2f} / {one.recall:6.2f} / {one.f1:6.2f}" for name, one in scores.items()]
        flag_all = average(by_family(runs, setting, flag_all=True))
        lines.append(
            f"  mean F1 {average(scores):.2f}; best published {PUBLISHED[setting]}; all flagged {flag_all:.2f}"
        )
    alarms = [run for run in normal if run.named]
    share = 100 * len(alarms) / len(normal) if normal else float("nan")
    lines.append(f"\nfalse alarms: {len(alarms)} of {len(normal)} normal runs ({share:.1f} %; published: 1.7 %)")
    lines.append(f"  by rule: {_counted(name for run in alarms for name in run.named)}")
    missed = (run.fault for run in runs if run.fault is not None and not run.named)
    lines.append(f"faults that were not flagged: {_counted(fault for fault in missed if fault is not None)}")
    return "\n".join(lines)


def _counted(names: Iterable[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in Counter(names).most_common()) or "none"


def main() -> None:
    """Diagnose all runs of the benchmark and print the scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="RFT-FaultBench, unpacked")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    try:
        folders = folders_in(given.folder)
        with ProcessPoolExecutor(given.processes) as pool:
            runs = list(pool.map(judged, folders, chunksize=4))
    except UserError as error:
        raise SystemExit(str(error)) from None
    print(report(runs))


if __name__ == "__main__":
    main()
