"""A record in object storage: a real S3-compatible server, in its own process."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from compaction_helpers import answers, record
from test_compaction_processes import WRITER, check_whole

import cavesson
from cavesson.errors import UserError
from cavesson.record import begin_attempt, compact, write_run, write_vocabulary
from cavesson.record.read.query import query


@pytest.mark.slow
def test_a_run_in_object_storage_reads_like_one_on_disk(server, tmp_path):
    places = [f"{server}/some/run=1", tmp_path]
    for place in places:
        write_run(place, {"name": "run"})
        write_vocabulary(place, ["a"] * 12, ["b"] * 12)
        record(place, range(5), attempt=begin_attempt(place, 0))
        record(place, range(5), rank=1)
        record(place, range(3, 6), attempt=begin_attempt(place, 3))
    remote, local = places
    assert answers(remote) == answers(local)
    run = cavesson.open(remote)
    assert run.info == {"name": "run"} and run.folder == remote and not run.storage.exists("record")
    assert run.token_texts([3]) == ["b"]
    cursor = run.changes(None).cursor
    assert compact(remote) == compact(local) == 26
    assert answers(remote) == answers(local)
    assert run.changes(cursor).first_step == 5  # whose file might have grown before it was merged
    text = "SELECT step, count(*) FROM rows JOIN tokens USING (step, sample) GROUP BY step ORDER BY step"
    assert query(run, text, seconds=60).rows == query(cavesson.open(local), text, seconds=60).rows
    with pytest.raises(UserError, match="disabled"):
        query(run, f"SELECT * FROM read_text('{remote}/run.json')", seconds=60)


@pytest.mark.slow
def test_a_writer_killed_in_object_storage_leaves_whole_steps(server):
    place = f"{server}/killed"
    write_run(place, {})
    code = WRITER.replace("Path(sys.argv[1])", "sys.argv[1]")
    process = subprocess.Popen([sys.executable, "-c", code, place, "1000", "3"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    flushed = [int(process.stdout.readline()) for _ in range(3)]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    steps = check_whole(cavesson.open(place))
    assert steps[: flushed[-1] + 1] == list(range(flushed[-1] + 1))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("s3://bucket/none", r"no run\.json"),
        ("nothing://x/y", "'nothing://x/y' is not a place in object storage, such as s3://bucket/run"),
        ("abfs://x/y", "abfs://x/y cannot be reached: .*adlfs"),
    ],
)
def test_what_cannot_be_opened_is_said(server, place, message):
    with pytest.raises(UserError, match=message):
        cavesson.open(place)


def test_a_server_that_is_not_there_or_refuses_is_one_line(server, monkeypatch):
    import s3fs

    endpoint = os.environ["AWS_ENDPOINT_URL"]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        nobody = found.getsockname()[1]
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{nobody}")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        s3fs.S3FileSystem.clear_instance_cache()
        with pytest.raises(UserError, match=r"s3://bucket/run cannot be reached: .*onnect"):
            cavesson.open("s3://bucket/run")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(UserError, match="s3://bucket/other cannot be reached: Unable to locate credentials"):
        cavesson.open("s3://bucket/other")
    s3fs.S3FileSystem.clear_instance_cache()


def test_the_module_is_not_imported_for_a_folder(tmp_path: Path):
    write_run(tmp_path, {})
    code = f"import sys, cavesson; cavesson.open({str(tmp_path)!r}).rows(); print('fsspec' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
