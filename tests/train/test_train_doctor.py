"""The doctor beside the training: it warns, stops, or is silent, and says at the end what it saw."""

import subprocess
import sys
from pathlib import Path

import pytest
from train_helpers import PROMPTS, WATCHED, build, patient, settings, uneven

import dressage
from dressage.config import check
from dressage.errors import StoppedError, UserError
from dressage.index.findings import findings_file, read_findings
from dressage.train.checkpoint import latest
from dressage.train.doctor import verdict
from dressage.train.run import Training
from dressage.train.settings import DoctorSettings

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-ppo.toml"


def train(folder, **changes):
    return build(folder, **{**WATCHED, **changes}).run(patient(folder))


def test_a_finding_is_told_once_with_its_cause_and_the_way_out(tmp_path, capfd):
    train(tmp_path / "run")
    lines = [line for line in capfd.readouterr().err.splitlines() if "filtered-sampling" in line]
    assert len(lines) == 1
    assert lines[0].startswith("doctor: error filtered-sampling since step 0: Responses are drawn from a filtered")
    assert "(top_k = 3)" in lines[0] and lines[0].endswith("Change: sampling.top_k = 0 and sampling.top_p = 1.0")
    assert latest(tmp_path / "run").step == WATCHED["steps"]
    last = verdict(DoctorSettings(), tmp_path / "run")
    assert any(line.startswith("doctor   error filtered-sampling since step 0: Responses are drawn") for line in last)
    assert str(tmp_path / "run") in last[-1]


def test_a_stop_leaves_a_checkpoint_that_a_resumed_run_continues_from_to_the_end(tmp_path, capfd):
    folder = tmp_path / "run"
    with pytest.raises(StoppedError) as stopped:
        train(folder, doctor__on_finding="stop")
    first, cause, way_out = str(stopped.value).splitlines()
    done = latest(folder).step
    assert 2 <= done < WATCHED["steps"]
    assert first == f"stopped after {done} of {WATCHED['steps']} steps"
    assert cause.startswith("error filtered-sampling since step 0: ")
    assert str(folder) in way_out
    assert stopped.value.exit_code == 3
    assert dressage.open(folder).rows(["step"])["step"].to_pylist()[-1] == done - 1
    # It was told: it does not stop the run again, though it is still so.
    findings_file(folder / "index").unlink()
    values = {**WATCHED, "doctor__on_finding": "stop"}
    Training(settings(folder, **values), prompts=PROMPTS, rewards=uneven, resume=True).run(patient(folder))
    assert latest(folder).step == WATCHED["steps"]
    assert findings_file(folder / "index").exists()


def test_where_all_is_ignored_nobody_looks(tmp_path, capfd):
    build(tmp_path / "run", **{**WATCHED, "doctor__on_finding": "ignore"}).run()
    assert not (tmp_path / "run" / "index").exists()
    assert "doctor" not in "".join(capfd.readouterr())


def test_a_rule_that_is_ignored_is_not_spoken_of(tmp_path, capfd):
    build(tmp_path / "run", **{**WATCHED, "doctor__rules": {"filtered-sampling": "ignore"}}).run()
    found = read_findings(findings_file(tmp_path / "run" / "index")).found["en"]
    assert "filtered-sampling" in [finding.id for finding in found]
    assert "filtered-sampling" not in "".join(capfd.readouterr())


def test_one_rule_may_be_answered_unlike_the_others(tmp_path):
    with pytest.raises(StoppedError, match="filtered-sampling"):
        train(tmp_path / "run", doctor__rules={"filtered_sampling": "stop"})


def test_a_rule_that_does_not_exist_is_a_mistake_that_names_the_nearest(tmp_path):
    with pytest.raises(UserError, match="no rule 'filtered-sampler'; did you mean 'filtered-sampling'"):
        check(DoctorSettings, {"rules": {"filtered-sampler": "stop"}}, "recipe.toml")


@pytest.mark.parametrize(
    ("severity", "settings", "answer"),
    [
        ("note", {"on_finding": "stop"}, "warn"),
        ("note", {"on_finding": "stop", "rules": {"stalls": "stop"}}, "stop"),
        ("warning", {"on_finding": "stop"}, "stop"),
        ("warning", {"on_finding": "stop", "rules": {"stalls": "ignore"}}, "ignore"),
        ("error", {}, "warn"),
    ],
)
def test_notes_stop_nothing_unless_they_are_named(severity, settings, answer):
    class Seen:
        id = "stalls"

    Seen.severity = severity
    assert DoctorSettings(**settings).answer(Seen) == answer


def test_the_command_says_so_with_its_exit_code(tmp_path):
    flags = {
        "run": tmp_path / "run",
        "steps": 3000,
        "sampling.top_k": 3,
        "doctor.share": 1.0,
        "doctor.on_finding": "stop",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "dressage", "ppo", str(RECIPE), *words]
    done = subprocess.run(command, cwd=RECIPE.parents[1], capture_output=True, text=True, timeout=120)
    assert done.returncode == 3
    assert "of 3000 steps\nerror filtered-sampling since step 0" in done.stderr
    assert "Traceback" not in done.stderr
