"""How well `cavesson plan` predicts the memory of a process and the time of a step.

Every case is predicted in one process, and trained in fresh ones. The memory of a process is the most that was ever
resident (VmHWM), without what was resident after the same run of next to nothing in the same process: that is the
libraries, many of which are loaded when they are first used. The time is the processor time of a step, median of the
steps after the first one. On two idle cores, all cases take about 15 minutes. plan_published.py compares with the
published tables of other trainers.

    python benchmarks/plan.py                      all cases, with models of random weights
    python benchmarks/plan.py --only "sft"         those with "sft" in their names
    python benchmarks/plan.py --processes 1        in one process
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import memory as one

STEPS = 6
"""Training steps whose time is measured, the first excluded."""
SMALL, MIDDLE = {"hidden": 384, "layers": 6, "vocabulary": 4096}, {"hidden": 512, "layers": 8, "vocabulary": 16_384}
ROLLOUT = one.ROLLOUT
CASES: dict[str, tuple[str, int, dict[str, int], dict[str, Any]]] = {
    "sft": ("sft", 256, SMALL, {"batch_size": 8}),
    "sft, middle": ("sft", 128, MIDDLE, {"batch_size": 8}),
    "sft, lora": ("sft", 256, SMALL, {"batch_size": 8, "model": one.LORA}),
    "dpo": ("dpo", 256, SMALL, {"batch_size": 4}),
    "ppo": ("ppo", 64, SMALL, {**ROLLOUT, "update": {"epochs": 1, "mini_batches": 2}}),
    "grpo": ("grpo", 64, SMALL, {**ROLLOUT, "samples_per_prompt": 4, "kl": {"coef": 0.01}}),
}
"""Command, length of prompt or example in tokens, size of the model, and settings."""
PLACES = ((1, "none"), (2, "none"), (2, "full"), (4, "none"), (4, "full"))


def settings_of(name: str, model: Path, folder: Path, shard: str, length: int | None = None) -> dict[str, Any]:
    """The settings of a case, with data of its length, or of another, written into the folder."""
    command, usual, _, given = CASES[name]
    one.CASES[name] = (command, length or usual, {"steps": STEPS, **given})
    case = one.settings_of(name, model, folder)
    case["settings"]["parallel"] = {"shard": shard}
    return case


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Return the own memory of the largest process and the processor time of a step."""
    one._train(case["nothing"])
    libraries = one.status("VmRSS")
    from cavesson.config import check
    from cavesson.registry import ALGORITHMS
    from cavesson.train.run import Training

    training = Training(check(ALGORITHMS[case["command"]].settings, case["settings"], "the case"))
    busy: list[float] = []
    peaks: list[int] = []

    def note(_step: int, _metrics: dict[str, float]) -> None:
        busy.append(process_time())
        peaks.append(one.status("VmHWM"))

    training.run(note)
    # The peak of the last step: after it, the first process gathers the whole model to save it.
    own = training.processes.of_all(peaks[-1] - libraries)
    spent = [after - before for before, after in pairwise(busy)]
    return {"own": max(own), "busy": max(training.processes.of_all(median(spent)))}


def in_processes(count: int, case: dict[str, Any], what: str) -> dict[str, Any]:
    """Predict or measure a case in so many fresh processes."""
    with TemporaryDirectory() as folder:
        given, result = Path(folder) / "case.json", Path(folder) / "result.json"
        given.write_text(json.dumps(case))
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"] if count > 1 else []
        command = [sys.executable, *launcher, __file__, what, str(given)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RESULT": str(result)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if not result.exists():
            raise RuntimeError(done.stderr[-3000:])
        return json.loads(result.read_text())  # type: ignore[no-any-return]


def predict(case: dict[str, Any]) -> dict[str, float]:
    """The predicted own memory of a process, without holes as well, and the processor time of a step."""
    from cavesson.config import check
    from cavesson.plan.calibration import measured
    from cavesson.plan.predict import Predictor
    from cavesson.plan.recipe import Planned
    from cavesson.registry import ALGORITHMS

    settings: Any = check(ALGORITHMS[case["command"]].settings, case["settings"], "the case")
    count = case["count"]
    # Processor time does not depend on how many processes share the cores.
    device = replace(measured(min(count, 2)), per_host=count)
    planned = Planned("case", case["command"], settings, getattr(settings, "rewards", ()), False)
    prediction = Predictor(planned, device, count).predict(settings)
    memory = prediction.memory
    return {"own": memory.peak, "live": memory.peak - memory.holes, "busy": prediction.seconds}


def compare(name: str, count: int, shard: str) -> tuple[dict[str, float], dict[str, Any]]:
    """What is predicted of a case in so many processes, and what is measured."""
    with TemporaryDirectory() as folder, TemporaryDirectory() as other, TemporaryDirectory() as model:
        one.make_model(Path(model), **CASES[name][2])
        one.make_model(Path(other), hidden=8, layers=1, vocabulary=300)
        case = settings_of(name, Path(model), Path(folder), shard)
        nothing = settings_of(name, Path(other), Path(other), shard, one.NOTHING)
        predicted = in_processes(1, {**case, "count": count}, "--predict")
        return predicted, in_processes(count, {**case, "nothing": nothing}, "--measure")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the names of the cases")
    counts = sorted({count for count, _ in PLACES})
    parser.add_argument("--processes", type=int, nargs="+", choices=counts, default=counts, help="default: all")
    parser.add_argument("--predict", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    given = arguments.predict or arguments.measure
    if given:
        done = (predict if arguments.predict else measure)(json.loads(given.read_text()))
        if os.environ.get("RANK", "0") == "0":
            Path(os.environ["RESULT"]).write_text(json.dumps(done))
        return
    names = [name for name in CASES if arguments.only in name]
    if not names:
        parser.error(f"no case has {arguments.only!r} in its name; there are {', '.join(CASES)}")
    print("| run | processes | own memory, MB | measured | | seconds | measured | |\n|---|---|---|---|---|---|---|---|")
    for name in names:
        for count, shard in (place for place in PLACES if place[0] in arguments.processes):
            predicted, seen = compare(name, count, shard)
            own, live, real = (x / 2**20 for x in (predicted["own"], predicted["live"], seen["own"]))
            busy, spent = predicted["busy"], seen["busy"]
            print(
                f"| {name} | {count}{', sharded' if shard == 'full' else ''} "
                f"| {own:.0f} (live {live:.0f}) | {real:.0f} "
                f"| {own / real - 1:+.0%} | {busy:.2f} | {spent:.2f} | {busy / spent - 1:+.0%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
