"""What the doctor finds reaches the page, without the server having to look or to know the doctor."""

import json
import shutil
import subprocess
import sys

import pytest
from board_helpers import board_of, client_of
from browser_helpers import wait_for
from index_helpers import followed, new_run, record

import cavesson
from cavesson.board import indexing
from cavesson.board.live import _position
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.look import look
from cavesson.doctor.report.summary import open_failures, summary
from cavesson.doctor.rules import RULES
from cavesson.doctor.words import LANGUAGES, language
from cavesson.findings.stored import findings_file, read_findings
from cavesson.record import Recorder


@pytest.fixture
def run(tmp_path):
    """A run whose prompts begin with two start tokens."""
    folder = new_run(tmp_path / "run", {"tokenizer": {"bos": 1}})
    record(folder, range(4), prompt_ids=[[1, 1, 5 + i] for i in range(6)])
    return folder


@pytest.fixture
def board(run):
    board = board_of(run)
    yield board
    board.scanner.stop()


def file_of(run):
    return findings_file(run / "index")


def found(board):
    answer = client_of(board).get("/api/runs/run/findings")
    assert answer.status_code == 200
    return answer.json()


def test_before_the_first_look_there_is_nothing_and_then_what_it_saw(run, board):
    assert found(board) is None
    look(str(run), file_of(run), "v")
    assert "double-start" in [finding["rule"] for finding in found(board)["en"]["findings"]]


def test_a_finding_says_everything_in_every_language(run, board):
    look(str(run), file_of(run), "v")
    answer = found(board)
    assert tuple(answer) == LANGUAGES
    by_language = {name: {one["rule"]: one for one in said["findings"]} for name, said in answer.items()}
    assert by_language["en"].keys() == by_language["zh"].keys() == by_language["vi"].keys()
    one = by_language["en"]["double-start"]
    assert one["severity"] == "error"
    assert (one["since_step"], answer["en"]["last_step"]) == (0, 3)
    evidence = {"step": 0, "sample": 0, "start": None, "stop": None, "view": "tokens?step=0&sample=0"}
    assert one["evidence"][0] == evidence
    assert one["seen"] == "100 %"
    assert "add_special_tokens=False" in one["fix"]
    for name in ("title", "cause", "healthy", "fix"):
        assert len({by_language[one]["double-start"][name] for one in LANGUAGES}) == 3


def test_what_could_not_be_judged_is_what_the_command_line_says(run, board):
    look(str(run), file_of(run), "v")
    data = RunData(cavesson.open(run))
    diagnosis = diagnose(data, RULES)
    for name, said in found(board).items():
        assert said["summary"] == summary(diagnosis, language(name))
        assert said["not_excluded"] == [list(one) for one in open_failures(diagnosis, language(name))] != []


def test_findings_of_an_earlier_version_are_shown_without_a_summary(run, board):
    look(str(run), file_of(run), "v")
    written = json.loads(file_of(run).read_text())
    del written["summary"], written["not_excluded"]
    file_of(run).write_text(json.dumps(written))
    said = found(board)["en"]
    assert (said["summary"], said["not_excluded"]) == ("", []) and said["findings"]


def test_the_page_hears_of_a_look_though_nothing_was_recorded_meanwhile(run, board):
    before = _position(board.run("run"))
    assert _position(board.run("run")) == before
    look(str(run), file_of(run), "v")
    assert _position(board.run("run")) != before


def test_findings_of_a_run_that_was_in_the_same_place_before_are_not_shown(run, board):
    look(str(run), file_of(run), "v")
    text = file_of(run).read_text()
    file_of(run).write_text(text.replace(read_findings(file_of(run)).run, "another"))
    assert found(board) is None


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"run": 1}', "\0", '{"findings": {"en": [{"id": {}}]}}'])
def test_a_file_that_is_no_findings_is_none(run, board, content):
    file_of(run).write_text(content)
    assert found(board) is None


def test_the_server_does_not_know_the_doctor():
    code = "import sys, cavesson.board.serve\nassert not [m for m in sys.modules if 'doctor.d' in m or 'scipy' in m]"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_process_that_indexes_has_the_doctor_look_at_the_run(run):
    following = followed((str(run), run / "index"))
    [process] = following.processes
    try:
        wait_for(file_of(run).exists)
        first = read_findings(file_of(run))
        assert "double-start" in [finding.rule for finding in first.findings["en"]]
        assert (run / "record").is_dir() and not list((run / "record").glob("*findings*"))
    finally:
        process.kill()
        process.join(60)


def add_rollout(run):
    with Recorder(run, attempt=0) as recorder:
        recorder.rollouts(4, {"prompt": ["p"], "response": ["r"], "reward": [1.0]}, {"token_id": [[1]]})


def add_metric(run):
    with Recorder(run, attempt=0) as recorder:
        recorder.metrics(5, {"loss": 1.0})


def test_the_doctor_is_told_when_the_run_has_grown(run, monkeypatch):
    states = []

    class Noting:
        running = False

        def __init__(self, path, file):
            assert (path, file) == (str(run), file_of(run))

        def poll(self, state, start):
            states.append(state)

    monkeypatch.setattr(indexing, "Watch", Noting)
    follower = indexing._follow(str(run), run / "index", {})
    for count, add in enumerate([add_rollout, add_metric, None], 1):
        before = len(states)
        while len(states) < before + 2:
            next(follower)
        assert len(dict.fromkeys(states)) == count
        if add:
            add(run)


def test_one_run_at_a_time_is_diagnosed(run, tmp_path, monkeypatch):
    asked = []

    class Working:
        running = True

        def __init__(self, path, file):
            self.path = path

        def poll(self, state, start):
            asked.append((self.path, start))

    monkeypatch.setattr(indexing, "Watch", Working)
    other = tmp_path / "other"
    shutil.copytree(run, other)
    doctors = {}
    first, second = (indexing._follow(str(path), path / "index", doctors) for path in (run, other))
    while not asked:
        next(first)
    assert asked == [(str(run), False)]  # it works itself
    while len(asked) == 1:
        next(second)
    doctors[str(run)].running = doctors[str(other)].running = False
    next(second)
    assert asked[1:] == [(str(other), False), (str(other), True)]
