"""Tries `doctor --fix` on runs of the benchmark: python -m benchmarks.faults.repair RUNS OUT.

Every run with a fault that a setting can end, and every healthy one, is copied to OUT, fixed as the doctor proposes,
and judged by the doctor and by what the run was really for. The result of each is a line in OUT/repairs.jsonl; those
that are there are not repeated. At the end, a table is printed.
"""

import argparse
import json
import os
import shutil
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import torch

import cavesson
from benchmarks.faults.case import Case
from benchmarks.faults.changes import patched
from benchmarks.faults.generate import planted
from benchmarks.faults.setup import RUNS, Setup, train_with
from cavesson.config import check
from cavesson.errors import UserError
from cavesson.ops.intervals import Interval, share_interval
from cavesson.record import run_info
from cavesson.repair import Outcome, verify
from cavesson.repair.compare import compare

SETTABLE = {
    "top-k": range(3), "top-p": range(3), "min-length": range(3), "temperature-low": range(3),
    "temperature-high": range(3), "learning-rate-high": range(3), "learning-rate-zero": range(3),
    "too-many-epochs": range(3), "penalty-drowns": range(3), "penalty-missing": range(3), "entropy-bonus": range(3),
    "critic-dead": [2], "likes-hash": range(3), "likes-smile": range(3), "judges-the-query": range(3),
    "rare-outliers": range(3),
}  # fmt: skip
"""The faults that a setting can end, with their levels: those planted by a setting, by a temperature that scoring does
not know, and by rewards that a setting can discard, clip or correct. They were chosen before anything was run."""


class Repair(NamedTuple):
    """What became of a run."""

    folder: str
    is_healthy: bool
    outcome: str
    """a verdict, "no setting" if the doctor proposes none, or "no finding\""""
    finding: str = ""
    settings: str = ""
    gone: bool = False
    """the finding is in the unchanged fork only"""
    new: Sequence[str] = ()
    reward: tuple[float, float, float] | None = None
    """with − without the change: mean and 95 % interval of the reward"""
    gold: tuple[float, float, float] | None = None
    """the same of what the run is really for"""


def repaired(case: Case, runs: Path, out: Path) -> Repair:
    """Fixes a copy of a run."""
    run = out / case.folder
    if not run.exists():
        shutil.copytree(runs / case.folder, run)
    try:
        outcome = verify(run, train=partial(_train, case, runs))
    except UserError as error:
        said = str(error).splitlines()[0]
        kind = "no finding" if "finds nothing wrong" in said else "no setting" if "no setting of" in said else said
        return Repair(case.folder, not case.faults, kind)
    reward = None if outcome.reward is None else outcome.reward.difference
    gold = _gold(outcome, planted(case, runs))
    return Repair(
        case.folder,
        not case.faults,
        outcome.verdict,
        outcome.plan.rule,
        json.dumps(outcome.plan.settings),
        (outcome.state(outcome.unchanged), outcome.state(outcome.changed)) == ("found", "gone"),
        outcome.new,
        None if reward is None else (reward.mean, reward.low, reward.high),
        None if gold is None else (gold.mean, gold.low, gold.high),
    )


def _train(case: Case, runs: Path, fork: Path) -> None:
    setup = planted(case, runs)
    kind: Any = RUNS[case.algorithm]
    with patched(setup):
        train_with(check(kind, run_info(fork)["config"] | {"run": fork}, str(fork)), setup)
    shutil.rmtree(fork / "model", ignore_errors=True)


def _gold(outcome: Outcome, setup: Setup) -> Interval | None:
    """Return the difference of the true rewards."""
    tables = []
    for name in ("changed", "unchanged"):
        rows = cavesson.open(outcome.folder / name).rows(["step", "split", "prompt", "response"])
        gold = setup.gold(rows["prompt"].to_pylist(), rows["response"].to_pylist())
        tables.append(rows.append_column("reward", pa.array(gold, pa.float64())))
    found = compare(*tables, outcome.plan.start, outcome.plan.end)
    return None if found is None else found.difference


def wanted(runs: Path, seeds: Sequence[int], only: Sequence[str]) -> list[Case]:
    """Return the runs to fix, seed by seed."""
    found = [Case(**json.loads(file.read_bytes())) for file in runs.glob("*/case.json")]
    found = [
        case
        for case in found
        if (not case.faults or case.level in SETTABLE.get(case.name, ()))
        and case.size == "small"
        and case.seed in seeds
        and (not only or case.name in only)
    ]
    return sorted(found, key=lambda case: (case.seed, case.name, case.level, case.algorithm))


def table(repairs: Sequence[Repair]) -> str:
    """Return the results as Markdown."""
    faulty, healthy = ([one for one in repairs if one.is_healthy == is_healthy] for is_healthy in (False, True))
    tried = [one for one in faulty if one.settings]
    worse = [one for one in healthy if one.gold is not None and one.gold[2] < 0]
    recovered = sum(one.outcome == "recovered" for one in faulty)
    lines = [
        ("faulty runs", len(faulty), len(faulty)),
        ("a setting was proposed", len(tried), len(faulty)),
        ("the finding is gone because of it", sum(one.gone for one in faulty), len(faulty)),
        ("recovered: gone, and the reward gains no less", recovered, len(faulty)),
        ("the true reward gains more", sum(one.gold is not None and one.gold[1] > 0 for one in tried), len(tried)),
        ("the true reward gains less", sum(one.gold is not None and one.gold[2] < 0 for one in tried), len(tried)),
        ("healthy runs that the doctor would change", sum(bool(one.settings) for one in healthy), len(healthy)),
        ("healthy runs made worse", len(worse), len(healthy)),
    ]
    head = "| | runs | share | 95 % interval |\n|---|---|---|---|\n"
    rows = (f"| {name} | {count} of {total} | {_share(count, total)} |" for name, count, total in lines if total)
    return head + "\n".join(rows)


def _share(count: int, total: int) -> str:
    found = share_interval([1] * count + [0] * (total - count), range(total))
    return f"{found.mean:.0%} | {found.low:.0%} to {found.high:.0%}"


def main() -> None:
    """Read the arguments, and fix what has not been fixed yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="*", default=[], help="names of faults and healthy kinds")
    given = parser.parse_args()
    os.nice(19)
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "repairs.jsonl"
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    repairs = [Repair(**json.loads(line)) for line in lines]
    there = {one.folder for one in repairs}
    for case in wanted(given.runs, given.seeds, given.only):
        if case.folder in there:
            continue
        try:
            repairs.append(repaired(case, given.runs, given.out))
        except Exception:  # a fault may break its own repair; the others are still tried
            repairs.append(Repair(case.folder, not case.faults, traceback.format_exc().splitlines()[-1]))
        with file.open("a", encoding="utf-8") as lines_of:
            lines_of.write(json.dumps(repairs[-1]._asdict()) + "\n")
        print(f"{case.folder}: {repairs[-1].outcome} {repairs[-1].finding}", file=sys.stderr, flush=True)
    print(table(repairs))


if __name__ == "__main__":
    main()
