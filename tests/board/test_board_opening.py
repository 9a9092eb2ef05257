"""The page's first answers are kept from one start to the next, as long as they are true."""

import json
import os
import time
from urllib.parse import urlencode

import pytest
from browser_helpers import BoardProcess, record_run

from cavesson.board.opening import RUNS, SETTLED, Opening

SERIES, QUERY = "/api/runs/run/series", "names=reward"
COMPLETE = json.dumps([{"run": "run", "indexed": 1, "live": False}]).encode()
BODY = b'{"step": [0]}'


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
    return Opening([str(run) for run in runs]).answer(SERIES, query)


def keep(run, runs=COMPLETE):
    keep_both(Opening([str(run)]), runs)


def keep_both(opening, runs=COMPLETE):
    opening.keep(SERIES, QUERY, BODY)
    opening.keep(RUNS, "", runs)


def is_kept(run):
    return Opening([str(run)]).is_kept()


def test_what_was_kept_is_answered_again(run):
    assert kept(run) is None and not is_kept(run)
    keep(run)
    assert kept(run) == BODY and is_kept(run)
    assert kept(run, query="names=other") is None and kept(run, run) is None


def test_each_is_answered_once_and_only_the_first_of_a_path_is_kept(run):
    opening = Opening([str(run)])
    keep_both(opening)
    opening.keep(SERIES, "names=length", b"{}")
    opening.keep("/api/runs/other/series", QUERY, b"[]")
    opening = Opening([str(run)])
    assert [opening.answer(SERIES, QUERY) for _ in range(2)] == [BODY, None]
    assert opening.answer("/api/runs/other/series", QUERY) == b"[]"
    assert opening.answer(RUNS, "") == COMPLETE and not opening.is_kept()


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
    keep_both(opening)
    assert kept(run) is None


def test_nothing_is_answered_once_the_run_has_changed_since_the_start(run):
    keep(run)
    opening = Opening([str(run)])
    assert opening.is_kept()
    (run / "record" / "b").write_text("")
    os.utime(run / "record", (time.time() - 1.5 * SETTLED,) * 2)
    assert opening.answer(SERIES, QUERY) is None


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


@pytest.mark.parametrize("runs", [[], [{"indexed": 0.5, "live": False}], [{"indexed": 1, "live": True}]], ids=str)
def test_runs_that_still_change_are_not_kept(runs, run):
    keep(run, json.dumps(runs).encode())
    assert kept(run) is None


def test_nothing_is_kept_without_the_runs_or_of_what_is_not_a_run(run, tmp_path):
    Opening([str(run)]).keep(SERIES, QUERY, BODY)
    assert kept(run) is None
    (tmp_path / "other").mkdir()
    keep(tmp_path / "other")
    assert kept(tmp_path / "other") is None


def test_a_file_that_is_broken_is_as_none(run, cache):
    keep(run)
    (file,) = (cache / "cavesson" / "opening").iterdir()
    file.write_bytes(b"no json\n" + file.read_bytes())
    assert kept(run) is None and not is_kept(run)


@pytest.mark.slow
def test_the_next_start_answers_what_was_kept(tmp_path, cache):
    folder = record_run(tmp_path / "run", steps=2)
    asked = ["api/runs", "api/runs/run/series?" + urlencode({"names": "reward", "points": 400})]
    with BoardProcess(folder) as board:
        answers = [[board.json(one) for one in asked]]
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (time.time() - 1_000,) * 2)  # so that nobody seems to train it
    with BoardProcess(folder) as board:
        answers.append([board.json(one) for one in asked])
    assert [runs[0]["live"] for runs, _ in answers] == [True, False]
    (file,) = (cache / "cavesson" / "opening").iterdir()
    stamp, known = json.loads(file.read_bytes())
    assert [json.loads(body) for _, body in known.values()] == answers[1]
    assert list(known) == [RUNS, SERIES]
    known[SERIES][1] = '["kept"]'
    file.write_text(json.dumps([stamp, known]))
    with BoardProcess(folder) as board:
        assert board.json(asked[1]) == ["kept"]
        assert [board.json(one) for one in asked] == answers[1]  # only the first request is answered so


def test_a_run_whose_record_is_elsewhere_is_not_kept(run):
    """Nothing in its folder changes with the record."""
    for path in (*(run / "record").iterdir(), run / "record"):
        path.rmdir() if path.is_dir() else path.unlink()
    os.utime(run, (time.time() - 2 * SETTLED,) * 2)
    keep(run)
    assert not is_kept(run)
