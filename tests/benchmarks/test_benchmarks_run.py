"""`make bench`: what ends it early loses nothing, TRL's environment is whole, and the quietest attempt counts."""

import json
import subprocess
import sys
from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import quiet
import run as bench
import scaling

LINES = [line for line in bench.COMPARED if line.mode == "sft"]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(bench, "BUILD", tmp_path)
    return tmp_path


def test_a_failure_keeps_what_was_measured_before(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"examples_per_second": 2.0, "peak_rss_gib": 1.0, "others": 0.0}
    results = iter([numbers, numbers])
    monkeypatch.setattr(bench, "measure", lambda *_: next(results))
    report = bench.Report(Console(quiet=True), machine="here")
    with pytest.raises(StopIteration):
        bench.compare(LINES, 1, None, report)
    kept = json.loads((build / "bench.json").read_text())
    assert kept["runs"] == {"ours sft smol": [numbers], "TRL sft smol": [numbers]}
    assert kept["machine"] == "here"


def test_a_failure_names_the_log(build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails.py").write_text("raise ValueError('why')")
    monkeypatch.setattr(bench, "HERE", tmp_path)
    with pytest.raises(SystemExit, match=r"fails.py --mode x failed: see the end of .*bench\.log"):
        bench.measure(sys.executable, "fails.py", "--mode", "x")
    assert "ValueError: why" in (build / "bench.log").read_text()


def test_unknown_modes_are_refused() -> None:
    assert bench.chosen_modes("sft, grpo") == ["sft", "grpo"]
    with pytest.raises(ArgumentTypeError, match="'grpo_lora': the modes are four, trunk, own, sft, reward, grpo, grpo"):
        bench.chosen_modes("sft,grpo_lora")


def test_an_interrupted_installation_is_repeated(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Path] = []

    def install(folder: Path, *, fails: bool) -> None:
        tried.append(folder)
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        (folder / "bin" / "python").touch()
        if fails:
            raise subprocess.CalledProcessError(1, "pip")

    console, python = Console(quiet=True), build / "trl" / "bin" / "python"
    monkeypatch.setattr(bench, "install_trl", lambda folder: install(folder, fails=True))
    assert bench.trl_python(None, console) is None and python.exists()
    monkeypatch.setattr(bench, "install_trl", lambda folder: install(folder, fails=False))
    assert bench.trl_python(None, console) == python
    assert bench.trl_python(None, console) == python
    assert tried == 2 * [build / "trl"]


def test_trl_gets_the_versions_that_cavesson_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(bench.subprocess, "run", lambda command, **_: called.append(command))
    bench.install_trl(tmp_path)
    pip = called[-1]
    constraints = Path(pip[pip.index("--constraint") + 1]).read_text().splitlines()
    pinned = bench.CONSTRAINTS.read_text().splitlines()
    assert [line for line in pinned if line not in constraints] == ["trl==1.16.0"]
    assert pip[-1] == "trl==1.10.0"
    for name in ("torch", "transformers", "peft", "datasets"):
        assert name in pip and any(line.startswith(f"{name}==") for line in constraints)


def test_versions_are_those_of_the_environment() -> None:
    import torch
    import transformers

    found = bench.versions(sys.executable)
    assert (found["torch"], found["transformers"]) == (torch.__version__, transformers.__version__)


def test_the_speed_of_the_quietest_attempt_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used, clock = iter([0.0, 0.5, 0.5, 0.7, 0.7, 1.6]), iter([0.0, 1.0, 1.0, 2.0, 2.0, 3.0])
    monkeypatch.setattr(quiet, "_used_by_others", lambda: next(used))
    monkeypatch.setattr(quiet, "perf_counter", lambda: next(clock))
    speeds = iter([30.0, 50.0, 20.0])
    monkeypatch.setattr(scaling.subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(scaling, "recorded_speed", lambda _: next(speeds))
    value, others = scaling.speed(tmp_path / "run", "ppo", {}, 1, 1)
    assert value == 50.0 and others == pytest.approx(0.2)
    assert quiet.note(others) == "; other programs used 0.2 cores" and quiet.note(0.1) == ""


def test_only_a_whole_measurement_replaces_the_published_picture() -> None:
    import growth

    def picture(**given: Any) -> Path | None:
        return growth.picture_of(Namespace(**{"only": None, "largest": 1000, "picture": None, **given}))

    assert picture() == picture(only=list(growth.GROWING)) == growth.PICTURE
    assert picture(only=["length"]) is picture(largest=100) is None
    assert picture(only=["length"], picture=Path("mine.png")) == Path("mine.png")


def test_the_documented_commands_of_growth_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    import growth

    lines = [line.split("#")[0].split() for line in growth.__doc__.splitlines() if "growth.py" in line]
    assert len(lines) == 2
    for line in lines:
        monkeypatch.setattr(sys, "argv", line[1:])
        growth.arguments()
