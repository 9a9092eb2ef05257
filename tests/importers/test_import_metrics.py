"""Metrics that a trainer logged beside its rollouts: each format, the step they are of, and what is not read."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from import_helpers import lines

import cavesson
from cavesson.errors import UserError
from cavesson.importers import import_run
from cavesson.importers.metrics import aligned, read_metrics

LOGGED = {1: {"ppo_kl": 0.25, "reward": 0.5}, 2: {"ppo_kl": 0.5, "reward": 0.75}, 4: {"reward": 1.0}}


def as_csv(folder: Path) -> Path:
    path = folder / "log.csv"
    path.write_text("step,ppo_kl,reward\n1,0.25,0.5\n2,0.5,0.75\n4,,1.0\n")
    return path


def as_json_lines(folder: Path) -> Path:
    path = folder / "log.jsonl"
    lines(path, *({"step": step, **values} for step, values in LOGGED.items()))
    return path


def as_trainer_state(folder: Path) -> Path:
    history = [{"epoch": 0.1 * step, "step": step, **values} for step, values in LOGGED.items()]
    for entry in history:
        del entry["epoch"]
    path = folder / "trainer_state.json"
    path.write_text(json.dumps({"global_step": 4, "log_history": history}))
    return path


def as_events(folder: Path) -> Path:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "events")) as writer:
        for step, values in LOGGED.items():
            for name, value in values.items():
                writer.add_scalar(name, value, step)
    return folder


def as_chart(folder: Path) -> Path:
    """An exported chart of Weights & Biases: the run's name before each metric's, and the extremes of each point."""
    path = folder / "wandb_export.csv"
    with path.open("w", newline="") as file:
        table = csv.writer(file, quoting=csv.QUOTE_ALL)
        names = [f"my - run - {name}{end}" for name in ("ppo_kl", "reward") for end in ("", "__MIN", "__MAX")]
        table.writerow(["Step", *names])
        for step, values in LOGGED.items():
            table.writerow([step, *[values.get(name, "") for name in ("ppo_kl", "reward") for _ in range(3)]])
    return path


@pytest.mark.parametrize("write", [as_csv, as_json_lines, as_trainer_state, as_events, as_chart])
def test_every_format_gives_the_same_metrics(tmp_path, write):
    assert read_metrics(write(tmp_path)).values == LOGGED


@given(
    st.dictionaries(
        st.integers(0, 2**31 - 1),
        st.dictionaries(st.sampled_from(["loss", "kl", "x/y"]), st.floats(allow_nan=False), min_size=1),
        min_size=1,
    )
)
def test_numbers_are_kept_to_the_last_bit(tmp_path_factory, logged):
    folder = tmp_path_factory.mktemp("metrics")
    with (folder / "log.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["step", "loss", "kl", "x/y"])
        table.writeheader()
        table.writerows({"step": step, **values} for step, values in logged.items())
    lines(folder / "log.jsonl", *({"step": step, **values} for step, values in logged.items()))
    in_order = {step: logged[step] for step in sorted(logged)}
    assert read_metrics(folder / "log.csv").values == in_order
    assert read_metrics(folder / "log.jsonl").values == in_order


def test_what_is_not_read_is_named(tmp_path):
    path = tmp_path / "log.jsonl"
    lines(
        path,
        {"train/global_step": 3, "loss": 1.0, "note": "warm-up", "policy": {"kl": 2}, "h": {"_type": "histogram"}},
        {"train/global_step": 3, "loss": 0.5},
        {"eval": 1.0},
    )
    values, notes = read_metrics(path)
    assert values == {3: {"loss": 0.5, "policy/kl": 2.0}}
    assert notes == [
        f"2 metrics of 1 step read from {path}",
        "the step of the metrics is 'train/global_step'",
        f"1 line of {path} without a step, not read",
        f"not read from {path}, because it is not a number or has a reserved name: h, note",
        f"1 value of {path} replaced by a later one of the same step",
    ]


TURN = {
    "prompt_token_ids": [1], "completion_token_ids": [2], "per_token_logps": [-1.0], "loss_mask": [0, 1],
    "request": {"messages": [{"role": "user", "content": "p"}]},
    "response": {"choices": [{"message": {"role": "assistant", "content": "r"}, "finish_reason": "stop"}]},
}  # fmt: skip
REWARDS = {0: 0.5, 1: 0.75, 2: 1.0, 3: 0.25}


def log_of(folder: Path, move: int, rewards: dict[int, float] = REWARDS) -> Path:
    path = folder / "log.jsonl"
    lines(path, *({"step": step + move, "reward": value} for step, value in rewards.items()))
    return path


@pytest.mark.parametrize("move", [0, 1])
def test_metrics_belong_to_the_step_whose_reward_they_report(tmp_path, move):
    found = aligned(read_metrics(log_of(tmp_path, move)), REWARDS)
    assert {step: values["reward"] for step, values in found.values.items()} == REWARDS
    assert any("moved one step earlier" in note for note in found.notes) == bool(move)


@pytest.mark.parametrize(
    "rewards", [dict.fromkeys(range(4), 1.0), {0: 0.9, 1: 0.1, 2: 0.4, 3: 0.6}], ids=["constant", "another's"]
)
def test_metrics_are_not_moved_without_a_proof(tmp_path, rewards):
    found = aligned(read_metrics(log_of(tmp_path, 1, rewards)), REWARDS if len(set(rewards.values())) > 1 else rewards)
    assert [*found.values] == [1, 2, 3, 4]


def test_metrics_of_rollouts_without_scores_stay_where_they_are(tmp_path):
    rollouts = [{"step": step, "reward": None} for step in range(4)]
    lines(tmp_path / "traces.jsonl", *({"schema_version": 1, "turns": [TURN], **one} for one in rollouts))
    import_run(tmp_path / "traces.jsonl", tmp_path / "run", metrics=log_of(tmp_path, 1))
    assert cavesson.open(tmp_path / "run").steps()["step"].to_pylist() == [1, 2, 3, 4]


def test_scalars_of_tensorflow_are_read_and_other_kinds_named(tmp_path):
    import numpy as np
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    from tensorboard.util.tensor_util import make_tensor_proto

    writer = EventFileWriter(str(tmp_path))
    for name, value in (("loss", 0.5), ("weights", np.zeros(3))):
        tensor = make_tensor_proto(np.asarray(value, np.float32))
        writer.add_event(Event(step=3, summary=Summary(value=[Summary.Value(tag=name, tensor=tensor)])))
    writer.close()
    found = read_metrics(tmp_path)
    assert found.values == {3: {"loss": 0.5}}
    assert found.notes[-1].endswith("reserved name: weights")


def test_an_integer_beyond_floats_is_not_a_metric(tmp_path):
    lines(tmp_path / "log.jsonl", {"step": 1, "loss": 1.0, "hash": 10**400})
    assert read_metrics(tmp_path / "log.jsonl").values == {1: {"loss": 1.0}}


def test_steps_that_no_rollout_has_are_reported(tmp_path):
    note = aligned(read_metrics(log_of(tmp_path, 100)), REWARDS).notes[-1]
    assert note == "no metric is of a step with rollouts: these have the steps 0 to 3"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.csv", None, "none.csv does not exist"),
        ("log.txt", "step 1", "log.txt cannot be read as metrics; what can be read: .csv, .json"),
        ("log.jsonl", '{"step": 1, "loss": 1}\n{"step": 2,', "log.jsonl, line 2: not JSON"),
        ("log.jsonl", "[1]\n", "log.jsonl, line 1: expected an object with a step and metrics, not list"),
        ("log.json", '{"loss": 1}', "log.json has no metrics: expected a list of objects, or one in `log_history`"),
        ("log.jsonl", '{"loss": 1}\n', "log.jsonl has no metrics: no line has a step"),
        ("log.csv", "step,note\n1,hello\n", "log.csv has no metrics: no line has a number besides the step"),
        ("log.csv", "", "log.csv has no metrics: it is empty"),
        ("two.csv", "Step,a - loss,b - loss\n1,2,3\n", "two.csv has the metrics of 2 runs: a, b; export one of them"),
        ("twice.csv", "step,a,a\n1,2,3\n", "twice.csv has the column 'a' twice; rename one of them"),
        ("long.csv", "step,a\n1,2\n2,3,4\n", "long.csv, line 3: more cells than columns"),
        ("folder", None, "does not exist"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(tmp_path, name, content, says):
    lines(tmp_path / "rollouts.jsonl", {"step": 0, "prompt": "a", "response": "b", "reward": 1.0})
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as error:
        import_run(tmp_path / "rollouts.jsonl", tmp_path / "run", metrics=tmp_path / name)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_the_command_reads_them_into_the_record_and_the_doctor_judges_them(tmp_path):
    rollouts = tmp_path / "rollouts.jsonl"
    lines(
        rollouts,
        *({"step": s, "prompt": f"p{i}", "response": "b", "reward": i / 4} for s in range(24) for i in range(4)),
    )
    metrics = tmp_path / "log.csv"
    metrics.write_text("step,ppo_kl\n" + "".join(f"{step},{40.0 + step}\n" for step in range(24)))
    command = [sys.executable, "-m", "cavesson", "import", str(rollouts), str(tmp_path / "run")]
    done = subprocess.run([*command, "--metrics", str(metrics)], capture_output=True, text=True, check=True)
    assert f"1 metric of 24 steps read from {metrics}" in done.stdout
    steps = cavesson.open(tmp_path / "run").steps()
    assert steps["ppo_kl"].to_pylist() == [40.0 + step for step in range(24)]
    doctor = [sys.executable, "-m", "cavesson", "doctor", str(tmp_path / "run"), "--json"]
    found = subprocess.run(doctor, capture_output=True, text=True, env=os.environ, check=False)
    assert "update-kl-large" in {finding["rule"] for finding in json.loads(found.stdout)["findings"]}


def test_metrics_and_following_exclude_each_other(tmp_path):
    lines(tmp_path / "r.jsonl", {"step": 0, "prompt": "a", "response": "b", "reward": 1.0})
    command = [sys.executable, "-m", "cavesson", "import", str(tmp_path / "r.jsonl"), str(tmp_path / "run")]
    done = subprocess.run([*command, "--follow", "--metrics", "log.csv"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "--metrics cannot be read with --follow" in done.stderr


WANDB_LOGGED = [
    {"_step": 0, "_timestamp": 100.0, "_runtime": 10.0, "loss": 2.0},
    {"_step": 1, "_timestamp": 160.0, "_runtime": 70.0, "loss": 1.0},
]
WANDB_SAMPLED = [
    {"_timestamp": 90.0, "system.gpu.0.gpu": 50.0, "system.gpu.0.memoryAllocatedBytes": 2.0**33, "system.disk.in": 3.0},
    {"_timestamp": 110.0, "system.gpu.0.gpu": 80.0, "system.gpu.1.gpu": 10.0, "system.proc.memory.rssMB": 512.0},
    {"_timestamp": 160.0, "system.gpu.0.gpu": 100.0, "system.cpu": 12.5},
    {"_timestamp": 999.0, "system.gpu.0.powerWatts": 300.0},
]
OF_MACHINE = {
    0: {"machine/gpu/0/utilization": 50.0, "machine/gpu/0/memory": 8.0, "system.disk.in": 3.0},
    # Step 1 was logged at 160: what was sampled since step 0, and what came after the last step.
    1: {
        "machine/gpu/0/utilization": 90.0,
        "machine/gpu/1/utilization": 10.0,
        "machine/gpu/0/power": 300.0,
        "machine/process/memory": 0.5,
        "machine/process/cpu": 12.5,
    },
}


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
def test_what_wandb_samples_of_the_machine_is_of_the_step_that_was_logged_next(tmp_path: Path, suffix: str) -> None:
    path, rows = tmp_path / f"metrics{suffix}", [*WANDB_SAMPLED, *WANDB_LOGGED]
    if suffix == ".csv":
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, dict.fromkeys(name for row in rows for name in row))
            table.writeheader()
            table.writerows(rows)
    else:
        path.write_text("\n".join(map(json.dumps, rows)) if suffix == ".jsonl" else json.dumps(rows))
    read = read_metrics(path)
    logged = [{name: value for name, value in row.items() if name != "_step"} for row in WANDB_LOGGED]
    assert read.values == {step: logged[step] | OF_MACHINE[step] for step in (0, 1)}
    assert any(note.startswith("4 lines of") and "logged next" in note for note in read.notes)
    assert any(note.startswith("6 figures of the machine") for note in read.notes)
    assert not any("not read" in note or "replaced" in note for note in read.notes)


def test_other_tools_figures_of_the_machine_have_one_name_and_unit(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    theirs = {
        "gpu/0/allocated_memory": 8.0,
        "rank3/gpu/1/temp": 60.0,
        "gpu/mean_utilization": 5.0,
        "system/gpu_2_memory_usage_megabytes": 2**30 / 1e6,
        "ray/node.1.gpu.0.util": 70.0,
        "perf/cpu_memory_used_gb": 64.0,
    }
    lines(path, {"step": 1, "timestamp": "2026-01-01T00:00:10+00:00", "loss": 1.0}, {"step": 2, **theirs})
    lines_of_trackio = [{"timestamp": "2026-01-01T00:00:00+00:00", "gpu/0/power": 100}, {"timestamp": "soon", "x": 1}]
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines_of_trackio)
    read = read_metrics(path)
    assert read.values[1] == {"loss": 1.0, "machine/gpu/0/power": 100.0}
    assert read.values[2] == {
        "machine/gpu/0/memory": 8.0,
        "machine/gpu/3.1/temperature": 60.0,
        "gpu/mean_utilization": 5.0,  # of all: it has no place among those of single GPUs
        "machine/gpu/2/memory": pytest.approx(1.0),
        "machine/gpu/1.0/utilization": 70.0,
        "machine/memory": 64.0,
    }
    assert any(note.startswith("1 line of") and "not read" in note for note in read.notes)


def test_lines_without_a_step_are_left_out_if_no_step_has_a_time(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines(path, {"step": 0, "loss": 1}, {"_timestamp": 5.0, "system.cpu": 50.0}, {"step": -1, "_timestamp": 1, "a": 1})
    read = read_metrics(path)
    assert read.values == {0: {"loss": 1.0}}
    assert any(note.startswith("2 lines of") and "not read" in note for note in read.notes)
