"""A folder of runs: its table is made from what each run's folder says, and a run is opened when it is looked at."""

import asyncio
import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from board_helpers import client_of
from index_helpers import indexed, new_run, record, rows_of, tokens_of
from starlette.testclient import TestClient

from cavesson.board import runs
from cavesson.board.folders import is_folder_of_runs, run_folders
from cavesson.board.live import EventsQuery, events
from cavesson.board.runs import Board
from cavesson.doctor.look import look
from cavesson.findings.stored import findings_file
from cavesson.record import Recorder


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "LOOK_SECONDS", 0)


def run_of(folder: Path, *, steps: int = 2, rewards: Any = None, info: dict[str, Any] | None = None) -> Path:
    new_run(folder, info)
    record(folder, range(steps), batch=4, **({} if rewards is None else {"reward": np.array(rewards)}))
    return folder


def old(folder: Path) -> Path:
    """Make a run look as if nothing was recorded for an hour."""
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (time.time() - 3600,) * 2)
    return folder


def lines_of(client: TestClient) -> dict[str, dict[str, Any]]:
    answer = client.get("/api/table")
    assert answer.status_code == 200, answer.text
    return {line["run"]: line for line in answer.json()["runs"]}


def test_runs_are_found_by_their_folders_and_called_by_their_paths(tmp_path: Path) -> None:
    for name in ("b", "a", "sweep/a", "sweep/.hidden", "one/two/three/four"):
        new_run(tmp_path / name)
    new_run(tmp_path / "a" / "checkpoints" / "inside")
    (tmp_path / "notes.txt").write_text("")
    assert run_folders(tmp_path) == [tmp_path / "a", tmp_path / "b", tmp_path / "sweep" / "a"]
    board = Board([], folders=[tmp_path])
    assert {one.key: one.name for one in board.listed()} == {"a": "a", "b": "b", "sweep/a": "sweep/a"}


def test_what_is_a_folder_of_runs(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other" / "docs").mkdir(parents=True)
    new_run(tmp_path / "runs" / "a")
    found = {name: is_folder_of_runs(str(tmp_path / name)) for name in ("empty", "other", "runs", "runs/a", "none")}
    assert found == {"empty": True, "other": False, "runs": True, "runs/a": False, "none": False}


def test_an_empty_folder_has_an_empty_table(tmp_path: Path) -> None:
    client = client_of(Board([], folders=[tmp_path]))
    assert client.get("/api/table").json() == {"folders": [str(tmp_path)], "usual": {}, "runs": []}
    assert client.get("/api/runs").json() == []
    assert client.get("/api/runs/a/rows").json()["error"] == "there is no run a; the board has 0 runs"


def test_nothing_is_opened_or_written_until_a_run_is_looked_at(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run_of(tmp_path / name)
    before = sorted(tmp_path.rglob("*"))
    board = Board([], folders=[tmp_path])
    client = client_of(board)
    assert set(lines_of(client)) == {"a", "b"} and board.runs == [] and sorted(tmp_path.rglob("*")) == before
    followed: list[str] = []
    board.follow(lambda run: followed.append(run.key))
    assert [one["opened"] for one in client.get("/api/runs").json()] == [False, False]
    assert client.get("/api/runs/b").json()["opened"] and followed == ["b"]
    assert client.get("/api/runs/b/rows").status_code == 200 and followed == ["b"]
    assert [one["opened"] for one in client.get("/api/runs").json()] == [False, True]


def test_the_last_reward_has_the_interval_of_its_mean(tmp_path: Path) -> None:
    run_of(tmp_path / "a", rewards=[1.0, 2.0, 3.0, 6.0])
    (line,) = lines_of(client_of(Board([], folders=[tmp_path]))).values()
    # Two responses to each prompt, whose means 1.5 and 4.5 have the standard error 1.5; Student's t of one degree of
    # freedom is a Cauchy variable, whose quantile is a tangent.
    half = 1.5 * math.tan(math.pi * (0.975 - 0.5))
    assert line["steps"] == 2 and line["gain"] is None
    assert line["reward"] == {
        "mean": 3, "low": pytest.approx(3 - half), "high": pytest.approx(3 + half), "count": 4, "step": 1,
    }  # fmt: skip


@pytest.mark.parametrize("group", [[0, 0, 1, 1], None], ids=["groups", "prompts"])
def test_responses_to_a_prompt_count_as_one_in_the_intervals_of_the_table(tmp_path: Path, group: Any) -> None:
    """Each prompt has one reward, which is given twice: what is known is what the two prompts say."""
    new_run(tmp_path / "a")
    with Recorder(tmp_path / "a") as recorder:
        rows = {"sample": np.arange(4), "prompt": ["p", "p", "q", "q"], "response": ["r"] * 4}
        rows |= {"reward": [1.0, 1.0, 4.0, 4.0], "ref_reward": [0.0, 0.0, 1.0, 1.0], "split": ["eval"] * 4}
        recorder.rollouts(0, rows if group is None else rows | {"group": group})
        recorder.rollouts(1, rows | {"split": ["train"] * 4, "group": group or [None] * 4})
    (line,) = lines_of(client_of(Board([], folders=[tmp_path]))).values()
    # Of two means, the standard error is half of their distance.
    for name, mean, error in (("reward", 2.5, 1.5), ("gain", 2.0, 1.0)):
        half = error * math.tan(math.pi * (0.975 - 0.5))
        assert line[name]["mean"] == mean and line[name]["count"] == 4
        assert [line[name]["low"], line[name]["high"]] == pytest.approx([mean - half, mean + half])


def test_the_gain_is_that_of_held_out_prompts_at_the_last_evaluation(tmp_path: Path) -> None:
    new_run(tmp_path / "a")
    with Recorder(tmp_path / "a") as recorder:
        for step, split, rewards in ((0, "eval", [1.0, 1.0]), (1, "train", [9.0, 9.0]), (2, "eval", [4.0, 6.0])):
            rows = rows_of(step, 2) | {"split": [split] * 2, "reward": rewards, "ref_reward": [1.0, 2.0]}
            recorder.rollouts(step, rows, tokens_of(step, 2))
    (line,) = lines_of(client_of(Board([], folders=[tmp_path]))).values()
    # 4 − 1 and 6 − 2.
    assert line["gain"]["mean"] == 3.5 and line["gain"]["step"] == 2
    assert line["reward"]["mean"] == 9 and line["reward"]["step"] == 1


def test_settings_that_differ_are_those_that_are_not_the_usual_ones(tmp_path: Path) -> None:
    for name, seed, rate in (("a", 1, 1e-6), ("b", 2, 1e-6), ("c", 3, 3e-6)):
        config = {"run": f"runs/{name}", "seed": seed, "grpo": {"beta": 0.1}, "optimizer": {"learning_rate": rate}}
        run_of(tmp_path / name, info={"config": config, "model": {"name": "m"}, "steps": 2})
    client = client_of(Board([], folders=[tmp_path]))
    lines = lines_of(client)
    assert client.get("/api/table").json()["usual"] == {"optimizer.learning_rate": "1e-06"}
    assert [lines[name]["settings"] for name in "abc"] == [{}, {}, {"optimizer.learning_rate": "3e-06"}]
    assert lines["a"]["group"] == lines["b"]["group"] != lines["c"]["group"], "a and b differ in the seed alone"
    assert [(line["seed"], line["model"], line["algorithm"]) for line in lines.values()] == [
        (1, "m", "grpo"), (2, "m", "grpo"), (3, "m", "grpo"),
    ]  # fmt: skip


def test_whether_a_run_is_in_training_finished_stopped_or_broken(tmp_path: Path) -> None:
    run_of(tmp_path / "training", info={"steps": 2})
    for name, steps in (("finished", 2), ("stopped", 5), ("whole", None)):
        old(run_of(tmp_path / name, info={} if steps is None else {"steps": steps}))
    shutil.copytree(tmp_path / "finished", tmp_path / "broken")
    (tmp_path / "broken" / "run.json").write_text("{")
    shutil.copytree(tmp_path / "finished", tmp_path / "lost")
    (tmp_path / "lost" / "run.json").unlink()
    shutil.copytree(tmp_path / "finished", tmp_path / "cut")
    for file in (tmp_path / "cut" / "record").glob("rollups*"):
        file.write_bytes(b"PAR1")
    client = client_of(Board([], folders=[tmp_path]))
    lines = lines_of(client)
    wanted = {"training", "finished", "stopped"} | {"whole": "finished", "broken": "broken", "lost": "broken"}.keys()
    states = {name: line["state"] for name, line in lines.items()}
    assert states == {name: name for name in wanted} | {"whole": "finished", "lost": "broken", "cut": "broken"}
    assert "is not JSON" in lines["broken"]["problem"] and "it has no run.json" in lines["lost"]["problem"]
    refused = client.get("/api/runs/broken/rows")
    assert refused.status_code == 400 and "is not JSON" in refused.json()["error"]


def test_findings_are_counted_if_the_doctor_has_looked(tmp_path: Path) -> None:
    for name in ("seen", "unseen"):
        run_of(tmp_path / name, steps=3)
    indexed(tmp_path / "seen")
    look(str(tmp_path / "seen"), findings_file(tmp_path / "seen" / "index"), "v")
    lines = lines_of(client_of(Board([], folders=[tmp_path])))
    stored = json.loads(findings_file(tmp_path / "seen" / "index").read_text())["findings"]
    told = lines["seen"]["findings"]
    assert sum(told[name] for name in ("error", "warning", "note")) == len(stored["en"])
    assert told["titles"]["vi"] == [finding["title"] for finding in stored["vi"]]
    assert lines["unseen"]["findings"] is None


def test_a_line_is_read_again_only_when_its_folder_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cavesson.board import table

    for name in ("a", "b"):
        run_of(tmp_path / name)
    client = client_of(Board([], folders=[tmp_path]))
    read: list[str] = []
    original = table._read
    monkeypatch.setattr(table, "_read", lambda one: read.append(one.key) or original(one))
    lines_of(client)
    lines_of(client)
    record(tmp_path / "b", [2], attempt=0, batch=4)
    assert lines_of(client)["b"]["steps"] == 3 and read == ["a", "b", "b"]


def test_a_run_that_appears_is_added_and_the_others_keep_their_names(tmp_path: Path) -> None:
    given, root = run_of(tmp_path / "given" / "a"), tmp_path / "runs"
    run_of(root / "b")
    from cavesson.record import open as open_record

    board = Board([open_record(given)], folders=[root])
    client = client_of(board)
    assert [one["run"] for one in client.get("/api/runs").json()] == ["a", "b"]

    async def appeared() -> Any:
        stream = events(board, EventsQuery()).body_iterator
        await anext(stream)
        run_of(root / "a")
        async with asyncio.timeout(60):
            return json.loads((await anext(stream)).decode().removeprefix("data: "))

    # The run given on the command line has the name already, so that of the folder is longer.
    assert asyncio.run(appeared()) == {"appeared": ["runs/a"]}
    assert {one["run"] for one in client.get("/api/runs").json()} == {"a", "b", "runs/a"}
    assert lines_of(client)["runs/a"]["path"] == str(root / "a")
    shutil.rmtree(root / "a")
    assert {one["run"] for one in client.get("/api/runs").json()} == {"a", "b"}
