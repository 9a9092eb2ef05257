"""The board of a run that a stranger has made: its links lead nowhere, and its index is not used if it has some."""

import os
from pathlib import Path

import pytest
from board_helpers import ORIGIN, board_of, client_of
from index_helpers import new_run, record

import cavesson
from cavesson.record.read.index_folder import index_folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder: Path = new_run(tmp_path / "run")
    record(folder, [0])
    return folder


@pytest.mark.parametrize("name", ["labels.jsonl", ".labels.lock", "stars.json", "notes.jsonl", ".notes.lock"])
def test_labels_and_notes_are_not_written_through_links(run: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").write_text("as it was")
    (run / name).symlink_to(tmp_path / "outside")
    client = client_of(board_of(run))
    path, body = ("notes/0", {"text": "x"}) if "notes" in name else ("labels/0/0", {"name": "note", "value": "x"})
    answer = client.put(f"/api/runs/run/{path}", json=body, headers=ORIGIN)
    assert answer.status_code == 400 and "leads out of" in answer.json()["error"]
    assert (tmp_path / "outside").read_text() == "as it was"


@pytest.mark.parametrize("kind", ["link", "pipe", "folder is a link"])
def test_an_index_with_links_or_pipes_is_not_used(run: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "outside").mkdir()
    if kind == "folder is a link":
        (run / "index").symlink_to(tmp_path / "outside")
    else:
        (run / "index").mkdir()
        state = run / "index" / "state.json"
        os.mkfifo(state) if kind == "pipe" else state.symlink_to(tmp_path / "outside")
    assert not index_folder(cavesson.open(run)).is_relative_to(run)
