"""What the runs on a board are called: each has a name that is its own, whatever else is on the board."""

from pathlib import Path

import pytest
from board_helpers import board_of, client_of
from index_helpers import new_run, record

from cavesson.board.names import name_below, names_of
from cavesson.record import Recorder

PATHS = {
    ("/r/a", "/r/b"): ["a", "b"],
    ("/x/run", "/y/run"): ["x/run", "y/run"],
    ("/x/1/run", "/y/1/run", "/y/b"): ["x/1/run", "y/1/run", "b"],
    ("/run", "/y/run"): ["run", "y/run"],
    ("/r/a b", "/r/a-b"): ["r/a-b", "r/a-b~2"],
    ("/r/a", "/r/a"): ["a", "a"],
    ("/r/lr=1e-5,β=0.1", "/r/a@b"): ["lr=1e-5-β=0.1", "a-b"],
    ("/r/bad\udcff", "/"): ["bad-", "-"],
}


@pytest.mark.parametrize(("folders", "names"), PATHS.items())
def test_the_shortest_end_of_the_path_that_no_other_run_has(folders: tuple[str, ...], names: list[str]) -> None:
    assert names_of([Path(folder) for folder in folders]) == names


def test_a_name_does_not_depend_on_the_place_on_the_command_line() -> None:
    folders = [Path(name) for name in ("/x/run", "/y/run", "/y/other", "/z/other/deep")]
    forward, backward = names_of(folders), names_of(folders[::-1])
    assert forward == backward[::-1] and len(set(forward)) == len(folders)


def test_a_run_in_a_folder_is_called_by_its_path_from_there() -> None:
    root = Path("/runs")
    assert name_below(root / "a", root, []) == "a"
    assert name_below(root / "sweep" / "a", root, ["a"]) == "sweep/a"
    assert name_below(root / "a", root, ["a"]) == "runs/a"
    assert name_below(root / "a", root, ["a", "runs/a"]) == "runs/a~2"


def test_two_runs_of_one_name_are_asked_for_by_their_folders(tmp_path: Path) -> None:
    for parent, size in (("x", 2), ("y", 4)):
        record(new_run(tmp_path / parent / "run"), [0], batch=size)
    client = client_of(board_of(tmp_path / "x" / "run", tmp_path / "y" / "run"))
    assert [(one["run"], one["name"]) for one in client.get("/api/runs").json()] == [
        ("x/run", "x/run"),
        ("y/run", "y/run"),
    ]
    for path in ("y/run", "y%2Frun"):
        assert client.get(f"/api/runs/{path}/rows").json()["total"] == 4
    assert client.get("/api/runs/y/run/rollouts/0/3").json()["sample"] == 3
    assert client.get("/api/compare", params={"runs": "x/run,y/run@0"}).status_code == 200
    refused = client.get("/api/runs/x/rum/rows")
    assert refused.status_code == 404 and refused.json()["error"] == "there is no run x/rum; did you mean x/run?"


def test_metrics_of_another_trainer_are_there_under_our_names_too(tmp_path: Path) -> None:
    with Recorder(new_run(tmp_path / "run")) as recorder:
        recorder.metrics(
            0, {"entropy": 0.5, "train/grad_norm": 2.0, "kl": 1.0, "loss/value": 3.0, "critic/vf_loss": 4.0}
        )
    client = client_of(board_of(tmp_path / "run"))
    asked = "policy/entropy,optim/grad_norm,kl/per_token,loss/value"
    got = client.get("/api/runs/run/series", params={"names": asked}).json()
    # A kl says too little, and of a loss with our name no other one is wanted.
    assert got["metrics"] == {"policy/entropy": [0.5], "optim/grad_norm": [2.0], "loss/value": [3.0]}
    assert got["names"]["called"] == {"policy/entropy": "entropy", "optim/grad_norm": "train/grad_norm"}
    assert client.get("/api/runs/run/series").json()["metrics"]["entropy"] == [0.5]


def test_names_are_asked_for_by_how_they_begin(tmp_path: Path) -> None:
    with Recorder(new_run(tmp_path / "run")) as recorder:
        recorder.metrics(0, {"time/a": 1.0, "time/b": 2.0, "timed": 3.0, "completions/clipped_ratio": 0.5})
    client = client_of(board_of(tmp_path / "run"))
    got = client.get("/api/runs/run/series", params={"names": "time/*,finish/*"}).json()["metrics"]
    assert got == {"time/a": [1.0], "time/b": [2.0], "finish/length": [0.5]}
    assert client.get("/api/runs/run/series", params={"names": "tim"}).json()["metrics"] == {}
