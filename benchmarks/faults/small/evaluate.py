"""Print how often the doctor is right on the small trainers: python -m benchmarks.faults.small.evaluate FOLDER.

It reads the tasks to learn from; ``--part "held out"`` reads the others.
"""

import argparse
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.faults.document import per_cent, table
from benchmarks.faults.others.scores import score
from benchmarks.faults.small.case import read_case
from benchmarks.faults.small.judged import Judged, failure_of, judged, worse_with_more
from benchmarks.faults.small.recordings import WAYS

TARGETS = {
    "named first": "75 % (text only: 50 %)", "named": "85 %", "precision": "90 %", "healthy with an error": "0",
    "warnings / 1,000 steps": "1.0",
}  # fmt: skip


def overview(said: Sequence[Judged]) -> str:
    """Return the table of the three records and of what was aimed at."""
    rows = []
    for way in WAYS:
        some = [one for one in said if one.way == way]
        found = score(some)
        healthy = [one for one in some if one.case.healthy]
        warnings = sum(len(one.named) - len(one.errors) for one in healthy)
        rows.append([
            way, str(found.determined), per_cent(found.first), per_cent(found.named), per_cent(found.precision),
            f"{sum(bool(one.errors) for one in healthy)} of {len(healthy)}",
            f"{1000 * warnings / found.healthy_steps:.1f}" if found.healthy_steps else "–",
            f"{found.healthy_steps:,}", f"{found.undetermined}", per_cent(found.not_excluded),
        ])  # fmt: skip
    shown = [one for one in said if one.determined]
    rows.append(["all", str(len(shown)), per_cent(_share(one.is_first for one in shown)), *[""] * 7])
    rows.append(["*target*", "", *TARGETS.values(), "", "", ""])
    return table(["record", "determined", *TARGETS, "healthy steps", "not determined", "of these not excluded"], rows)


def _share(values: Iterable[bool]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else float("nan")


def misses(said: Iterable[Judged]) -> str:
    """Return the table of records in which something is wrong."""
    rows = []
    for one in said:
        wrong = [name for name in one.named if name not in one.true]
        if wrong or (one.determined and not one.is_first):
            named = ", ".join(f"**{name}**" if name in wrong else name for name in one.named) or "nothing"
            rows.append([one.case.folder, one.way, " or ".join(one.causes) or "nothing", named])
    return table(["run", "record", "right", "named; wrong in bold"], rows) if rows else "None."


def document(folders: Sequence[Path], processes: int) -> str:
    """Return what is printed."""
    with ProcessPoolExecutor(processes) as pool:
        said = [one for run in pool.map(judged, folders) for one in run]
    failed = [f"{folder.name}: {why}" for folder in folders if (why := failure_of(folder))]
    worse = sorted({f"{one.case.folder} ({one.way})" for one in worse_with_more(said)})
    blocks = [
        f"{len(folders)} runs, {sum(one.case.healthy for one in said) // len(WAYS)} of them healthy.",
        overview(said),
        "Right with fewer columns, and not with more: " + (", ".join(worse) or "none") + ".",
        *([f"Ended early: {'; '.join(failed)}."] if failed else []),
        f"Wrong, or not named first:\n\n{misses(said)}",
    ]
    return "\n\n".join(blocks)


def main() -> None:
    """Let the doctor look at all records of a part, and print how it did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part", choices=("development", "held out"), default="development")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    folders = [file.parent for file in sorted(given.folder.glob("*/case.json")) if not file.parent.suffix]
    print(document([one for one in folders if read_case(one).part == given.part], given.processes))


if __name__ == "__main__":
    main()
