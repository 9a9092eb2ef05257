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

from cavesson.errors import UserError
from cavesson.importers import follow_run, import_run
from cavesson.record import open as open_run

COMMAND = [sys.executable, "-m", "cavesson", "import"]


def line(step: int, prompt: str = "p") -> bytes:
    return json.dumps({"prompt": prompt, "response": "r", "reward": 0.5, "step": step}).encode() + b"\n"


def wait_for(run: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (run / "run.json").exists() and open_run(run).rows(["step"]).num_rows >= count:
            return
        time.sleep(0.1)
    raise AssertionError(f"{count} rollouts did not come")


def test_all_responses_may_be_held_out(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(line(0) + line(1))
    follow_run(tmp_path / "in.jsonl", tmp_path / "run", held_out=True, until_idle=0.1)
    assert open_run(tmp_path / "run").rows(["split"])["split"].to_pylist() == ["eval", "eval"]


def test_responses_of_training_are_not_held_out(tmp_path):
    """A source that says so itself is believed."""
    rows = [{"step": 0, "prompt": "p", "response": "r", "reward": 1.0, "split": split} for split in ("train", "eval")]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = import_run(tmp_path / "in.jsonl", tmp_path / "run", held_out=True)
    assert (report.rollouts, report.rejected) == (1, 1) and "'split' is 'train'" in report.quotes[0]


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
    assert "3 rollouts of rl-logging-board read" in out and "1 broken record, kept" in out
    assert "the end of 1 file was not read" in out
    table = open_run(run).rows(["step", "sample", "rank", "prompt"]).to_pylist()
    assert [tuple(row.values()) for row in table] == [(0, 0, 0, "p"), (0, 1, 1, "other"), (1, 0, 0, "late")]
    assert json.loads((run / "rejected.jsonl").read_text())["text"] == "broken"


@pytest.mark.slow
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

    with pytest.raises(UserError, match=r"1\.jsonl was rewritten .* into another folder"):
        follow_run(path, tmp_path / "run", until_idle=30, progress=rewrite)
    assert open_run(tmp_path / "run").rows(["step"]).num_rows == 3


def test_a_file_that_was_written_anew_and_is_longer_is_said_too(tmp_path):
    """As a logger that rotates its files does, or a trainer that starts again; it is not read from the middle."""
    path = tmp_path / "1.jsonl"
    path.write_bytes(line(0) * 3)
    counts = []

    def rewrite(rollouts: int, rejected: int) -> None:
        counts.append((rollouts, rejected))
        (tmp_path / "new").write_bytes(line(0, "another prompt") * 5)
        (tmp_path / "new").replace(path)

    with pytest.raises(UserError, match=r"1\.jsonl was rewritten"):
        follow_run(path, tmp_path / "run", until_idle=30, progress=rewrite)
    assert counts == [(3, 0)]


@pytest.mark.slow
def test_a_file_that_is_copied_again_and_again_is_followed(tmp_path):
    """As rsync does: each copy is a new file that begins as the one before."""
    path = tmp_path / "1.jsonl"
    path.write_bytes(line(0))

    def copy(rollouts: int, rejected: int) -> None:
        (tmp_path / "new").write_bytes(b"".join(line(0, f"p{i}") for i in range(1, min(rollouts + 2, 5))))
        (tmp_path / "new").replace(path)

    path.write_bytes(line(0, "p1"))
    report = follow_run(path, tmp_path / "run", until_idle=3, progress=copy)
    assert (report.rollouts, report.rejected) == (4, 0)


def test_what_is_not_whole_when_nothing_comes_any_more_is_read_as_it_is(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    (source / "1.jsonl").write_bytes(line(0) + line(1).rstrip())  # as "\n".join writes it
    (source / "2.jsonl").write_bytes(line(0) + line(1)[:20])
    report = follow_run(source, tmp_path / "run", until_idle=1)
    assert (report.rollouts, report.rejected) == (3, 1)
    assert "2.jsonl, line 2" in report.quotes[0]
    table = pa.table({"step": [1], "prompt": ["p"], "completion": ["c"], "f": [1.0], "advantage": [0.0]})
    (tmp_path / "trl").mkdir()
    pq.write_table(table, tmp_path / "trl" / "completions_1.parquet")
    whole = (tmp_path / "trl" / "completions_1.parquet").read_bytes()
    (tmp_path / "trl" / "completions_2.parquet").write_bytes(whole[:100])
    report = follow_run(tmp_path / "trl", tmp_path / "run2", until_idle=1)
    assert (report.rollouts, report.rejected) == (1, 1) and "completions_2.parquet" in report.quotes[0]


def test_a_record_is_not_its_own_source(tmp_path):
    """Not the one that is being written, nor another one in the same folder."""
    (tmp_path / "sub").mkdir()
    pq.write_table(pa.table({"prompt": ["p"], "response": ["r"], "reward": [1.0]}), tmp_path / "sub" / "a.parquet")
    import_run(tmp_path / "sub" / "a.parquet", tmp_path / "runs" / "old")
    report = follow_run(tmp_path, tmp_path / "runs" / "new", until_idle=1.2)
    assert (report.files, report.rollouts) == (1, 1)
    assert import_run(tmp_path, tmp_path / "runs" / "once").rollouts == 1


def test_a_table_that_grows_by_being_written_anew_is_not_followed(tmp_path):
    data = {"columns": ["global_step", "text", "reward"], "data": [[1, "t", 0.5]]}
    (tmp_path / "generated_samples_1_a.table.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match="import it without --follow"):
        follow_run(tmp_path, tmp_path / "run", until_idle=1)


def test_mistakes_on_the_command_line_are_one_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(line(0))
    for flags, message in (
        (["--until-idle", "1"], "no effect without --follow"),
        (["--map", "reward"], "expected NAME=COLUMN"),
        (["--format", "x"], "there is no format 'x'"),
    ):
        command = [*COMMAND, str(tmp_path / "a.jsonl"), str(tmp_path / "run"), *flags]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"})
        assert done.returncode == 2
        assert message in done.stderr and "Traceback" not in done.stderr


def episode(number: int, step: int) -> bytes:
    nodes = [
        {"message": {"role": "user", "content": "p"}, "token_ids": [1], "mask": [False], "parent": None},
        {"message": {"role": "assistant", "content": "r"}, "token_ids": [2, 3], "mask": [True, True], "sampled": True,
         "parent": 0},
    ]  # fmt: skip
    trace = {"id": f"t{number}", "nodes": nodes, "rewards": {"f": float(number)}, "info": {"arrival": {"step": step}}}
    return json.dumps({"run": {"work": {"type": "train", "step": step}}, "traces": [trace]}).encode() + b"\n"


@pytest.mark.slow
def test_a_stream_of_prime_rl_is_followed_while_it_is_annotated_and_compressed(tmp_path):
    traces = tmp_path / "in" / "monitors" / "file" / "traces"
    for part in ("stream", "annotations/orch"):
        (traces / part).mkdir(parents=True)
    first, second = traces / "stream" / "00000.jsonl", traces / "stream" / "00001.jsonl"
    first.write_bytes(episode(0, 0) + episode(1, 0))
    ended = Thread(target=lambda: follow_run(tmp_path / "in", tmp_path / "run", until_idle=6))
    ended.start()
    wait_for(tmp_path / "run", 0)
    time.sleep(1.5)
    # Nobody knows yet what of it is trained on; that comes before the episodes of two steps later.
    assert open_run(tmp_path / "run").rows(["step"]).num_rows == 0
    update = {"trace_id": "t0", "info": {"effective": True}, "branches": [{"index": 0, "advantages": [0, 0.5, 0.25]}]}
    (traces / "annotations" / "orch" / "00000.jsonl").write_text(json.dumps(update) + "\n")
    with first.open("ab") as file:
        file.write(episode(2, 1))  # read, or not, before the file is compressed
    content = first.read_bytes() + episode(3, 1)
    (traces / "stream" / "00000.jsonl.zst").write_bytes(pa.compress(content, "zstd", asbytes=True))
    first.unlink()
    second.write_bytes(episode(4, 2))
    wait_for(tmp_path / "run", 2)
    assert open_run(tmp_path / "run").rows(["reward"])["reward"].to_pylist() == [0.0, 1.0]
    ended.join(60)
    run = open_run(tmp_path / "run")
    assert run.rows(["step", "reward"]).to_pylist() == [
        {"step": step, "reward": float(number)} for number, step in enumerate([0, 0, 1, 1, 2])
    ]
    assert run.rollout(0, 0)[1]["advantage"].to_pylist() == [0.5, 0.25]
    assert run.rollout(0, 1)[1]["advantage"].null_count == 2


def test_a_file_that_cannot_be_read_yet_is_told_once_at_the_end(tmp_path):
    for part in ("stream", "annotations/orch"):
        (tmp_path / "in" / part).mkdir(parents=True)
        (tmp_path / "in" / part / "00001.jsonl.zst").write_bytes(b"no frame")
    (tmp_path / "in" / "stream" / "00000.jsonl").write_bytes(episode(0, 0))
    report = follow_run(tmp_path / "in", tmp_path / "run", until_idle=2)
    assert (report.rollouts, report.rejected) == (1, 2)
    assert [("stream" in quote, "cannot be read" in quote) for quote in report.quotes] == [(True, True), (False, True)]


def test_a_table_that_breaks_off_in_the_middle_is_read_once(tmp_path):
    source, size = tmp_path / "in", 600
    source.mkdir()
    columns = {"step": [1] * size, "prompt": ["p"] * size, "completion": [f"c{i}" * 50 for i in range(size)]}
    path = source / "completions_1.parquet"
    pq.write_table(pa.table(columns | {"f": [1.0] * size, "advantage": [0.0] * size}), path, row_group_size=size // 2)
    content = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(1).column(2).data_page_offset
    content[start : start + 200] = b"\xff" * 200
    path.write_bytes(content)

    def progress(rollouts: int, rejected: int) -> None:
        assert rollouts < size  # else it would be read for ever

    report = follow_run(source, tmp_path / "run", until_idle=2, progress=progress)
    found = open_run(tmp_path / "run").rows(["response"])["response"].to_pylist()
    assert report.rollouts == len(found) == len(set(found)) > 100 and report.rejected == 1
    assert "completions_1.parquet: the file cannot be read" in report.quotes[0]


def test_a_file_that_comes_between_others_gets_a_rank_of_its_own(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    for name in "ac":
        (source / f"{name}.jsonl").write_bytes(line(0, name))

    def add(rollouts: int, rejected: int) -> None:
        if rollouts == 2:
            (source / "b.jsonl").write_bytes(line(0, "b"))

    follow_run(source, tmp_path / "run", until_idle=2, progress=add)
    run = open_run(tmp_path / "run")
    assert run.info["ranks"] == {"0": "a.jsonl", "1": "c.jsonl", "2": "b.jsonl"}
    assert {row["prompt"]: row["rank"] for row in run.rows(["prompt", "rank"]).to_pylist()} == {"a": 0, "c": 1, "b": 2}
