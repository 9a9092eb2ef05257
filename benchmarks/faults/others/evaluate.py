"""Says how often the doctor is right: python -m benchmarks.faults.others.evaluate build/others.

It reads the first part; `--part second` and `--part third` read the others.
"""

import argparse
import json
import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.faults.others.case import PARTS, TASKS, TRAINERS, WAYS, read_case
from benchmarks.faults.others.judged import Judged, judged
from benchmarks.faults.others.scores import Score, score

HEAD = (
    "recorded by", "determined", "first", "named", "precision", "healthy steps", "alarms / 1,000",
    "onset off, median (range)", "not determined", "not excluded",
)  # fmt: skip


def cells(way: str, found: Score) -> list[str]:
    """Return the line of one way of recording."""
    return [
        way,
        str(found.determined),
        _percent(found.first),
        _percent(found.named),
        _percent(found.precision),
        str(found.healthy_steps),
        "–" if math.isnan(found.alarms) else f"{found.alarms:.1f}",
        f"{found.onset:g} ({found.onsets[0]} to {found.onsets[-1]}, n = {len(found.onsets)})" if found.onsets else "–",
        str(found.undetermined),
        _percent(found.not_excluded),
    ]


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.0f} %"


def summary(said: Sequence[Judged]) -> Table:
    """Return the table of all ways of recording."""
    table = Table(*HEAD)
    for way in WAYS:
        table.add_row(*cells(way, score(one for one in said if one.way == way)))
    return table


def details(said: Sequence[Judged]) -> Table:
    """Return what was named for each run, in each way of recording; what is not determined is in brackets."""
    table = Table("run", "right", *WAYS)
    by_run: dict[str, list[Judged]] = {}
    for one in said:
        by_run.setdefault(one.case.folder, []).append(one)
    for folder, ways in by_run.items():
        table.add_row(folder, ", ".join(ways[0].causes) or "nothing", *map(_told, ways))
    return table


def _told(one: Judged) -> str:
    names = ", ".join(one.named) or "–"
    return names if one.determined or one.case.healthy else f"({names})"


def main() -> None:
    """Let the doctor look at all recordings and print how it did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part", choices=PARTS, default="first")
    parser.add_argument("--trainer", choices=TRAINERS)
    parser.add_argument("--task", choices=TASKS)
    parser.add_argument("--each", action="store_true", help="what was named for each run")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    folders = [file.parent for file in sorted(given.folder.glob("*/case.json"))]
    wanted = [
        folder
        for folder in folders
        if (case := read_case(folder)).part == given.part
        and given.trainer in (None, case.trainer)
        and given.task in (None, case.task)
    ]
    with ProcessPoolExecutor(given.processes) as pool:
        said = [one for run in pool.map(judged, wanted) for one in run]
    console = Console(width=None if Console().is_terminal else 250)
    console.print(f"{given.part} part, {len(wanted)} runs")
    console.print(summary(said))
    if given.each:
        console.print(details(said))
    if wanted:
        seconds = [json.loads((folder / "case.json").read_text(encoding="utf-8"))["seconds"] for folder in wanted]
        console.print(f"a run took {median(seconds):.0f} s ({min(seconds):.0f} to {max(seconds):.0f})")


if __name__ == "__main__":
    main()
