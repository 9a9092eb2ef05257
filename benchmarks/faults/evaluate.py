"""Says how often the doctor names the planted fault: python -m benchmarks.faults.evaluate FOLDER.

It writes docs/doctor-benchmark.md, docs/doctor-benchmark-cases.md and a picture from the runs that `generate` has left
in FOLDER. To ask rldoctor and rlprobe as well, name the Python of an environment that has them:
--peers-python ENVIRONMENT/bin/python.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.faults import peers, pictures, scores
from benchmarks.faults.document import Figures, case_by_case, document
from benchmarks.faults.generate import cases
from benchmarks.faults.imported import chosen, imported
from benchmarks.faults.results import Result, case_of, result_of

DOCUMENT = Path("doctor-benchmark.md")
CASES = Path("doctor-benchmark-cases.md")
PICTURE = Path("images/doctor/confusion.png")


def is_held_out(folder: Path) -> bool:
    """Return whether a run is of the part on which it is looked closely."""
    return case_of(folder).part in ("held out", "late, held out")


def look(folder: Path) -> tuple[Result, Result]:
    """Return what is said of a run, and of its scalars alone."""
    return result_of(folder, early=is_held_out(folder))


def by_format(found: Sequence[dict[str, Result]]) -> dict[str, list[Result]]:
    """Return what is said of imports, by the format that they were imported from."""
    results = defaultdict(list)
    for run in found:
        for name, result in run.items():
            results[name].append(result)
    return results


def figures(folders: Sequence[Path], processes: int, python: Path | None) -> Figures:
    """Let all doctors look at everything, each once."""
    with ProcessPoolExecutor(processes) as pool:
        looked = list(pool.map(look, folders, chunksize=8))
        imports = by_format(list(pool.map(imported, chosen(folders), chunksize=4)))
    missing = peers.reason_missing(python)
    said = []
    if python and not missing:
        asked = [folder for folder in folders if is_held_out(folder) and (folder / "run.json").exists()]
        own = {one.case: one for one, _ in looked}
        said = [(own[case_of(folder)], one) for folder, one in zip(asked, peers.ask(python, asked), strict=True)]
    return Figures([one for one, _ in looked], [scalars for _, scalars in looked], imports, said, missing)


def main() -> None:
    """Diagnose all runs, write the document and draw its picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder of the document and its picture")
    parser.add_argument("--peers-python", type=Path, help="of an environment with rldoctor and rlprobe")
    given = parser.parse_args()
    folders = [file.parent for file in sorted(given.folder.glob("*/case.json"))]
    found = figures(folders, given.processes, given.peers_python)
    picture = given.docs / PICTURE
    picture.parent.mkdir(parents=True, exist_ok=True)
    (given.docs / DOCUMENT).write_text(document(found, len(list(cases(given.seeds)))), encoding="utf-8")
    (given.docs / CASES).write_text(case_by_case(found), encoding="utf-8")
    pictures.draw_confusion(scores.confusion(found.part("held out")), picture)


if __name__ == "__main__":
    main()
