"""The page's first answer is kept from one start to the next, as long as it is true."""

import json
import os
import time
from urllib.parse import urlencode

import pytest
from browser_helpers import BoardProcess, record_run

from cavesson.board.opening import SETTLED, Opening

QUERY = b"of=first"
BODY = json.dumps([{"status": 200, "answer": [{"run": 0, "indexed": 1, "live": False}]}, {"status": 200, "answer": 1}])
BODY = BODY.encode()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    for name in ("record", "attempts", "index"):
        (folder / name).mkdir(parents=True)
    for name in ("run.json", "record/a", "index/state.json"):
        (folder / name).write_text("{}")
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (time.time() - 2 * SETTLED,) * 2)
    return folder


def kept(*runs, query=QUERY):
    return Opening([str(run) for run in runs]).answer(query)


def keep(run, body=BODY):
    Opening([str(run)]).keep(QUERY, body)


def is_kept(run):
    return Opening([str(run)]).is_kept()


def test_what_was_kept_is_answered_again(run):
    assert kept(run) is None and not is_kept(run)
    keep(run)
    assert kept(run) == BODY and is_kept(run)
    assert kept(run, query=b"of=other") is None and kept(run, run) is None


@pytest.mark.parametrize("path", ["record/b", "attempts/1.json", "run.json", "index/state.json"])
def test_a_change_of_the_run_ends_it(path, run):
    keep(run)
    (run / path).write_text("{ }")
    assert kept(run) is None
    os.utime((run / path).parent if "/" in path else run / path, (time.time() - SETTLED - 1,) * 2)
    assert kept(run) is None and not is_kept(run)


def test_a_change_between_start_and_answer_is_not_kept(run):
    opening = Opening([str(run)])
    (run / "record" / "b").write_text("")
    os.utime(run / "record", (time.time() - 1.5 * SETTLED,) * 2)
    opening.keep(QUERY, BODY)
    assert kept(run) is None


def test_nothing_is_answered_once_the_run_has_changed_since_the_start(run):
    keep(run)
    opening = Opening([str(run)])
    assert opening.is_kept()
    (run / "record" / "b").write_text("")
    os.utime(run / "record", (time.time() - 1.5 * SETTLED,) * 2)
    assert opening.answer(QUERY) is None


def test_another_page_asks_anew(run, tmp_path, monkeypatch):
    monkeypatch.setattr("cavesson.board.opening.STATIC", tmp_path)
    page = tmp_path / "board.js"
    page.write_text("")
    os.utime(page, (1, 1))
    keep(run)
    assert kept(run) == BODY
    os.utime(page, (2, 2))
    assert kept(run) is None


def test_what_has_just_changed_may_change_again_unseen(run):
    os.utime(run / "record", (time.time() - SETTLED / 2,) * 2)
    keep(run)
    os.utime(run / "record", (time.time() - 2 * SETTLED,) * 2)
    assert not list(Opening([str(run)]).file.parent.glob("*"))


@pytest.mark.parametrize(
    "runs", [[], [{"indexed": 0.5, "live": False}], [{"indexed": 1, "live": True}], {"error": "no"}], ids=str
)
def test_runs_that_still_change_are_not_kept(runs, run):
    keep(run, json.dumps([{"status": 200, "answer": runs}]).encode())
    assert kept(run) is None


def test_nothing_is_kept_of_what_failed_or_is_no_run(run, tmp_path):
    keep(run, json.dumps([json.loads(BODY)[0], {"status": 404, "error": "no"}]).encode())
    assert kept(run) is None
    (tmp_path / "other").mkdir()
    keep(tmp_path / "other")
    assert kept(tmp_path / "other") is None


def test_a_file_that_is_broken_is_as_none(run, cache):
    keep(run)
    (file,) = (cache / "cavesson" / "opening").iterdir()
    file.write_bytes(b"no json\n" + BODY)
    assert kept(run) is None and not is_kept(run)


def test_the_next_start_answers_what_was_kept(tmp_path, cache):
    folder = record_run(tmp_path / "real", steps=2)
    asked = "api/answers?" + urlencode({"of": json.dumps(["runs", "runs/0/series?names=reward&points=400"])})
    with BoardProcess(folder) as board:
        answers = [board.json(asked)]
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (time.time() - 1_000,) * 2)  # so that nobody seems to train it
    with BoardProcess(folder) as board:
        answers.append(board.json(asked))
    assert [run["live"] for (answer, _) in answers for run in answer["answer"]] == [True, False]
    (file,) = (cache / "cavesson" / "opening").iterdir()
    head, _, body = file.read_bytes().partition(b"\n")
    assert json.loads(body) == answers[1]
    file.write_bytes(head + b"\n" + b'["kept"]')
    with BoardProcess(folder) as board:
        assert board.json(asked) == ["kept"]
        assert board.json(asked) == answers[1]  # only the first request is answered so
