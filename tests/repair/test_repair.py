"""A repair on real runs: forks are exact, and can be interrupted."""

import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from filelock import FileLock

sys.path.append(str(Path(__file__).parents[1] / "cli"))
from cli_helpers import Done, cavesson, write_recipe

import cavesson as package
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import Detection
from cavesson.doctor.reading import Reading
from cavesson.doctor.rules import RULES
from cavesson.errors import UserError
from cavesson.record import Recorder, begin_attempt, run_info, write_run
from cavesson.record.storage import storage
from cavesson.repair import verify
from cavesson.repair.fork import ending, fork
from cavesson.repair.plan import Plan, check_run, new_plan
from cavesson.train.checkpoint import between_steps
from cavesson.train.resuming import settings_of
from cavesson.train.run import resume, train

# Sampling from three tokens, which scoring knows nothing of: the doctor finds it from the first step on.
RECIPE = """
run = "run"
steps = 8
batch_size = 16
[model]
device = "cpu"
[data]
path = "prompts.txt"
shuffle = true
[sampling]
random_length = [2, 6]
top_k = 3
[[rewards]]
use = "rewards.py:uneven"
[optimizer]
learning_rate = 1e-3
[update]
epochs = 1
[checkpoint]
every = 2
keep = 9
[doctor]
on_finding = "ignore"
"""
# The file `fate` says after how many calls the process is killed.
REWARDS = """
import os
import signal
from pathlib import Path


def uneven(prompts, responses, **columns):
    fate = Path("fate")
    if fate.exists():
        calls = int(fate.read_text())
        fate.write_text(str(calls - 1))
        if calls == 0:
            fate.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
    return [sum(map(ord, response)) % 7 / 3 - 1 for response in responses]
"""
PROMPTS = ("On the table", "My", "The morning train was", "A dog and", "Yesterday we", "It")
FOLDER = "run.fix-filtered-sampling"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and its finished run."""
    folder = tmp_path_factory.mktemp("trained")
    write_recipe(folder, RECIPE, PROMPTS)
    (folder / "rewards.py").write_text(REWARDS)
    done = cavesson(folder, "ppo", "recipe.toml")
    assert done.code == 0, done.err
    return folder


@pytest.fixture(scope="module")
def fixed(trained: Path) -> tuple[Path, Done]:
    """The folder after the command has tried to fix its run."""
    before = contents(trained / "run")
    done = cavesson(trained, "doctor", "run", "--fix", "--json")
    assert contents(trained / "run") == before
    return trained, done


@pytest.fixture
def place(trained: Path, tmp_path: Path) -> Path:
    """A copy of the folder, without forks."""
    return shutil.copytree(trained, tmp_path / "copy", ignore=shutil.ignore_patterns("*.fix-*", "other"))


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a run, except for what readers leave."""
    files = (path for path in folder.rglob("*") if path.is_file() and "index" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def recorded(folder: Path) -> list[pa.Table]:
    """Everything that a run recorded of its rollouts."""
    run = package.open(folder)
    drop = {"attempt"}
    tables = [run.rows(), *(run.tokens(step) for step in sorted(set(run.rows(["step"])["step"].to_pylist())))]
    return [table.drop_columns([name for name in table.column_names if name in drop]) for table in tables]


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def from_step(run: Path, copy: Path, step: int, settings: dict[str, Any]) -> Path:
    """Resume a copy of a run without later checkpoints, whose run.json has other settings."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "model")
    for checkpoint in (copy / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)
    info = json.loads((copy / "run.json").read_bytes())
    info["config"]["run"] = str(copy)
    for name, value in settings.items():
        group, _, last = name.partition(".")
        info["config"][group][last] = value
    (copy / "run.json").write_text(json.dumps(info))
    done = cavesson(run.parent, info["algorithm"], "--resume", str(copy))
    assert done.code == 0, done.err
    return copy


def planned(settings: dict[str, Any], start: int, keeps_record: bool = True) -> Plan:
    return Plan("filtered-sampling", settings, start, 8, keeps_record, "")


@pytest.mark.slow
def test_forks_at_step_0_are_the_run_and_one_started_with_the_settings(fixed: tuple[Path, Done]) -> None:
    folder, _ = fixed
    run, forks = folder / "run", folder / FOLDER
    assert recorded(forks / "unchanged") == recorded(run)
    assert weights(forks / "unchanged") == weights(run)
    done = cavesson(folder, "ppo", "recipe.toml", "--run", "other", "--sampling.top_k", "0")
    assert done.code == 0, done.err
    assert recorded(forks / "changed") == recorded(folder / "other") != recorded(run)
    assert weights(forks / "changed") == weights(folder / "other") != weights(run)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"sampling.top_k": 0},
    {"kl.coef": 0.5, "optimizer.learning_rate": 1e-4},
    {"shaping.clip": 0.5, "update.epochs": 2, "ppo.lam": 1.0},
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: " ".join(settings) or "nothing")
def test_a_fork_is_the_run_that_is_resumed_from_the_checkpoint_with_the_settings(
    settings: dict[str, Any], place: Path
) -> None:
    run = place / "run"
    other = from_step(run, place / "other", 4, settings)
    fork(run, place / "fork", planned(settings, 4), settings)
    assert (place / "fork" / "products.json").read_bytes() == (run / "products.json").read_bytes()
    done = cavesson(place, "ppo", "--resume", "fork")
    assert done.code == 0, done.err
    assert recorded(place / "fork") == recorded(other)
    assert weights(place / "fork") == weights(other)
    assert (weights(place / "fork") == weights(run)) == (not settings)
    table = package.open(place / "fork").rows(["step", "kl_coef"])
    expected = [0.05 if step < 4 else settings.get("kl.coef", 0.05) for step in table["step"].to_pylist()]
    assert table["kl_coef"].to_pylist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("grpo", {"kl.coef": 0.5, "grpo.scale": "none", "sampling.top_k": 0}),
        ("rloo", {"kl.coef": 0.5, "rloo.kl_estimator": "k3", "optimizer.learning_rate": 1e-4}),
        ("raft", {"optimizer.learning_rate": 1e-4, "sampling.temperature": 0.7}),
    ],
)
def test_a_fork_of_other_algorithms_is_the_run_that_is_resumed_with_the_settings(
    algorithm: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    write_recipe(tmp_path, RECIPE, PROMPTS)
    (tmp_path / "rewards.py").write_text(REWARDS)
    run = tmp_path / "run"
    done = cavesson(tmp_path, algorithm, "recipe.toml")
    assert done.code == 0, done.err
    other = from_step(run, tmp_path / "other", 4, settings)
    fork(run, tmp_path / "fork", planned(settings, 4), settings)
    done = cavesson(tmp_path, algorithm, "--resume", "fork")
    assert done.code == 0, done.err
    assert recorded(tmp_path / "fork") == recorded(other) != recorded(run)
    assert weights(tmp_path / "fork") == weights(other) != weights(run)


def test_a_fork_whose_record_begins_with_it_has_the_same_steps(place: Path) -> None:
    run = place / "run"
    fork(run, place / "fork", planned({}, 4, keeps_record=False), {})
    done = cavesson(place, "ppo", "--resume", "fork")
    assert done.code == 0, done.err
    rows, whole = recorded(place / "fork")[0], recorded(run)[0]
    assert rows["step"].to_pylist()[0] == 4
    assert rows == whole.slice(len(whole) - len(rows))


@pytest.mark.slow
def test_a_record_elsewhere_is_copied_into_the_fork(place: Path, object_storage: str) -> None:
    run, url = place / "run", f"{object_storage}/{place.parent.name}"
    whole, info, elsewhere = recorded(run), run_info(run), storage(url)
    moved = [path for name in ("record", "attempts", "compactions") for path in run.glob(f"{name}/*") if path.is_file()]
    for path in (*moved, run / "vocabulary.parquet"):
        with elsewhere.writing(path.relative_to(run).as_posix()) as file:
            file.write(path.read_bytes())
        path.unlink()
    write_run(url, info)
    write_run(run, info | {"record": url, "config": info["config"] | {"record": url}})
    before = {path.name: elsewhere.read(path.relative_to(run).as_posix()) for path in moved}
    fork(run, place / "fork", planned({}, 4), {})
    done = cavesson(place, "ppo", "--resume", "fork")
    assert done.code == 0, done.err
    assert recorded(place / "fork") == whole
    assert {path.name: elsewhere.read(path.relative_to(run).as_posix()) for path in moved} == before


@pytest.mark.slow
def test_the_outcome_is_what_the_doctor_says_of_both_forks(fixed: tuple[Path, Done]) -> None:
    folder, done = fixed
    found = json.loads(done.out)
    assert (found["finding"], found["flags"]) == ("filtered-sampling", "--sampling.top_k 0")
    assert (found["start"], found["end"], found["folder"]) == (0, 8, FOLDER)
    for name, said in (("unchanged", "found"), ("changed", "gone")):
        diagnosed = json.loads(cavesson(folder, "doctor", f"{FOLDER}/{name}", "--json").out)
        names = {one["rule"] for one in diagnosed["findings"]}
        assert (found[name] == "found") == ("filtered-sampling" in names) == (said == "found")
    lower = found["reward"]["difference"]["high"] < 0
    assert (found["verdict"], done.code) == (("cannot tell", 4) if lower else ("recovered", 0))


@pytest.mark.slow
def test_the_command_is_proposed_and_repeated_at_once(fixed: tuple[Path, Done]) -> None:
    folder, done = fixed
    out = cavesson(folder, "doctor", "run").out
    assert "--sampling.top_k 0" in out and "doctor run --fix" in out
    again = cavesson(folder, "doctor", "run", "--fix")
    assert again.code == done.code and again.err == ""
    assert "steps 0–7" in again.out and "no checkpoint is older than the problem" in again.out


@pytest.mark.slow
def test_a_repair_that_was_killed_goes_on(place: Path, fixed: tuple[Path, Done]) -> None:
    (place / "fate").write_text("6")
    done = cavesson(place, "doctor", "run", "--fix", "--json")
    assert (done.code, done.out) == (137, "")
    assert done.err.strip().splitlines()[-1] == (
        f"cavesson: the fork {FOLDER}/changed has not ended; repeat the command to resume it"
    )
    kept = {path.name for path in (place / FOLDER / "changed" / "checkpoints").iterdir()}
    assert kept and "step-00000008" not in kept
    again = cavesson(place, "doctor", "run", "--fix", "--json")
    assert again.out == fixed[1].out
    for name in ("changed", "unchanged"):
        assert recorded(place / FOLDER / name) == recorded(fixed[0] / FOLDER / name)


@pytest.mark.slow
def test_forks_are_trained_for_longer_with_more_steps(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    def train(folder: Path) -> None:
        end = run_info(folder)["fork"]["end"]
        calls.append((folder.name, end))
        (folder / "checkpoints" / f"step-{end:08}").mkdir(parents=True, exist_ok=True)

    run = place / "run"
    verify(run, steps=3, train=train)
    verify(run, steps=3, train=train)
    monkeypatch.chdir(run)
    verify(Path(), steps=5, train=train)  # the forks are those beside the folder
    assert calls == [("changed", 3), ("unchanged", 3), ("changed", 5), ("unchanged", 5)]
    with pytest.raises(UserError, match="have done 5 steps; remove them to train 4 steps"):
        verify(run, steps=4, train=train)
    with pytest.raises(UserError, match="begin at step 0; remove them to begin at step 4"):
        verify(run, start=4, train=train)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [2, 6])
def test_a_fork_has_the_learning_rates_of_the_run(place: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """A cosine over all eight steps of the run, whatever the length of the forks; longer forks have longer ones."""
    run, start = place / "run", 4
    monkeypatch.chdir(place)
    shutil.rmtree(run)
    done = cavesson(place, "ppo", "recipe.toml", "--optimizer.schedule", "cosine")
    assert done.code == 0, done.err
    outcome = verify(run, start=start, steps=steps, train=lambda folder: resume(folder, "ppo"))
    unchanged, end, horizon = outcome.folder / "unchanged", start + steps, max(8, start + steps)
    rates = [row["optim/learning_rate"] for row in package.open(unchanged).steps().to_pylist()]
    expected = [1e-3 * 0.5 * (1 + math.cos(math.pi * step / horizon)) for step in range(start, end)]
    assert rates == pytest.approx(expected)
    if end <= 8:
        ours, theirs = (folder / "checkpoints" / f"step-{end:08d}" for folder in (unchanged, run))
        for kind in ("weights", "optimizer"):
            assert (ours / f"{kind}.safetensors").read_bytes() == (theirs / f"{kind}.safetensors").read_bytes()
        # Resumed like any other run, a fork continues to the last step of the original run.
        resume(unchanged, "ppo")
        assert weights(unchanged) == weights(run)


@pytest.mark.slow
def test_a_fork_that_was_interrupted_still_ends_where_it_should_or_at_other_steps(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    fork(place / "run", place / "fork", planned({}, 4), {})
    with pytest.raises(KeyboardInterrupt), ending(place / "fork", 5):
        raise KeyboardInterrupt
    resume(place / "fork", "ppo")
    assert between_steps(place / "fork")[-1] == 5 and run_info(place / "fork")["steps"] == 8
    train(settings_of(place / "fork", "ppo", ["--steps", "6"]), resume=True)
    assert between_steps(place / "fork")[-1] == 6 and "end" not in run_info(place / "fork")["fork"]


def test_both_forks_are_there_before_one_is_trained(place: Path) -> None:
    """The run may remove the checkpoint at which they begin when it goes on."""

    def train(folder: Path) -> None:
        shutil.rmtree(place / "run" / "checkpoints", ignore_errors=True)
        (folder / "checkpoints" / "step-00000006").mkdir(exist_ok=True)

    outcome = verify(place / "run", start=4, steps=2, train=train)
    for name in ("changed", "unchanged"):
        assert (outcome.folder / name / "checkpoints" / "step-00000004" / "weights.safetensors").exists()


def test_a_run_that_is_being_trained_is_refused(place: Path) -> None:
    with FileLock(place / "run" / ".lock"), pytest.raises(UserError, match=r"run is being written by .*: stop it, or"):
        verify(place / "run", train=lambda folder: pytest.fail("a fork is trained"))
    assert not (place / FOLDER).exists()


def test_a_file_that_cannot_be_copied_is_said_in_a_line(place: Path) -> None:
    lost = place / "run" / "checkpoints" / "step-00000004" / "weights.safetensors"
    lost.unlink()
    lost.symlink_to("nowhere")
    with pytest.raises(UserError, match=r"weights\.safetensors cannot be copied into the fork: ") as raised:
        fork(place / "run", place / "fork", planned({}, 4), {})
    assert "\n" not in str(raised.value) and not (place / "fork").exists()


def uneven(prompts: Any, responses: Any, **columns: Any) -> list[float]:
    return [sum(map(ord, response)) % 7 / 3 - 1 for response in responses]


@pytest.mark.slow
def test_the_example_fixes_a_run_that_was_started_from_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = package.PPORun.model_validate(
        {
            "run": "runs/mine",
            "steps": 4,
            "batch_size": 16,
            "model": {"device": "cpu"},
            "sampling": {"top_k": 3, "max_new_tokens": 6},
            "data": {"validation": 0.34},
            "doctor": {"on_finding": "ignore"},
        }
    )
    package.Training(settings, prompts=PROMPTS, rewards=uneven).run(lambda step, metrics: None)
    page = (Path(__file__).parents[2] / "docs" / "doctor-repair.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(code, {"prompts": PROMPTS, "reward": uneven})
    assert capsys.readouterr().out.splitlines()[-1] in ("recovered", "cannot tell")
    outcome = verify(Path("runs/mine"), train=lambda folder: pytest.fail("both forks are done"))
    assert (outcome.state(outcome.unchanged), outcome.state(outcome.changed)) == ("found", "gone")
    assert outcome.reward is not None and (outcome.reward.held_out, outcome.reward.prompts) == (True, 2)
    assert recorded(Path("runs/mine")) == recorded(Path("runs/mine.fix-filtered-sampling/unchanged"))


def refusal(place: Path, *flags: str) -> str:
    done = cavesson(place, "doctor", "run", "--fix", *flags)
    assert (done.code, done.out) == (2, "")
    return done.err.strip().splitlines()[-1]


def test_what_cannot_be_fixed_is_said_in_a_line(place: Path) -> None:
    run = place / "run"
    assert "run has no checkpoint of step 3; --from can be 0, 2, 4, 6, 8" in refusal(place, "--from", "3")
    assert "the doctor does not find truncated in run; it finds filtered-sampling" in refusal(
        place, "--finding", "truncated"
    )
    info = run_info(run)
    write_run(run, info | {"inputs": ["rewards"]})
    assert "run was started from Python with its own rewards" in refusal(place)
    sampling = info["config"]["sampling"] | {"top_k": 0}
    write_run(run, info | {"config": info["config"] | {"sampling": sampling}})
    said = refusal(place)
    assert said == (
        "cavesson: no setting of run ends filtered-sampling; what to change instead: "
        "sampling.top_k = 0 and sampling.top_p = 1.0"
    )
    write_run(run, info | {"trainer": "trl"})
    assert "run was trained by another trainer" in refusal(place)
    assert not (place / FOLDER).exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--steps", "3"], "--steps has no effect without --fix"),
        (["--from", "3"], "--from has no effect without --fix"),
        (["--finding", "truncated"], "--finding has no effect without --fix"),
        (["--fix", "--html", "page.html"], "--html has no effect with --fix"),
        (["--fix", "--fail-on", "error"], "--fail-on has no effect with --fix"),
    ],
)
def test_flags_without_effect_are_refused(flags: list[str], said: str, trained: Path) -> None:
    done = cavesson(trained, "doctor", "run", *flags)
    assert (done.code, done.err) == (2, f"cavesson: {said}\n")


def test_a_url_and_runs_that_do_not_sample_are_refused(tmp_path: Path) -> None:
    done = cavesson(tmp_path, "doctor", "s3://bucket/run", "--fix")
    assert done.code == 2 and "--fix needs the folder of the run" in done.err
    write_run(tmp_path / "run", {"algorithm": "sft", "config": {}})
    with pytest.raises(UserError, match="is a run of sft: --fix compares runs that sample responses"):
        check_run(tmp_path / "run")


@pytest.mark.slow
def test_other_prompts_than_those_of_the_run_are_refused(place: Path) -> None:
    write_recipe(place, RECIPE, (*PROMPTS[:-1], "Another"))
    info = run_info(place / "run")
    data = info["config"]["data"] | {"path": str(place / "prompts.txt")}
    write_run(place / "run", info | {"config": info["config"] | {"data": data}})
    done = cavesson(place, "doctor", "run", "--fix")
    assert (done.code, done.out) == (2, "")
    assert f"{FOLDER}/changed was started with other prompts; resume it with the data as it was then" in done.err
    assert "Traceback" not in done.err


class TestStart:
    """Where the forks begin: of a run with a fault whose onset is known."""

    @pytest.fixture
    def run(self, trained: Path, tmp_path: Path) -> Path:
        run = tmp_path / "run"
        write_run(run, run_info(trained / "run"))
        return run

    def plan(self, run: Path, onset: int, *kept: int, **given: Any) -> Plan:
        for step in kept:
            (run / "checkpoints" / f"step-{step:08}").mkdir(parents=True)
        (run / "checkpoints" / "step-00000003-update-00000001").mkdir(parents=True)
        with Recorder(run, attempt=begin_attempt(run, start_step=0)) as recorder:
            for step in range(20):
                recorder.rollouts(step, {"prompt": ["p"], "response": ["r"], "reward": [0.0], "sample": [0]})
                recorder.metrics(step, {"reward/mean": 0.0})
            recorder.metrics(20, {"evaluation/reward": 0.0})  # after the last step, which it does not lengthen
        finding = Detection(RULES[0], Reading(1.0, True, onset), settings={"sampling.top_k": 0})
        given = {"steps": None, "start": None} | given
        return new_plan(run, RunData(package.open(run)), finding, **given)

    def test_the_last_checkpoint_before_the_onset(self, run: Path) -> None:
        plan = self.plan(run, 12, 4, 8, 12, 16)
        assert (plan.start, plan.end, plan.keeps_record) == (12, 20, True)

    def test_none_before_the_onset(self, run: Path) -> None:
        plan = self.plan(run, 1, 2, 4)
        assert (plan.start, plan.end) == (0, 20) and plan.note.startswith("step 0 with the same seed")

    def test_those_before_the_onset_were_deleted(self, run: Path) -> None:
        plan = self.plan(run, 12, 18, 20)
        # The fault was seen for 8 steps, so the forks have as many.
        assert (plan.start, plan.end, plan.keeps_record) == (18, 26, False)
        assert "the oldest checkpoint that is left, 6 steps after the problem began (step 12)" in plan.note

    def test_a_checkpoint_of_ones_own(self, run: Path) -> None:
        plan = self.plan(run, 12, 4, 8, start=4, steps=5)
        assert (plan.start, plan.end, plan.keeps_record) == (4, 9, True)
