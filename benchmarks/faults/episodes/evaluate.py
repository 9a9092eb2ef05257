"""Plant every fault of episodes, and count how often the doctor names it.

python -m benchmarks.faults.episodes.evaluate [--seeds 5]
"""

import argparse
import tempfile
from pathlib import Path

import cavesson
from benchmarks.faults.document import per_cent, table
from benchmarks.faults.episodes.planted import FAULTS, HEALTHY
from benchmarks.faults.episodes.world import World, write
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import Diagnosis, diagnose
from cavesson.doctor.rules import RULES


def diagnosed(world: World) -> Diagnosis:
    """Return what the doctor says of a simulated run."""
    with tempfile.TemporaryDirectory() as folder:
        return diagnose(RunData(cavesson.open(write(world, Path(folder) / "run"))), RULES)


def faulty(name: str, level: int, seed: int) -> World:
    """Return a world in which a fault is planted."""
    world, fault = World(seed=seed), FAULTS[name]
    fault.plant(world, fault.levels[level])
    return world


def main() -> None:
    """Print how often each fault is named, and what is said of healthy runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = range(parser.parse_args().seeds)
    rows = []
    for name, fault in FAULTS.items():
        for level in range(3):
            said = [[one.rule.name for one in diagnosed(faulty(name, level, seed)).causes] for seed in seeds]
            named = [any(cause in names for cause in fault.causes) for names in said]
            first = [bool(names) and names[0] in fault.causes for names in said]
            others = sorted({one for names in said for one in names} - set(fault.causes))
            shares = (per_cent(sum(one) / len(one)) for one in (named, first))
            rows.append([name, str(level + 1), *shares, ", ".join(others) or "–"])
    print(table(["fault", "severity", "named", "first", "also"], rows))
    alarms = []
    for name, kind in HEALTHY.items():
        said = [[one.rule.name for one in diagnosed(kind(World(seed=seed))).findings] for seed in seeds]
        alarms.append([name, ", ".join(sorted({one for names in said for one in names})) or "–"])
    print(f"\n{table(['healthy', 'said'], alarms)}")


if __name__ == "__main__":
    main()
