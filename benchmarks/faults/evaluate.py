"""Says how often the doctor names the planted fault: python -m benchmarks.faults.evaluate FOLDER."""

import argparse
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import dressage
from benchmarks.faults.planted import FAULTS
from dressage.doctor.data import KINDS, RunData
from dressage.doctor.diagnosis import diagnose
from dressage.doctor.rules import RULES


def diagnosis_of(folder: Path, sees: frozenset[str] = KINDS) -> dict[str, Any]:
    """Returns the case and what the doctor says of it."""
    case = json.loads((folder / "case.json").read_text(encoding="utf-8"))
    if not (folder / "run.json").exists():
        return {**case, "causes": [], "folded": [], "steps": 0, "failed": True}
    found = diagnose(RunData(dressage.open(folder), sees), RULES)
    return {
        **case,
        "causes": [finding.rule.name for finding in found.causes],
        "severities": [finding.severity for finding in found.causes],
        "folded": [finding.rule.name for finding in found.findings if not finding.cause],
        "since": {finding.rule.name: finding.reading.since for finding in found.findings},
        "seen": {finding.rule.name: finding.reading.seen for finding in found.findings},
        "failed": (folder / "failed.txt").exists(),
    }


def main() -> None:
    """Diagnose all runs and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    results = [diagnosis_of(path.parent) for path in sorted(given.folder.glob("*/case.json"))]
    by_fault: dict[str, Counter[str]] = defaultdict(Counter)
    for one in results:
        key = one["name"] if one["level"] >= 0 else f"healthy {one['name']}"
        accepted = FAULTS[one["name"]].causes if one["level"] >= 0 else ()
        named = [cause for cause in one["causes"] if cause in accepted]
        top = one["causes"][:1] and one["causes"][0] in accepted
        verdict = ("first" if top else "named" if named else "missed") if accepted else (
            "alarm" if any(s != "note" for s in one["severities"]) else "quiet")  # fmt: skip
        by_fault[key][verdict] += 1
        if verdict in ("missed", "alarm", "named"):
            case = f"{one['name']} {one['level']} {one['algorithm']} {one['size']}"
            print(f"{verdict:7} {case}", one["causes"], one["folded"], "failed" if one["failed"] else "")
    print()
    for key, counts in by_fault.items():
        print(f"{key:32}", dict(counts))


if __name__ == "__main__":
    main()
