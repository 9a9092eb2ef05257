"""The trackers get what the record gets, read back by their own readers."""

import json
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest

import cavesson
from cavesson.config import Settings, load
from cavesson.errors import UserError
from cavesson.integrations import trackers
from cavesson.integrations.trackers import Names, Trackers
from cavesson.record import Recorder, begin_attempt, write_run

Steps = dict[int, dict[str, float]]

CONFIG: dict[str, Any] = {
    "run": "runs/x",
    "seed": 7,
    "ppo": {"clip": 0.2, "whiten": True},
    "model": {"lora": {"rank": 4}, "gguf_file": None},
    "rewards": [{"use": "lowercase"}],
}
# By hand: dotted names as of the flags, lists as JSON, everything else as it is.
FLAT = {
    "run": "runs/x",
    "seed": 7,
    "ppo.clip": 0.2,
    "ppo.whiten": True,
    "model.lora.rank": 4,
    "model.gguf_file": None,
    "rewards": '[{"use": "lowercase"}]',
}


needs_trackio = pytest.mark.skipif(find_spec("trackio") is None, reason="needs Trackio: pip install trackio")


class Example(Settings):
    trackers: Names = ()


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    home = tmp_path_factory.mktemp("home")
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "TRACKIO_DIR"):
        monkeypatch.setenv(name, str(home))
    for name in ("WANDB_API_KEY", "WANDB_PROJECT", "WANDB_RUN_ID", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def metrics(step: int, attempt: int) -> dict[str, float]:
    """Uneven numbers, one of them not a float32, and one metric that not every step has."""
    values = {"reward/mean": 0.1 * step - 1 / 3, "time/total": step + attempt / 7, "policy/kl": 2.0**-60}
    return values | ({"eval/loss": -1.5e20} if step % 2 else {})


def attempt(folder: Path, names: Names, start: int, end: int) -> None:
    """Steps `start` to `end` - 1 as a run does them: to the record and to the trackers."""
    if start == 0:
        write_run(folder, {"config": CONFIG})
    number = begin_attempt(folder, start)
    with Recorder(folder, attempt=number) as recorder, Trackers(names, folder, "project", CONFIG, start) as sent:
        for step in range(start, end):
            recorder.metrics(step, metrics(step, number))
            sent.log(step, metrics(step, number))


def recorded(folder: Path) -> Steps:
    rows = cavesson.open(folder).steps().drop_columns(["attempt"]).to_pylist()
    return {row.pop("step"): {name: value for name, value in row.items() if value is not None} for row in rows}


def as_float32(steps: Steps) -> Steps:
    return {
        step: {name: float(np.float32(value)) for name, value in seen.items()} for step, seen in sorted(steps.items())
    }


def tensorboard(folder: Path) -> Steps:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    steps: Steps = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            assert name not in steps.setdefault(event.step, {}), f"{name} has step {event.step} twice"
            steps[event.step][name] = event.value
    return dict(sorted(steps.items()))


def log_records(data: bytes) -> Iterator[bytes]:
    """LevelDB's log format (github.com/google/leveldb, doc/log_format.md) after a header of 7 bytes.

    In blocks of 32 KiB: CRC (4 bytes), length (2), type (1: whole, 2: first part, 3: middle, 4: last), content.
    """
    record, place = b"", 7
    while place < len(data):
        if 2**15 - place % 2**15 < 7:  # too short for another record: zeros until the next block
            place += 2**15 - place % 2**15
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        part = data[place + 7 : place + 7 + length]
        record, place = part if kind in (1, 2) else record + part, place + 7 + length
        if kind in (1, 4):
            yield record


def wandb(file: Path) -> tuple[str, Steps, Mapping[str, Any]]:
    """The run's id, its history and its configuration out of a .wandb file."""
    from wandb import teardown
    from wandb.proto.wandb_internal_pb2 import Record

    teardown()  # a separate process writes the file, and finishing a run does not wait for it
    identity, steps, config = "", {}, {}
    for record in map(Record.FromString, log_records(file.read_bytes())):
        if record.HasField("run"):
            identity = record.run.run_id
        items = [*record.history.item]
        if items:
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            steps[record.history.step.num] = {k: v for k, v in row.items() if not k.startswith("_")}
        for item in (*record.run.config.update, *record.config.update):
            config[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
    return identity, steps, config


def trackio(folder: Path) -> tuple[list[tuple[int, dict[str, float]]], Mapping[str, Any]]:
    """The history of a run, in the order in which it was sent, and its configuration out of Trackio's database."""
    from trackio import Api
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = (run for run in Api().runs("project") if run.name.startswith(f"{folder.name}-"))
    rows = SQLiteStorage.get_logs("project", run.name)
    return [(row.pop("step"), {k: v for k, v in row.items() if k != "timestamp"}) for row in rows], run.config


def test_tensorboard_has_every_metric_of_the_record(tmp_path: Path) -> None:
    attempt(tmp_path, ("tensorboard",), 0, 5)
    expected = recorded(tmp_path)
    assert list(expected) == list(range(5)) and len(expected[1]) == 4 and len(expected[2]) == 3
    assert tensorboard(tmp_path) == as_float32(expected)


def test_tensorboard_of_a_continued_run_is_the_record_of_it(tmp_path: Path) -> None:
    """Steps 3 and 4 are done twice; their times differ, and the later ones count."""
    attempt(tmp_path, ("tensorboard",), 0, 5)
    attempt(tmp_path, ("tensorboard",), 3, 7)
    expected = recorded(tmp_path)
    assert expected[3]["time/total"] == 3 + 1 / 7 and expected[2]["time/total"] == 2
    assert tensorboard(tmp_path) == as_float32(expected)


def test_tensorboard_has_the_settings_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    attempt(tmp_path, ("tensorboard",), 0, 2)
    attempt(tmp_path, ("tensorboard",), 1, 3)
    (folder,) = (file.parent for file in tmp_path.glob("tensorboard/*/events.*"))
    content = EventAccumulator(str(folder)).Reload().SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    seen = HParamsPluginData.FromString(content).session_start_info.hparams
    values = {name: getattr(value, str(value.WhichOneof("kind"))) for name, value in seen.items()}
    assert values == {name: value for name, value in FLAT.items() if value is not None}


@pytest.mark.slow
def test_an_offline_wandb_run_has_every_metric_and_setting(tmp_path: Path) -> None:
    attempt(tmp_path, ("wandb",), 0, 5)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    _, steps, config = wandb(file)
    assert steps == recorded(tmp_path)
    assert {name: config[name] for name in FLAT} == FLAT


def test_a_continued_wandb_run_keeps_its_id_and_its_steps(tmp_path: Path) -> None:
    attempt(tmp_path, ("wandb",), 0, 3)
    before = wandb(next(tmp_path.glob("wandb/offline-run-*/*.wandb")))
    sleep(1.1)  # the folders of the two are named by the second
    attempt(tmp_path, ("wandb",), 2, 4)
    files = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    after = next(seen for seen in map(wandb, files) if seen[1] != before[1])
    assert after[0] == before[0] != ""
    assert after[1] == {step: seen for step, seen in recorded(tmp_path).items() if step >= 2}


def test_two_runs_have_two_ids(tmp_path: Path) -> None:
    for name in ("a", "b"):
        attempt(tmp_path / name, ("wandb",), 0, 1)
    first, second = (wandb(file)[0] for file in tmp_path.glob("*/wandb/offline-run-*/*.wandb"))
    assert first != second


def test_several_trackers_get_the_same(tmp_path: Path) -> None:
    attempt(tmp_path, ("tensorboard", "wandb"), 0, 2)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert as_float32(wandb(file)[1]) == tensorboard(tmp_path) == as_float32(recorded(tmp_path))


@needs_trackio
def test_trackio_has_every_metric_and_setting(tmp_path: Path) -> None:
    attempt(tmp_path, ("trackio",), 0, 5)
    rows, config = trackio(tmp_path)
    assert rows == [*recorded(tmp_path).items()]
    assert {name: config[name] for name in FLAT} == FLAT


@needs_trackio
def test_a_continued_trackio_run_keeps_its_name_and_its_settings(tmp_path: Path) -> None:
    """Steps 3 and 4 are done twice and there twice, the later ones with their own times."""
    attempt(tmp_path, ("trackio",), 0, 5)
    attempt(tmp_path, ("trackio",), 3, 7)
    rows, config = trackio(tmp_path)
    assert [step for step, _ in rows] == [0, 1, 2, 3, 4, 3, 4, 5, 6]
    assert dict(rows) == recorded(tmp_path)
    assert rows[3][1]["time/total"] == 3 and rows[5][1]["time/total"] == 3 + 1 / 7
    assert {name: config[name] for name in FLAT} == FLAT


@needs_trackio
def test_a_project_that_trackio_refuses_is_a_plain_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^the tracker trackio did not start: .*'registry-x' is not allowed.*$"):
        Trackers(("trackio",), tmp_path, "registry-x", {})
    assert not (tmp_path / "trackers.json").exists()


def test_without_trackers_nothing_is_written(tmp_path: Path) -> None:
    with Trackers((), tmp_path, "project", CONFIG) as sent:
        sent.log(0, {"reward/mean": 1.0})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_only_the_main_process_sends(tmp_path: Path) -> None:
    """The second of two processes writes nothing, the first everything."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = Path(__file__).with_name("two_trackers.py")
    done = subprocess.run([*launcher, str(script), str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert tensorboard(tmp_path) == {0: {"rank": 0.0}}
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 1
    assert len(list(tmp_path.glob("tensorboard/events.*"))) == 1


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], ()),
        (["--trackers", "tensorboard"], ("tensorboard",)),
        (["--trackers", "tensorboard,wandb"], ("tensorboard", "wandb")),
        (["--trackers=wandb, trackio"], ("wandb", "trackio")),
        (["--trackers", '["trackio"]'], ("trackio",)),
        (["--trackers", "[]"], ()),
        (["--trackers="], ()),
    ],
)
def test_the_flag_is_a_list_with_commas(flags: list[str], expected: tuple[str, ...]) -> None:
    assert load(Example, None, flags).trackers == expected


def test_a_recipe_has_a_list(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('trackers = ["wandb", "tensorboard"]')
    assert load(Example, tmp_path / "recipe.toml", []).trackers == ("wandb", "tensorboard")


def test_an_unknown_tracker_is_one_line_with_the_known_ones() -> None:
    with pytest.raises(UserError) as caught:
        load(Example, None, ["--trackers", "tensorboard,neptune"])
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in ("trackers", "'neptune'", "tensorboard", "wandb", "trackio"))


def test_a_missing_package_is_one_line_with_the_pip_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()  # Weights & Biases leaves such folders, and they are not the package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in [name for name in sys.modules if name.split(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=r"^the tracker wandb is not installed; .*: pip install wandb$"):
        trackers.require(("wandb",))
    with pytest.raises(UserError, match="pip install wandb"):
        Trackers(("wandb",), tmp_path, "project", CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["wandb"]


@pytest.mark.slow
def test_wandb_without_a_key_is_a_plain_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    script = (
        "import sys; from pathlib import Path; from cavesson.integrations.trackers import Trackers;"
        "Trackers(('wandb',), Path(sys.argv[1]), 'project', {})"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=300)
    *_, first, second = done.stderr.strip().splitlines()
    assert first.startswith("cavesson.errors.UserError: the tracker wandb did not start: ") and "API key" in first
    assert "WANDB_MODE=offline" in second
    assert not (tmp_path / "trackers.json").exists()


def test_steps_table_is_read_without_surprises(tmp_path: Path) -> None:
    """The helper above drops what was not measured and nothing else."""
    attempt(tmp_path, (), 0, 3)
    table = cavesson.open(tmp_path).steps()
    assert sum(len(seen) for seen in recorded(tmp_path).values()) == sum(
        pc.count(table[name]).as_py() for name in table.column_names if name not in ("step", "attempt")
    )


def mlflow(store: str) -> tuple[list[tuple[int, str, float]], Mapping[str, str], str]:
    """What the store's own client reads: every value of every metric in its order, the parameters, the status."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(store)
    (experiment,) = [one for one in client.search_experiments() if one.name == "project"]
    (run,) = client.search_runs([experiment.experiment_id])
    values = [
        (point.step, name, point.value)
        for name in run.data.metrics
        for point in client.get_metric_history(run.info.run_id, name)
    ]
    return values, run.data.params, run.info.status


def test_mlflow_has_every_metric_and_setting_and_a_continued_run_is_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = f"file:{tmp_path / 'store'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    attempt(tmp_path / "run", ("mlflow",), 0, 3)
    attempt(tmp_path / "run", ("mlflow",), 2, 5)
    values, settings, status = mlflow(store)
    once = [(step, name, value) for step in range(3) for name, value in metrics(step, 0).items()]
    again = [(step, name, value) for step in range(2, 5) for name, value in metrics(step, 1).items()]
    assert sorted(values) == sorted(once + again)
    assert settings == {name: str(value) for name, value in FLAT.items()} and status == "FINISHED"


def test_a_store_that_mlflow_does_not_know_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://x")
    with pytest.raises(UserError, match="the tracker mlflow did not start: ") as caught:
        attempt(tmp_path / "run", ("mlflow",), 0, 1)
    assert "\n" not in str(caught.value)
