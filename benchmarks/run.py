"""Run every benchmark, ours and the others' in turn, each in its own process, and print how they compare.

Only ratios within one round mean anything: machines differ, and the same one differs from hour to hour. A measurement
is repeated if other programs were busy meanwhile.
"""

import json
import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

from quiet import BUSY, machine, quietly, spread
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
BUILD = HERE.parent / "build"
MODELS = BUILD / "bench-models"
TRL_REQUIREMENTS = ("torch==2.13.0", "transformers", "peft", "datasets", "gguf", "trl==1.10.0", "orjson")
STEPS = 3

Numbers = dict[str, float]
"""What a script has measured, and how many cores other programs used meanwhile ("others")."""
Results = dict[str, list[Numbers]]
"""Every run, by its side, mode and model."""


class Compared(NamedTuple):
    """One line of the table: a mode of ours on one model, and what it should reach."""

    model: str
    batch: int
    mode: str
    faster: float
    """examples or tokens per second over TRL's, at least"""
    peer: str = "four"
    """TRL's mode"""
    ours: str = "ours.py"
    theirs: str = "trl_ppo.py"
    steps: int = 3
    unit: str = "response_tokens_per_second"
    bound: str | None = None
    """what does the same work in bare PyTorch"""
    of_bound: float = 1.0
    """examples or tokens per second over the bound's, at least"""
    memory: float | None = None
    """peak memory over TRL's, at most"""


_NOW = {"ours": "ours_now.py", "theirs": "trl_now.py", "bound": "bound_now.py"}


def _examples(model: str, mode: str) -> Compared:
    return Compared(model, 8, mode, 3.0, mode, **_NOW, steps=6, unit="examples_per_second", memory=0.6)


def _grpo(model: str, batch: int, mode: str, faster: float) -> Compared:
    return Compared(model, batch, mode, faster, "grpo", **_NOW, memory=0.6)


COMPARED = (
    Compared("smol", 16, "four", 1.6, bound="bound.py", memory=0.6),
    Compared("smol", 16, "trunk", 2.3, bound="bound.py", memory=0.6),
    Compared("smol", 16, "own", 4.5, bound="bound.py", memory=0.6),
    Compared("tiny", 64, "four", 3.0, bound="bound.py", memory=0.6),
    _examples("smol", "sft"),
    _examples("tiny", "sft"),
    _examples("smol", "reward"),
    _examples("tiny", "reward"),
    _grpo("smol", 16, "grpo", 2.2),
    _grpo("smol", 16, "grpo-lora", 4.0),
    _grpo("tiny", 16, "grpo", 2.5),
)
RECORDED = {"smol": ("smol", "32", "2"), "tiny": ("tiny", "64", "20")}
"""model, batch and steps of recording.py; "tiny" without a folder is Cavesson's own 0.3 million parameters"""


def measure(python: Path | str, script: str, *arguments: str) -> Numbers:
    """Run a script, again if other programs were busy meanwhile."""
    numbers, others = quietly(lambda: _measure(python, script, *arguments))
    return {**numbers, "others": others}


def _measure(python: Path | str, script: str, *arguments: str) -> Numbers:
    """Read the JSON line that a script ends with; what it says on the way goes to build/bench.log."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with (BUILD / "bench.log").open("a", encoding="utf-8") as log:
        log.write(f"\n{script} {' '.join(arguments)}\n")
        log.flush()
        command = [str(python), str(HERE / script), *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=True, env=environment)
        log.write(done.stdout)
    numbers: Numbers = json.loads(done.stdout.splitlines()[-1])
    return numbers


def trl_python(given: Path | None, console: Console) -> Path | None:
    """The Python of TRL's environment, made on first use; None where it cannot be made."""
    python = given or BUILD / "trl" / "bin" / "python"
    if python.exists():
        return python
    if given is not None:
        raise SystemExit(f"there is no {given}")
    console.print("Installing TRL into build/trl …")
    try:
        subprocess.run([sys.executable, "-m", "venv", str(BUILD / "trl")], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *TRL_REQUIREMENTS], check=True)
    except subprocess.CalledProcessError as error:
        python.unlink(missing_ok=True)  # so that the next run tries again
        console.print(f"[bold]TRL cannot be installed here ({error}): every comparison with TRL is left out.[/bold]")
        return None
    return python


def compare(lines: Iterable[Compared], rounds: int, trl: Path | None, console: Console) -> Results:
    """Measure everything `rounds` times, ours and theirs in turn; what two lines share is measured once a round."""
    results: Results = {}
    for number, line in product(range(rounds), lines):
        for side, (python, script, mode) in _sides(line, trl).items():
            seen = results.setdefault(_key(side, line), [])
            if python is None or len(seen) > number:
                continue
            flags = () if script == "trl_ppo.py" else ("--mode", mode)
            numbers = measure(python, script, *flags, str(MODELS / line.model), str(line.batch), str(line.steps))
            seen.append(numbers)
            speed, peak, unit = numbers[line.unit], numbers["peak_rss_gib"], line.unit.replace("_per_second", "/s")
            console.print(
                f"{number + 1} {line.model} {mode:9} {side:5} {speed:8.2f} {unit} {peak:6.2f} GiB{_busy(numbers)}",
                highlight=False,
            )
    return results


def _busy(numbers: Numbers) -> str:
    """Say it where other programs were busy in every attempt."""
    others = numbers["others"]
    return "" if others <= BUSY else f"; other programs used {others:.1f} cores"


def _sides(line: Compared, trl: Path | None) -> dict[str, tuple[Path | str | None, str, str]]:
    """Python, script and mode of every side; TRL 1.16, which has no PPO, is one of this project's own tools."""
    theirs = trl if line.theirs == "trl_ppo.py" else sys.executable
    sides = {"ours": (sys.executable, line.ours, line.mode), "TRL": (theirs, line.theirs, line.peer)}
    return sides | ({"bound": (sys.executable, line.bound, line.mode)} if line.bound else {})


def _key(side: str, line: Compared) -> str:
    return f"{side} {line.peer if side == 'TRL' else line.mode} {line.model}"


def ratios(line: Compared, results: Results) -> dict[str, list[float]]:
    """Return the figures of one line of the table by round; none where one side was not run."""
    runs = {side: results.get(_key(side, line), []) for side in ("ours", "TRL", "bound")}
    if not line.bound:
        runs["bound"] = []
    speed, peak = (
        {side: [run[name] for run in seen] for side, seen in runs.items()} for name in (line.unit, "peak_rss_gib")
    )
    return {
        **speed,
        "ours / TRL": _ratios(speed["ours"], speed["TRL"]),
        "ours / bound": _ratios(speed["ours"], speed["bound"]),
        "memory / TRL": _ratios(peak["ours"], peak["TRL"]),
    }


def table(lines: Iterable[Compared], figures: Iterable[dict[str, list[float]]], rounds: int) -> Table:
    """The table that people read."""
    columns = ("model", "mode", "ours", "TRL", "bound", "ours / TRL", "ours / bound", "memory / TRL")
    shown = Table(
        *columns,
        title="Response tokens (sft, reward: examples) per second, and peak memory",
        caption=f"medians of {rounds} rounds (range); ratios are those of a round; in brackets at the end: targets",
    )
    for line, seen in zip(lines, figures, strict=True):
        shown.add_row(
            f"{line.model} × {line.batch}",
            line.mode,
            *(_cell(seen[side]) for side in ("ours", "TRL", "bound")),
            _cell(seen["ours / TRL"], line.faster, "≥"),
            _cell(seen["ours / bound"], line.of_bound, "≥"),
            _cell(seen["memory / TRL"], line.memory, "≤"),
        )
    return shown


def _ratios(ours: list[float], theirs: list[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)] if theirs else []


def _cell(values: list[float], target: float | None = None, sign: str = "≥") -> str:
    """Write the median, its range, and the target that the median should reach."""
    if not values:
        return "–"
    if target is None:
        return spread(values)
    reached = median(values) >= target if sign == "≥" else median(values) <= target
    return f"[{'green' if reached else 'red'}]{spread(values)}[/] ({sign} {target})"


def recording(names: Iterable[str], rounds: int, console: Console) -> dict[str, Results]:
    """Run with and without the recorder, in turn, by model."""
    results: dict[str, Results] = {}
    for name in names:
        model, batch, steps = RECORDED[name]
        path = model if name == "tiny" else str(MODELS / model)
        seen = results.setdefault(name, {"on": [], "off": []})
        for _ in range(rounds):
            for mode, numbers in seen.items():
                numbers.append(measure(sys.executable, "recording.py", "--mode", mode, path, batch, steps))
        share, on, off = (
            [numbers[column] for numbers in seen[mode]]
            for mode, column in (("on", "share"), ("on", "seconds"), ("off", "seconds"))
        )
        console.print(
            f"recording, {name}: {spread(share, '.2%')} of the time measured in its two threads; "
            f"with / without: {spread(_ratios(on, off), '.3f')}",
            highlight=False,
        )
    return results


def arguments() -> Namespace:
    """Read the command line."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="times that everything is measured (default 5)")
    parser.add_argument("--only", choices=("smol", "tiny"), help="SmolLM2-135M or the 17 million parameters alone")
    parser.add_argument("--modes", help="only these, such as sft,reward,grpo; without recording and products")
    parser.add_argument("--trl-python", type=Path, help="Python of an environment with TRL 1.10 (default: build/trl's)")
    return parser.parse_args()


def main() -> None:
    """Measure, print and write build/bench.json."""
    given, console = arguments(), Console()
    BUILD.mkdir(exist_ok=True)
    (BUILD / "bench.log").write_text("")
    if not (MODELS / "smol-classifier" / "model.safetensors").exists():
        console.print("Making the models …")
        subprocess.run([sys.executable, str(HERE / "models.py"), str(MODELS)], check=True)
    where = machine()
    console.print(where, highlight=False)
    modes = given.modes.split(",") if given.modes else [line.mode for line in COMPARED]
    lines = [line for line in COMPARED if given.only in (None, line.model) and line.mode in modes]
    needed = any(line.theirs == "trl_ppo.py" for line in lines)
    trl = trl_python(given.trl_python, console) if needed else None
    results = compare(lines, given.rounds, trl, console)
    figures = [ratios(line, results) for line in lines]
    console.print(table(lines, figures, given.rounds))
    if given.modes:
        return
    recorded = recording([given.only] if given.only else ["tiny", "smol"], given.rounds, console)
    products = measure(sys.executable, "linear.py")
    for name, ratio in products.items():
        if name != "others":
            console.print(f"float32 product, {name}: PyTorch's takes {ratio:.2f} × oneDNN's time", highlight=False)
    everything: dict[str, object] = {"machine": where, "runs": results}
    everything["compared"] = [{**line._asdict(), **seen} for line, seen in zip(lines, figures, strict=True)]
    everything |= {"recording": recorded, "linear": products}
    (BUILD / "bench.json").write_text(json.dumps(everything, indent=1), encoding="utf-8")
    console.print(f"written to {BUILD / 'bench.json'}")


if __name__ == "__main__":
    main()
