"""The index of a run that is being written, by processes of their own as in training."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from index_helpers import followed, new_run, record
from test_index_build import alive_rows, recorded_rows
from test_index_rollups import check

import cavesson.record
from cavesson.board import indexing
from cavesson.index.build import Builder
from cavesson.index.folder import PROBLEM, read_state
from cavesson.index.search import candidates
from cavesson.index.snapshot import Snapshot, snapshot
from cavesson.index.texts import read_texts
from cavesson.processors import usable_processors
from cavesson.record.read.index_folder import fingerprint

# Three attempts, the later ones starting at an earlier step than the one before had reached, with compactions between.
WRITER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from index_helpers import record
from cavesson.record import compact
folder = Path(sys.argv[1])
for first, stop in ((0, 8), (4, 10), (7, 14)):
    for step in range(first, stop):
        record(folder, [step], batch=4, attempt=None if step == first else attempt)
        attempt = max(int(path.stem) for path in (folder / "attempts").iterdir())
        if step % 3 == 2:
            compact(folder)
"""


@pytest.fixture
def folder(tmp_path):
    return new_run(tmp_path / "run")


def whole(shot: Snapshot) -> None:
    """What any snapshot must be: no rollout twice, every column as long as the others, texts where they are told."""
    rows = np.arange(shot.rows) if shot.alive is None else np.flatnonzero(shot.alive)
    keys = (
        list(zip(shot.raw("step")[rows].tolist(), shot.raw("sample")[rows].tolist(), strict=True)) if shot.rows else []
    )
    assert len(keys) == len(set(keys)) == shot.count("train")
    assert all(len(shot.raw(name)) == shot.rows for name in shot.names)
    assert shot.state.text_rows <= shot.rows and shot.state.texts <= shot.rows


def test_an_index_follows_a_run_that_is_written_compacted_and_restarted(folder):
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder), str(Path(__file__).parent)])
    builder, looks = Builder(cavesson.record.open(folder), folder / "index"), 0
    while writer.poll() is None:
        if builder.update() or builder.advance():
            whole(snapshot(folder / "index"))
            looks += 1
        time.sleep(0.01)
    assert writer.returncode == 0 and looks > 3
    while builder.update() or builder.advance():
        pass
    shot = snapshot(folder / "index")
    whole(shot)
    assert alive_rows(shot) == recorded_rows(folder) and shot.state.text_rows == shot.rows
    check(folder, shot)
    rows = np.flatnonzero(shot.alive) if shot.alive is not None else np.arange(shot.rows)
    keys = list(zip(shot.raw("step")[rows].tolist(), shot.raw("sample")[rows].tolist(), strict=True))
    run = cavesson.record.open(folder)
    wanted = run.fetch(keys, ["response"])["response"].to_pylist()
    assert read_texts(run, shot, rows).response == wanted
    found = candidates(shot, {"concert"})
    assert found[rows].tolist() == ["concert" in text for text in wanted]


def wait_for(test, seconds=90):
    deadline = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def rows_in(index) -> int:
    state = read_state(index)
    return 0 if state is None else state.text_rows


def test_of_two_boards_one_writes_and_the_other_takes_over(folder):
    record(folder, [0])
    both = [followed((str(folder), folder / "index")) for _ in range(2)]
    boards = [one.processes[0] for one in both]
    try:
        wait_for(lambda: rows_in(folder / "index") == 6)
        for step in (1, 2):
            boards[step - 1].kill()
            boards[step - 1].join()
            if step == 1:
                record(folder, [1], attempt=0)
                wait_for(lambda: rows_in(folder / "index") == 12)
        assert alive_rows(snapshot(folder / "index")) == recorded_rows(folder)
        assert not (folder / "index" / PROBLEM).exists()
    finally:
        for board in boards:
            board.kill()


@pytest.mark.slow
def test_one_process_for_each_core_indexes_all_runs(tmp_path):
    folders = [new_run(tmp_path / str(i)) for i in range(2 * usable_processors() + 1)]
    for folder in folders:
        record(folder, [0])
    (folders[0] / "record" / "rows-00000000-0000-0000.parquet").write_bytes(b"no table")
    following = followed(*((str(folder), folder / "index") for folder in folders))
    processes = following.processes
    try:
        assert len(processes) == usable_processors()
        wait_for(lambda: all(rows_in(folder / "index") == 6 for folder in folders[1:]))
        wait_for((folders[0] / "index" / PROBLEM).exists)
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_a_run_that_begins_later_or_anew_is_followed(tmp_path):
    folder, index = tmp_path / "later", tmp_path / "index"
    following = followed((str(folder), index))
    [process] = following.processes
    try:
        time.sleep(1)
        assert process.is_alive() and not folder.exists()
        new_run(folder, {"model": "first"})
        record(folder, [0])
        wait_for(lambda: rows_in(index) == 6)
        assert not (index / PROBLEM).exists()
        shutil.rmtree(folder)
        new_run(folder, {"model": "second"})
        record(folder, [5], batch=4)
        name = fingerprint(cavesson.record.open(folder))
        wait_for(lambda: rows_in(index) == 4 and read_state(index).run == name)
        assert alive_rows(snapshot(index)) == recorded_rows(folder)
    finally:
        process.kill()
        process.join()


@pytest.mark.slow
def test_what_goes_wrong_is_told_and_ends_when_it_is_mended(folder):
    record(folder, [0])
    broken = folder / "record" / "rows-00000000-0000-0000.parquet"
    content = broken.read_bytes()
    broken.write_bytes(b"no table")
    problem = folder / "index" / PROBLEM
    following = followed((str(folder), folder / "index"))
    [process] = following.processes
    try:
        wait_for(problem.exists)
        assert "the index cannot be updated" in problem.read_text()
        broken.write_bytes(content)
        wait_for(lambda: rows_in(folder / "index") == 6 and not problem.exists())
    finally:
        process.kill()
        process.join()


def test_a_folder_that_cannot_be_made_is_tried_again(tmp_path, capsys):
    """Such as on a full disk: the process that follows the run must not end."""
    (tmp_path / "file").touch()
    looks = indexing._attended(str(tmp_path / "run"), tmp_path / "file" / "index", {})
    assert [next(looks), next(looks)] == [indexing.PAUSE_AFTER_PROBLEM] * 2
    assert "Error" in capsys.readouterr().err
