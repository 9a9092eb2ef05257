"""How well `cavesson plan` predicts the memory of a process and the time of a step.

Every case is predicted in one process, and trained in fresh ones. The memory of a process is the most that was ever
resident (VmHWM), without what was resident after the same run of next to nothing in the same process: that is the
libraries, many of which are loaded when they are first used. The time is the median of the steps after the first one.

    python benchmarks/plan.py                      all cases, with models of random weights
    python benchmarks/plan.py --only "sft"         those with "sft" in their names
    python benchmarks/plan.py --published          beside the published tables of other trainers
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from itertools import pairwise
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
    """The own memory of each process and the seconds of a step and its stages."""
    times: list[dict[str, float]] = []
    one._train(case["nothing"])
    libraries = one.status("VmRSS")
    from cavesson.config import check
    from cavesson.registry import ALGORITHMS
    from cavesson.train.run import Training

    training = Training(check(ALGORITHMS[case["command"]].settings, case["settings"], "the case"))
    busy = []

    def note(_step: int, metrics: dict[str, float]) -> None:
        times.append(metrics)
        busy.append(process_time())

    training.run(note)
    own = training.processes.of_all(one.status("VmHWM") - libraries)
    busy = [after - before for before, after in pairwise(busy)]
    names = [name for name in times[-1] if name.startswith("time/")]
    seconds = {name: median(seen[name] for seen in times[1:]) for name in names}
    return {"own": max(own), "time": seconds, "busy": max(training.processes.of_all(median(busy)))}


def in_processes(count: int, case: dict[str, Any]) -> dict[str, Any]:
    """Measure a case in so many fresh processes."""
    with TemporaryDirectory() as folder:
        given, result = Path(folder) / "case.json", Path(folder) / "result.json"
        given.write_text(json.dumps(case))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        command = [*command, __file__, "--measure", str(given)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RESULT": str(result)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if not result.exists():
            raise RuntimeError(done.stderr[-3000:])
        return json.loads(result.read_text())  # type: ignore[no-any-return]


def predict(cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """The prediction of cases, each with its number of processes as "count"."""
    from cavesson.config import check
    from cavesson.plan.calibration import measured
    from cavesson.plan.predict import Predictor
    from cavesson.plan.recipe import Planned
    from cavesson.registry import ALGORITHMS

    found, device = [], measured(1)
    for case in cases:
        settings: Any = check(ALGORITHMS[case["command"]].settings, case["settings"], "the case")
        rewards = getattr(settings, "rewards", ())
        predictor = Predictor(Planned("case", case["command"], settings, rewards, False), device, case["count"])
        prediction = predictor.predict(settings)
        found.append({"own": prediction.memory.peak, "live": prediction.memory.peak - prediction.memory.holes,
                      "busy": prediction.seconds, "parts": {k: v.total for k, v in prediction.times.items()},
                      "causes": [round(sum(x), 3) for x in zip(*(v._values for v in prediction.times.values()))]})  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the names of the cases")
    parser.add_argument("--predict", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.predict:
        Path(os.environ["RESULT"]).write_text(json.dumps(predict(json.loads(arguments.predict.read_text()))))
        return
    if arguments.measure:
        done = measure(json.loads(arguments.measure.read_text()))
        if os.environ.get("RANK", "0") == "0":
            Path(os.environ["RESULT"]).write_text(json.dumps(done))
        return
    for name in (name for name in CASES if arguments.only in name):
        for count, shard in PLACES:
            with TemporaryDirectory() as folder, TemporaryDirectory() as other, TemporaryDirectory() as made:
                one.make_model(Path(made), **CASES[name][2])
                one.make_model(Path(other), hidden=8, layers=1, vocabulary=300)
                case = settings_of(name, Path(made), Path(folder), shard)
                nothing = settings_of(name, Path(other), Path(other), shard, one.NOTHING)
                seen = in_processes(count, {**case, "nothing": nothing})
                print(name, count, shard, seen["own"] >> 20, "busy", round(seen["busy"], 3), {k: round(v, 3) for k, v in seen["time"].items()}, flush=True)


if __name__ == "__main__":
    main()
