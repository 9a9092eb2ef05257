"""Benchmarks of the board and the doctor read the record that they name, and destroy nothing."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import board_browser
import doctor
import generate_record
from generate_record import Plan

from benchmarks import diagnosis


def write(folder: Path, plan: Plan) -> None:
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"config": plan._asdict()}))


def test_a_folder_that_exists_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_record, "write_run", lambda *_: pytest.fail("it began to write"))
    with pytest.raises(SystemExit, match="is there already"):
        generate_record.generate(tmp_path, Plan())


def test_a_record_is_measured_only_if_it_is_the_one_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, plan = tmp_path / "run", Plan(rollouts=1000, long=500)
    monkeypatch.setattr(generate_record, "generate", write)
    generate_record.ensure(folder, plan)
    assert generate_record.plan_in(folder) == plan
    generate_record.ensure(folder, plan)
    with pytest.raises(SystemExit, match="holds another record"):
        generate_record.ensure(folder, plan._replace(long=0))
    (folder / "run.json").write_text(json.dumps({"config": {"steps": 3}}))  # a run of a trainer
    with pytest.raises(SystemExit, match="holds another record"):
        generate_record.ensure(folder, plan)


def test_the_doctors_benchmark_refuses_another_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "run", Plan(rollouts=20_000, long=32_000))
    monkeypatch.setattr(sys, "argv", ["doctor.py", "--run", str(tmp_path / "run"), "--rollouts", "20000"])
    monkeypatch.setattr(doctor, "measured", lambda *_: pytest.fail("it was measured"))
    with pytest.raises(SystemExit, match="holds another record"):
        doctor.main()


def test_memory_is_in_mebibytes(monkeypatch: pytest.MonkeyPatch) -> None:
    used = SimpleNamespace(ru_utime=1.0, ru_stime=0.5, ru_maxrss=512 * 1024)  # KiB, on Linux
    monkeypatch.setattr(doctor.subprocess, "Popen", lambda *_, **__: SimpleNamespace(pid=1))
    monkeypatch.setattr(doctor.os, "wait4", lambda *_: (1, 0, used))
    assert doctor.measured("module")[1:] == (1.5, 512.0)


def test_requests_of_every_window_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class Window:
        def __init__(self, _browser: Any, base: str, _seed: int) -> None:
            self.foreign = [f"https://elsewhere{base}"]

        def close(self) -> None:
            pass

    monkeypatch.setattr(board_browser, "Looker", Window)
    lookers = board_browser.Lookers(None)  # type: ignore[arg-type]
    for base in ("/one", "/two"):
        with lookers.at(base):
            pass
    assert lookers.foreign == ["https://elsewhere/one", "https://elsewhere/two"]


def test_pictures_stay_without_runs_to_draw_others_from(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    picture = tmp_path / "pictures" / "old.svg"
    picture.touch()
    with pytest.raises(SystemExit, match="has no runs of benchmarks/faults"):
        diagnosis.draw(tmp_path / "WRONG", tmp_path)
    assert picture.exists()
