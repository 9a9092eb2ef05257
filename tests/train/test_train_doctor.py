"""The doctor beside the training: it warns, stops, or is silent, and says at the end what it saw."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from several_helpers import cli_helpers
from train_helpers import PROMPTS, WATCHED, build, patient, settings, uneven

import cavesson
from cavesson.algorithms.settings import DoctorSettings
from cavesson.config import check
from cavesson.errors import SignalledError, StoppedError, UserError
from cavesson.findings.stored import findings_file, read_findings
from cavesson.processes import Processes
from cavesson.record import Recorder, begin_attempt, write_run
from cavesson.train import doctor
from cavesson.train.checkpoint import latest
from cavesson.train.doctor import Doctor, verdict
from cavesson.train.run import Training

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-ppo.toml"


def train(folder, **changes):
    return build(folder, **{**WATCHED, **changes}).run(patient(folder))


@pytest.mark.slow
def test_a_finding_is_told_once_with_its_cause_and_the_way_out(tmp_path, capfd):
    train(tmp_path / "run")
    lines = [line for line in capfd.readouterr().err.splitlines() if "filtered-sampling" in line]
    assert len(lines) == 1
    assert lines[0].startswith("doctor: error filtered-sampling since step 0: Responses are sampled from a filtered")
    assert "(top_k = 3)" in lines[0] and lines[0].endswith("Change: sampling.top_k = 0 and sampling.top_p = 1.0")
    assert latest(tmp_path / "run").step == WATCHED["steps"]
    last = verdict(DoctorSettings(), tmp_path / "run")
    assert any(line.startswith("         error filtered-sampling since step 0: Responses are sampled") for line in last)
    assert str(tmp_path / "run") in last[-1]


@pytest.mark.slow
def test_a_stop_leaves_a_checkpoint_that_a_resumed_run_continues_from_to_the_end(tmp_path, capfd):
    folder = tmp_path / "run"
    with pytest.raises(StoppedError) as stopped:
        train(folder, doctor__on_finding="stop")
    first, cause, way_out = str(stopped.value).splitlines()
    done = latest(folder).step
    assert 2 <= done < WATCHED["steps"]
    assert first == f"stopped after {done} of {WATCHED['steps']} steps"
    assert cause.startswith("error filtered-sampling since step 0: ")
    assert way_out == "The checkpoint is complete"
    assert stopped.value.__notes__ == ["continue with: Training(..., resume=True) in Python"]
    assert stopped.value.exit_code == 3
    assert cavesson.open(folder).rows(["step"])["step"].to_pylist()[-1] == done - 1
    # It was told: it does not stop the run again, though it is still so.
    findings_file(folder / "index").unlink()
    values = {**WATCHED, "doctor__on_finding": "stop"}
    Training(settings(folder, **values), prompts=PROMPTS, rewards=uneven, resume=True).run(patient(folder))
    assert latest(folder).step == WATCHED["steps"]
    assert findings_file(folder / "index").exists()


@pytest.fixture
def sick(tmp_path):
    """A run of 40 rollouts whose prompts begin with two start tokens."""
    folder = tmp_path / "run"
    write_run(folder, {"algorithm": "ppo", "tokenizer": {"bos": 1}})
    with Recorder(folder, attempt=begin_attempt(folder, 0)) as recorder:
        for step in range(5):
            rows = {"prompt": ["p"] * 8, "response": ["r"] * 8, "reward": [1.0] * 8}
            rows["prompt_ids"] = [[1, 1, 5 + i] for i in range(8)]
            recorder.rollouts(step, rows, {"token_id": [[2]] * 8})
            recorder.metrics(step, {"loss/value": float("nan")})
    return folder


def attended(folder, told, **settings):
    """Looks twice at a run that grows; returns what was said to be a reason to stop."""
    callback, reasons = Doctor(DoctorSettings(share=1.0, **settings), told), []
    callback.start(folder)
    for step in (5, 6):
        callback.watch._next = 0
        reasons.append(callback.reason_to_stop(step))
        callback.watch._process.wait()
        reasons.append(callback.reason_to_stop(step))
    return reasons


@pytest.mark.slow
def test_a_finding_is_told_once_however_often_it_is_seen(sick, capfd):
    told = set()
    assert attended(sick, told) == [None] * 4
    found = read_findings(findings_file(sick / "index")).findings["en"]
    assert told == {finding.rule for finding in found} > {"double-start", "not-finite"}
    said = capfd.readouterr().err
    assert [said.count(f"doctor: {finding.severity} {finding.rule} ") for finding in found] == [1] * len(found)
    findings_file(sick / "index").unlink()
    assert attended(sick, told - {"double-start"}, on_finding="stop", rules={"not-finite": "warn"}) == [
        None,
        "error double-start since step 0: {0.title}. {0.cause} Change: {0.fix}".format(
            next(finding for finding in found if finding.rule == "double-start")
        ),
        None,
        None,
    ]


@pytest.mark.slow
def test_the_end_names_a_few_findings_in_the_users_language_and_counts_all(sick, monkeypatch):
    monkeypatch.setattr(doctor, "MAX_LINES", 1)
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    judged, line, last = verdict(DoctorSettings(), sick)
    seen = read_findings(findings_file(sick / "index"))
    found = seen.findings["zh"]
    assert len(found) >= 2
    assert judged == f"doctor   {seen.summary['zh']}"
    assert line.startswith(f"         error {found[0].id} since step 0: {found[0].title}; change: ")
    assert last.split(":")[0].strip() == f"{len(found)} to look at"
    spoken = {found[0].id: "ignore"}
    assert found[1].title in verdict(DoctorSettings(rules=spoken), sick)[1]


def test_where_nothing_is_left_to_say_that_is_said(sick):
    judged, last = verdict(DoctorSettings(on_finding="ignore", rules={"stalls": "warn"}), sick)
    assert judged.startswith("doctor   Not judged: ") and "cannot be excluded" in judged
    assert last.strip().startswith("0 to look at: ")


def test_a_record_that_cannot_be_read_is_said_at_the_end(sick, capfd):
    (rows, *_) = (sick / "record").glob("rows-*.parquet")
    rows.write_bytes(rows.read_bytes()[:-10])
    (line,) = verdict(DoctorSettings(), sick)
    assert "could not read" in line and str(sick) in line
    assert capfd.readouterr().err


def test_the_first_look_takes_no_larger_share_of_the_time_than_later_ones(sick):
    began = time.time()
    callback = Doctor(DoctorSettings(share=0.25), set())
    callback.start(sick)
    assert callback.watch.share == 0.25
    assert began + 4 <= callback.watch._next <= time.time() + 4


def test_a_run_that_is_to_stop_already_keeps_its_reason(sick):
    """A signal decides the exit code, whatever the doctor finds in the same step."""
    processes = Processes("cpu")
    for step, stop in ((5, None), (6, SignalledError("interrupted", 15))):
        callback = Doctor(DoctorSettings(share=1.0, on_finding="stop"), set())
        callback.start(sick)
        trainer = SimpleNamespace(next_step=step, end=9, stop=stop, learner=SimpleNamespace(processes=processes))
        callback.watch._next = 0
        callback.on_step(trainer)
        callback.watch._process.wait()
        callback.on_step(trainer)
        assert trainer.stop is stop if stop else str(trainer.stop).startswith("stopped after 5 of 9 steps\nerror ")


@pytest.mark.slow
def test_where_all_is_ignored_nobody_looks(tmp_path, capfd):
    watched = {name: value for name, value in WATCHED.items() if name != "doctor__share"}
    build(tmp_path / "run", **watched, doctor__on_finding="ignore").run()
    assert not (tmp_path / "run" / "index").exists()
    assert "doctor" not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_a_rule_that_is_ignored_is_not_spoken_of(tmp_path, capfd):
    build(tmp_path / "run", **{**WATCHED, "doctor__rules": {"filtered-sampling": "ignore"}}).run()
    found = read_findings(findings_file(tmp_path / "run" / "index")).findings["en"]
    assert "filtered-sampling" in [finding.rule for finding in found]
    assert "filtered-sampling" not in "".join(capfd.readouterr())


@pytest.mark.slow
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
        rule = "stalls"
        explains: ClassVar = {}

    Seen.severity = severity
    assert DoctorSettings(**settings).answer(Seen) == answer


@pytest.mark.slow
def test_a_consequence_that_is_to_stop_the_run_does_so_under_its_cause(tmp_path):
    """All rewards are equal, which explains that no step has a gradient."""
    folder, told = tmp_path / "run", set()
    write_run(folder, {"algorithm": "ppo"})
    with Recorder(folder, attempt=begin_attempt(folder, 0)) as recorder:
        for step in range(6):
            rows = {"prompt": ["p"] * 8, "response": ["r"] * 8, "reward": [1.0] * 8}
            recorder.rollouts(step, rows, {"token_id": [[2]] * 8})
            recorder.metrics(step, {"optim/grad_norm": 0.0})
    assert attended(folder, told) == [None] * 4
    assert told == {"verifier-dead"}  # told, and it stops the run all the same once what follows from it must
    findings_file(folder / "index").unlink()
    before, reason, *after = attended(folder, told, rules={"zero-gradient": "stop"})
    assert reason.startswith("error verifier-dead since step 0: ") and " Explains: zero-gradient. Change: " in reason
    assert before is None and after == [None, None]
    assert told == {"verifier-dead", "zero-gradient"}


@pytest.mark.slow
def test_the_command_says_so_with_its_exit_code(tmp_path):
    flags = {
        "run": tmp_path / "run",
        "steps": 3000,
        "sampling.top_k": 3,
        "doctor.share": 1.0,
        "doctor.on_finding": "stop",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    done = cli_helpers.cavesson(tmp_path, "ppo", str(RECIPE), *words)
    assert done.code == 3, done
    assert "of 3000 steps\nerror filtered-sampling since step 0" in done.err
    assert "Traceback" not in done.err
