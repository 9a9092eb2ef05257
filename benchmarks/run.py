"""Run every benchmark, ours and the others' in turn, each in its own process, and print how they compare.

Only ratios within one round mean anything: machines differ, and the same one differs from hour to hour. A measurement
is repeated if other programs were busy meanwhile. build/bench.json is written after every measurement.
"""

import json
import os
import subprocess
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

from quiet import machine, note, quietly, spread
from rich.console import Console
from rich.table import Column, Table

HERE = Path(__file__).parent
BUILD = HERE.parent / "build"
MODELS = BUILD / "bench-models"
TRL = "trl==1.10.0"
"""the last with PPO; the other packages have the same versions as Cavesson's"""
TRL_NEEDS = ("torch", "transformers", "peft", "datasets", "gguf", "orjson")
NAMED = (*TRL_NEEDS, "trl", "accelerate", "numpy")
CONSTRAINTS = HERE.parent / "constraints.txt"
VERSIONS = f"""
import importlib.metadata as packages, json
found = {{one.name for one in packages.distributions()}}
print(json.dumps({{name: packages.version(name) for name in {NAMED} if name in found}}))
"""
"""prints the versions of the packages of `NAMED`"""

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
    plain: str | None = None
    """what does the same work in plain PyTorch"""
    of_plain: float = 1.0
    """examples or tokens per second over plain PyTorch's, at least"""
    memory: float | None = None
    """peak memory over TRL's, at most"""


_NOW = {"ours": "ours_now.py", "theirs": "trl_now.py", "plain": "plain_now.py"}


def _examples(model: str, mode: str) -> Compared:
    return Compared(model, 8, mode, 3.0, mode, **_NOW, steps=6, unit="examples_per_second", memory=0.6)


def _grpo(model: str, batch: int, mode: str, faster: float) -> Compared:
    return Compared(model, batch, mode, faster, "grpo", **_NOW, memory=0.6)


COMPARED = (
    Compared("smol", 16, "four", 1.6, plain="plain.py", memory=0.6),
    Compared("smol", 16, "trunk", 2.3, plain="plain.py", memory=0.6),
    Compared("smol", 16, "own", 4.5, plain="plain.py", memory=0.6),
    Compared("tiny", 64, "four", 3.0, plain="plain.py", memory=0.6),
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


class Report:
    """What was measured so far, on the console and in build/bench.json."""

    def __init__(self, console: Console, **given: object) -> None:
        self.console, self.runs = console, Results()
        self.recording: dict[str, Results] = {}
        self.values: dict[str, object] = {**given, "runs": self.runs, "recording": self.recording}

    def write(self, **more: object) -> None:
        """Write everything so far: what ends a run of two hours loses one measurement."""
        self.values |= more
        unfinished = BUILD / "bench.json.unfinished"
        unfinished.write_text(json.dumps(self.values, indent=1), encoding="utf-8")
        unfinished.replace(BUILD / "bench.json")


def measure(python: Path | str, script: str, *arguments: str) -> Numbers:
    """Run a script, again if other programs were busy meanwhile."""
    numbers, others = quietly(lambda: _measure(python, script, *arguments))
    return {**numbers, "others": others}


def _measure(python: Path | str, script: str, *arguments: str) -> Numbers:
    """Read the JSON line that a script ends with; what it says on the way goes to build/bench.log."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    called = f"{script} {' '.join(arguments)}"
    with (BUILD / "bench.log").open("a", encoding="utf-8") as log:
        log.write(f"\n{called}\n")
        log.flush()
        command = [str(python), str(HERE / script), *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=False, env=environment)
        log.write(done.stdout)
    if done.returncode:
        raise SystemExit(f"{called} failed: see the end of {BUILD / 'bench.log'}; bench.json there has all before it")
    numbers: Numbers = json.loads(done.stdout.splitlines()[-1])
    return numbers


def trl_python(given: Path | None, console: Console) -> Path | None:
    """Return the Python of TRL's environment, made on first use; None where it cannot be made."""
    folder = BUILD / "trl"
    python, stamp = given or folder / "bin" / "python", folder / ".installed"
    if given is not None and not given.exists():
        raise SystemExit(f"there is no {given}")
    if given is not None or stamp.exists():
        return python
    console.print("Installing TRL into build/trl …")
    try:
        install_trl(folder)
    except subprocess.CalledProcessError as error:
        console.print(f"[bold]TRL cannot be installed here ({error}): every comparison with TRL is left out.[/bold]")
        return None
    stamp.touch()  # an interrupted installation is repeated
    return python


def install_trl(folder: Path) -> None:
    """Make an environment with TRL 1.10 and, of everything else, the versions that Cavesson was tested with."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(line for line in lines if not line.startswith("trl==")), encoding="utf-8")
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
    subprocess.run([*pip, *TRL_NEEDS, TRL], check=True)


def versions(python: Path | str) -> dict[str, str]:
    """Return the versions of the packages in an environment."""
    done = subprocess.run([str(python), "-c", VERSIONS], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def compare(lines: Iterable[Compared], rounds: int, trl: Path | None, report: Report) -> None:
    """Measure everything `rounds` times, ours and theirs in turn; what two lines share is measured once a round."""
    for number, line in product(range(rounds), lines):
        for side, (python, script, mode) in _sides(line, trl).items():
            seen = report.runs.setdefault(_key(side, line), [])
            if python is None or len(seen) > number:
                continue
            flags = () if script == "trl_ppo.py" else ("--mode", mode)
            work = (str(MODELS / line.model), str(line.batch), str(line.steps))
            numbers = measure(python, script, *flags, *work)
            seen.append(numbers)
            report.write()
            speed, peak, unit = numbers[line.unit], numbers["peak_rss_gib"], line.unit.replace("_per_second", "/s")
            told = f"{number + 1} {line.model} {mode:9} {side:5} {speed:8.2f} {unit} {peak:6.2f} GiB"
            report.console.print(told + note(numbers["others"]), highlight=False)


def _sides(line: Compared, trl: Path | None) -> dict[str, tuple[Path | str | None, str, str]]:
    """Python, script and mode of every side; TRL 1.16, which has no PPO, is one of this project's own tools."""
    theirs = trl if line.theirs == "trl_ppo.py" else sys.executable
    sides = {"ours": (sys.executable, line.ours, line.mode), "TRL": (theirs, line.theirs, line.peer)}
    return sides | ({"plain": (sys.executable, line.plain, line.mode)} if line.plain else {})


def _key(side: str, line: Compared) -> str:
    return f"{side} {line.peer if side == 'TRL' else line.mode} {line.model}"


def ratios(line: Compared, results: Results) -> dict[str, list[float]]:
    """Return the figures of one line of the table by round; none where one side was not run."""
    runs = {side: results.get(_key(side, line), []) for side in ("ours", "TRL", "plain")}
    if not line.plain:
        runs["plain"] = []
    speed, peak = (
        {side: [run[name] for run in seen] for side, seen in runs.items()} for name in (line.unit, "peak_rss_gib")
    )
    return {
        **speed,
        "ours / TRL": _ratios(speed["ours"], speed["TRL"]),
        "ours / plain": _ratios(speed["ours"], speed["plain"]),
        "memory / TRL": _ratios(peak["ours"], peak["TRL"]),
    }


def table(lines: Iterable[Compared], figures: Iterable[dict[str, list[float]]], rounds: int) -> Table:
    """The table that people read."""
    columns = ("model", "mode", "ours", "TRL", "plain PyTorch", "ours / TRL", "ours / plain", "memory / TRL")
    shown = Table(
        *(Column(name, overflow="fold") for name in columns),
        title="Response tokens (sft, reward: examples) per second, and peak memory",
        caption=f"medians of {rounds} rounds (range); ratios are those of a round; in brackets at the end: targets",
    )
    for line, seen in zip(lines, figures, strict=True):
        shown.add_row(
            f"{line.model} × {line.batch}",
            line.mode,
            *(_cell(seen[side]) for side in ("ours", "TRL", "plain")),
            _cell(seen["ours / TRL"], line.faster, "≥"),
            _cell(seen["ours / plain"], line.of_plain, "≥"),
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


def recording(names: Iterable[str], rounds: int, report: Report) -> None:
    """Run with and without the recorder, in turn, by model."""
    for name in names:
        model, batch, steps = RECORDED[name]
        path = model if name == "tiny" else str(MODELS / model)
        seen = report.recording.setdefault(name, {"on": [], "off": []})
        for _ in range(rounds):
            for mode, numbers in seen.items():
                numbers.append(measure(sys.executable, "recording.py", "--mode", mode, path, batch, steps))
                report.write()
        share, on, off = (
            [numbers[column] for numbers in seen[mode]]
            for mode, column in (("on", "share"), ("on", "seconds"), ("off", "seconds"))
        )
        report.console.print(
            f"recording, {name}: {spread(share, '.2%')} of the time measured in its two threads; "
            f"with / without: {spread(_ratios(on, off), '.3f')}",
            highlight=False,
        )


def chosen_modes(text: str) -> list[str]:
    """Read the modes, separated by commas."""
    modes, known = [mode.strip() for mode in text.split(",")], list(dict.fromkeys(line.mode for line in COMPARED))
    if unknown := [mode for mode in modes if mode not in known]:
        raise ArgumentTypeError(f"{', '.join(map(repr, unknown))}: the modes are {', '.join(known)}")
    return modes


def arguments() -> Namespace:
    """Read the command line."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="times that everything is measured (default 5)")
    parser.add_argument("--only", choices=("smol", "tiny"), help="SmolLM2-135M or the 17 million parameters alone")
    only = "only these, such as sft,reward,grpo; without recording and products"
    parser.add_argument("--modes", type=chosen_modes, help=only)
    parser.add_argument("--trl-python", type=Path, help="Python of an environment with TRL 1.10 (default: build/trl's)")
    return parser.parse_args()


def prepare(given: Namespace, lines: Iterable[Compared], console: Console) -> tuple[Path | None, Report]:
    """Make the models and TRL's environment if they are not there, and begin the report."""
    BUILD.mkdir(exist_ok=True)
    (BUILD / "bench.log").write_text("")
    if not (MODELS / "smol-classifier" / "model.safetensors").exists():
        console.print("Making the models …")
        subprocess.run([sys.executable, str(HERE / "models.py"), str(MODELS)], check=True)
    needed = any(line.theirs == "trl_ppo.py" for line in lines)
    trl = trl_python(given.trl_python, console) if needed else None
    found = {"ours": versions(sys.executable), **({"TRL's PPO": versions(trl)} if trl else {})}
    where = machine()
    for told in (where, *(f"{side}: {', '.join(map(' '.join, seen.items()))}" for side, seen in found.items())):
        console.print(told, highlight=False)
    return trl, Report(console, machine=where, versions=found)


def main() -> None:
    """Measure, print and write build/bench.json."""
    given, console = arguments(), Console()
    modes = given.modes or [line.mode for line in COMPARED]
    lines = [line for line in COMPARED if given.only in (None, line.model) and line.mode in modes]
    trl, report = prepare(given, lines, console)
    compare(lines, given.rounds, trl, report)
    figures = [ratios(line, report.runs) for line in lines]
    console.print(table(lines, figures, given.rounds))
    report.write(compared=[{**line._asdict(), **seen} for line, seen in zip(lines, figures, strict=True)])
    if not given.modes:
        recording([given.only] if given.only else ["tiny", "smol"], given.rounds, report)
        products = measure(sys.executable, "linear.py")
        for name, ratio in products.items():
            if name != "others":
                console.print(f"product, {name}: PyTorch's takes {ratio:.2f} × the other's time", highlight=False)
        report.write(linear=products)
    console.print(f"written to {BUILD / 'bench.json'}")


if __name__ == "__main__":
    main()
