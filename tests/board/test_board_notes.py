"""Notes on steps and curves: what several people write at once, and what is refused."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from board_helpers import ORIGIN, board_of, client_of
from index_helpers import new_run, record

import cavesson
from cavesson.record.notes import NoteFile


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder: Path = new_run(tmp_path / "run")
    record(folder, range(3))
    return folder


def said(notes: list[Any]) -> list[tuple[Any, ...]]:
    return [tuple(note)[:4] for note in notes]


def test_the_last_line_of_an_author_about_a_place_counts(run: Path) -> None:
    ann, bob = (NoteFile(cavesson.open(run)) for _ in range(2))
    ann.write(2, None, "new data from here on", "Ann")
    bob.write(2, None, "no, the rate changed", "Bob")
    ann.write(1, "loss", "jumps", "Ann")
    ann.write(2, "loss", "falls", "Ann")
    ann.write(2, None, "new prompts from here on", "Ann")
    bob.write(1, "loss", "", "Bob")  # he wrote nothing there
    wanted = [
        (1, "loss", "jumps", "Ann"),
        (2, None, "no, the rate changed", "Bob"),
        (2, "loss", "falls", "Ann"),
        (2, None, "new prompts from here on", "Ann"),
    ]
    assert said(ann.all()) == said(bob.all()) == wanted
    ann.write(1, "loss", "", "Ann")
    assert said(bob.all()) == wanted[1:]
    assert len((run / "notes.jsonl").read_text().splitlines()) == 7


def test_nothing_is_lost_of_what_several_write_at_once(run: Path) -> None:
    def write(author: str) -> None:
        file = NoteFile(cavesson.open(run))
        for step in range(20):
            file.write(step, None, f"{author} {step}", author)

    threads = [threading.Thread(target=write, args=(name,)) for name in ("Ann", "Bob", "Cy")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    found = {(note.step, note.text) for note in NoteFile(cavesson.open(run)).all()}
    assert found == {(step, f"{name} {step}") for step in range(20) for name in ("Ann", "Bob", "Cy")}


def test_half_a_line_of_a_stopped_process_is_replaced(run: Path) -> None:
    (run / "notes.jsonl").write_bytes(b'{"step": 0, "met')
    file = NoteFile(cavesson.open(run))
    assert file.all() == []
    file.write(1, None, "here", "Ann")
    assert said(file.all()) == [(1, None, "here", "Ann")]


def test_notes_are_written_and_read_over_http(run: Path) -> None:
    client = client_of(board_of(run))
    for step, metric, text in ((1, "reward", "a"), (0, "loss", "b"), (0, "eval/reward", "c"), (2, None, " d\n")):
        body = {"metric": metric, "text": text, "author": " Ann "}
        answer = client.put(f"/api/runs/run/notes/{step}", json=body, headers=ORIGIN)
        assert answer.status_code == 200, answer.text
    found = client.get("/api/runs/run/notes").json()
    assert found == answer.json()
    assert [(one["step"], one["metric"], one["text"], one["author"]) for one in found] == [
        (0, "loss", "b", "Ann"),
        (0, "eval/reward", "c", "Ann"),
        (1, "reward", "a", "Ann"),
        (2, None, "d", "Ann"),
    ]
    assert all(one["time"].endswith("Z") for one in found)
    gone = client.put("/api/runs/run/notes/2", json={"text": "", "author": "Ann"}, headers=ORIGIN)
    assert [one["step"] for one in gone.json()] == [0, 0, 1]


@pytest.mark.parametrize(
    ("path", "body", "status", "why"),
    [
        ("3", {"text": "x"}, 400, "a note cannot be on step 3: the run has steps 0 to 2"),
        ("1", {"text": "x", "metric": "nothing"}, 400, "a note cannot be on 'nothing': the run has no such curve"),
        ("1", {"text": "x", "metric": "step"}, 400, "a note cannot be on 'step': the run has no such curve"),
        ("1", {"text": "x" * 10_001}, 422, "text"),
        ("1", {"text": 5}, 422, "text"),
        ("1", {}, 422, "text"),
        ("-1", {"text": "x"}, 422, "step"),
        ("1", {"text": "x", "author": "x" * 101}, 422, "author"),
    ],
)
def test_what_cannot_be_noted_is_refused(run: Path, path: str, body: dict[str, Any], status: int, why: str) -> None:
    answer = client_of(board_of(run)).put(f"/api/runs/run/notes/{path}", json=body, headers=ORIGIN)
    assert answer.status_code == status and why in answer.json()["error"]
    assert not (run / "notes.jsonl").exists()


NOTE = {"step": 0, "metric": None, "text": "x", "author": "", "time": ""}


@pytest.mark.parametrize(
    "broken", [b"x\n", b"[]\n", b'{"step": 1}\n', json.dumps(NOTE | {"step": "y"}).encode() + b"\n"]
)
def test_a_file_that_is_no_notes_is_told_in_one_line_and_not_overwritten(run: Path, broken: bytes) -> None:
    good = json.dumps(NOTE).encode() + b"\n"
    (run / "notes.jsonl").write_bytes(good + broken)
    client = client_of(board_of(run))
    put = client.put("/api/runs/run/notes/1", json={"text": "y"}, headers=ORIGIN)
    for answer in (client.get("/api/runs/run/notes"), put):
        assert answer.status_code == 400 and "line 2 of" in answer.json()["error"]
        assert "notes.jsonl is not a note" in answer.json()["error"]
    assert (run / "notes.jsonl").read_bytes() == good + broken
    assert client.get("/api/runs/run/labels").json() == []
