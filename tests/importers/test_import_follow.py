"""Files that are still being written."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dressage.errors import UserError
from dressage.importers import follow_run
from dressage.record import open as open_run

COMMAND = [sys.executable, "-m", "dressage", "import"]


def line(step: int, prompt: str = "p") -> bytes:
    return json.dumps({"prompt": prompt, "response": "r", "reward": 0.5, "step": step}).encode() + b"\n"


def wait_for(run: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (run / "run.json").exists() and open_run(run).rows(["step"]).num_rows >= count:
            return
        time.sleep(0.1)
    raise AssertionError(f"{count} rollouts did not come")


def test_lines_are_read_once_they_have_their_end_and_new_files_too(tmp_path):
    source, run = tmp_path / "in", tmp_path / "run"
    source.mkdir()
    whole = line(1, "late")
    with (source / "rank0.jsonl").open("wb", buffering=0) as file:
        file.write(line(0) + b"broken\n")
        process = subprocess.Popen([*COMMAND, str(source), str(run), "--follow"], stdout=subprocess.PIPE, text=True)
        try:
            wait_for(run, 1)
            file.write(whole[:20])
            (source / "rank1.jsonl").write_bytes(line(0, "other"))
            wait_for(run, 2)
            # The half line has been there for at least one look, and nobody has read it.
            assert "late" not in open_run(run).rows(["prompt"])["prompt"].to_pylist()
            file.write(whole[20:])
            wait_for(run, 3)
            file.write(whole[:30])
        finally:
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert "3 rollouts of rl-logging-board read" in out and "1 broken records" in out
    table = open_run(run).rows(["step", "sample", "rank", "prompt"]).to_pylist()
    assert [tuple(row.values()) for row in table] == [(0, 0, 0, "p"), (0, 1, 1, "other"), (1, 0, 0, "late")]
    assert json.loads((run / "rejected.jsonl").read_text())["text"] == "broken"


def test_it_ends_when_nothing_comes_and_reads_a_table_once_it_is_whole(tmp_path):
    table = pa.table({"step": [1], "prompt": ["p"], "completion": ["c"], "f": [1.0], "advantage": [0.0]})
    pq.write_table(table, tmp_path / "completions_00001.parquet")
    whole = (tmp_path / "completions_00001.parquet").read_bytes()
    (tmp_path / "completions_00002.parquet").write_bytes(whole[:100])

    def finish() -> None:
        time.sleep(1)
        (tmp_path / "completions_00002.parquet").write_bytes(whole)

    thread = Thread(target=finish)
    thread.start()
    seen = []
    report = follow_run(tmp_path, tmp_path / "run", until_idle=3, progress=lambda *counts: seen.append(counts))
    thread.join()
    assert (report.format, report.rollouts, report.rejected) == ("trl", 2, 0)
    assert seen[0] == (1, 0) and seen[-1] == (2, 0)


def test_a_file_that_was_written_anew_is_said(tmp_path):
    path = tmp_path / "1.jsonl"
    path.write_bytes(line(0) * 3)

    def rewrite(rollouts: int, rejected: int) -> None:
        path.write_bytes(line(0))

    with pytest.raises(UserError, match=r"1\.jsonl became shorter while it was followed"):
        follow_run(path, tmp_path / "run", until_idle=30, progress=rewrite)
    assert open_run(tmp_path / "run").rows(["step"]).num_rows == 3


def test_a_table_that_grows_by_being_written_anew_is_not_followed(tmp_path):
    data = {"columns": ["global_step", "text", "reward"], "data": [[1, "t", 0.5]]}
    (tmp_path / "generated_samples_1_a.table.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match="import it without --follow"):
        follow_run(tmp_path, tmp_path / "run", until_idle=1)


def test_mistakes_on_the_command_line_are_one_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(line(0))
    for flags, message in (
        (["--until-idle", "1"], "give both"),
        (["--map", "reward"], "expected NAME=COLUMN"),
        (["--format", "x"], "there is no format 'x'"),
    ):
        command = [*COMMAND, str(tmp_path / "a.jsonl"), str(tmp_path / "run"), *flags]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"})
        assert done.returncode == 2
        assert message in done.stderr and "Traceback" not in done.stderr
