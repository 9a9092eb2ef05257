"""One process at a time writes a run: real processes, on disk and in object storage."""

import errno
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event, Timer, current_thread
from typing import Any

import pytest
from filelock import FileLock

import cavesson
from cavesson.errors import UserError
from cavesson.record import Lock, LockedError, Recorder, write_run
from cavesson.record.storage import Folder, Storage, storage
from cavesson.record.write import lock
from cavesson.record.write.new_folder import new_folder

ROWS = {"prompt": ["p"], "response": ["r"], "reward": [1.0]}
RECORDS = """
import sys, time
from cavesson.record import Recorder
recorder = Recorder(sys.argv[1])
recorder.rollouts(0, {"prompt": ["p"], "response": ["r"], "reward": [0.5]})
recorder.flush()
print("ready", flush=True)
sys.stdin.readline()
"""


class Other:
    """Another process that records into a run until it is told to end, or killed."""

    def __init__(self, place: Path | str, code: str = RECORDS) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"

    def end(self) -> None:
        self.process.communicate("\n")
        assert self.process.returncode == 0

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@pytest.fixture(params=["disk", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "disk":
        return str(tmp_path / "run")
    return f"{request.getfixturevalue('server')}/{tmp_path.name}"


@pytest.mark.sampled(1)
def test_the_second_writer_is_told_who_the_first_is(place: str) -> None:
    other = Other(place)
    since = json.loads(storage(place).read("writer.json"))["since"][:19].replace("T", " ")
    who = f"process {other.process.pid} on {platform.node()} since {since} UTC (-c {place})"
    with pytest.raises(LockedError) as raised:
        Recorder(place)
    assert str(raised.value) == f"{place} is being written by {who}: stop it, or wait until it has ended"
    other.end()
    with Recorder(place) as mine:
        mine.rollouts(0, ROWS)
    run = cavesson.open(place)
    assert run.rows(["reward", "attempt"]).to_pylist() == [{"reward": 1.0, "attempt": 1}]
    assert not run.storage.exists("writer.json")


@pytest.mark.sampled(1)
def test_a_writer_that_was_killed_holds_nothing(place: str) -> None:
    other = Other(place)
    other.kill()
    assert storage(place).exists("writer.json")
    with Recorder(place) as mine:
        mine.rollouts(1, ROWS)
        assert json.loads(storage(place).read("writer.json"))["pid"] == os.getpid()
    assert cavesson.open(place).rows(["step"])["step"].to_pylist() == [0, 1]


@pytest.mark.parametrize("content", ["", '{"pid": 1, "ho'])
def test_a_writer_killed_while_it_took_the_lock_holds_nothing(place: str, content: str) -> None:
    write_run(place, {})
    assert storage(place).create("writer.json", content.encode())
    with Lock(place):
        assert json.loads(storage(place).read("writer.json"))["pid"] == os.getpid()


def test_a_process_with_the_number_of_the_killed_one_holds_nothing(place: str) -> None:
    write_run(place, {})
    owner = {"pid": os.getppid(), "host": platform.node(), "since": "2026-01-01T00:00:00+00:00", "command": "cavesson"}
    assert storage(place).create("writer.json", json.dumps(owner).encode())  # a process that lives, and did not write
    with Lock(place) as lock:
        lock.check()


def test_what_another_machine_holds_is_removed_by_hand(place: str) -> None:
    write_run(place, {})
    files = storage(place)
    owner = {"pid": 7, "host": "elsewhere", "since": "2026-01-01T00:00:00+00:00", "command": "cavesson ppo r.toml"}
    assert files.create("writer.json", json.dumps(owner).encode())
    with pytest.raises(LockedError) as raised:
        Lock(place)
    who = "process 7 on elsewhere since 2026-01-01 00:00:00 UTC (cavesson ppo r.toml)"
    path = files.path("writer.json")
    assert str(raised.value) == f"{place} is held by {who}; if that process has ended, remove {path} and try again"
    files.delete("writer.json")
    with Lock(place) as lock:
        lock.check()


class Elsewhere:
    """A recorder of another machine, as far as files tell: a process that says it runs elsewhere."""

    CODE = "import platform; platform.node = lambda: 'elsewhere'" + RECORDS
    FAST = "import cavesson.record.write.lock as lock; lock.HEARTBEAT = 0.1\n"

    def __init__(self, place: str) -> None:
        self.other = Other(place, self.FAST + self.CODE)
        # Its file lock would be on its own machine.
        file = storage(place).lock_file()
        if file.exists():
            file.unlink()


@pytest.mark.sampled(1)
def test_a_process_of_another_machine_that_lives_keeps_its_run(
    place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = Elsewhere(place)
    monkeypatch.setattr("cavesson.record.write.lock.SILENCE", 20.0)
    with pytest.raises(LockedError, match=r"is being written by process \d+ on elsewhere since .*: stop it, or wait"):
        Lock(place)
    assert "waiting up to 20 s to see whether it still runs" in capsys.readouterr().err
    elsewhere.other.end()
    with Lock(place):  # what has ended leaves nothing to wait for
        assert capsys.readouterr().err == ""


@pytest.mark.sampled(1)
def test_a_process_of_another_machine_that_was_killed_is_succeeded(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = Elsewhere(place)
    elsewhere.other.kill()
    monkeypatch.setattr("cavesson.record.write.lock.SILENCE", 2.0)
    with Recorder(place) as mine:
        mine.rollouts(1, ROWS)
    assert cavesson.open(place).rows(["step"])["step"].to_pylist() == [0, 1]
    assert not storage(place).exists("writer.json")


def test_of_two_machines_one_gets_the_lock(place: str) -> None:
    """The conditional write itself: on this machine the file lock would have decided already."""
    files = storage(place)
    files.lock_file()
    assert files.create("writer.json", b"first") and not files.create("writer.json", b"second")
    assert files.read("writer.json") == b"first"


def test_who_was_replaced_writes_no_more(place: str) -> None:
    recorder = Recorder(place)
    recorder.rollouts(0, ROWS)
    recorder.flush()
    files = storage(place)
    files.delete("writer.json")  # as the message tells a user of another machine to do, in error
    recorder.rollouts(1, ROWS)
    recorder.flush()
    assert json.loads(files.read("writer.json"))["pid"] == os.getpid()
    files.delete("writer.json")
    owner = {"pid": 7, "host": "elsewhere", "since": "2026-01-01T00:00:00+00:00", "command": "cavesson"}
    assert files.create("writer.json", json.dumps(owner).encode())
    recorder.rollouts(2, ROWS)
    with pytest.raises(UserError, match=r"is now written by process 7 on elsewhere .*: this process stops"):
        recorder.close()
    assert cavesson.open(place).rows(["step"])["step"].to_pylist() == [0, 1]
    assert json.loads(files.read("writer.json"))["host"] == "elsewhere"


def test_within_a_process_the_latest_recorder_counts(place: str) -> None:
    abandoned = Recorder(place)
    abandoned.rollouts(0, ROWS)
    abandoned.flush()
    with Recorder(place) as recorder:
        recorder.rollouts(1, ROWS)
        abandoned.rollouts(2, ROWS)
        with pytest.raises(UserError, match="recorded by another recorder of this process"):
            abandoned.close()
    assert cavesson.open(place).rows(["step"])["step"].to_pylist() == [0, 1]
    assert not storage(place).exists("writer.json")


def test_heartbeats_of_the_earlier_recorder_do_not_take_the_run_back(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A heartbeat that has begun, and written nothing yet, when the next lock is taken."""
    earlier = Lock(place)
    begun, go_on = Event(), Event()
    owner_of = lock._owner

    def slow_owner(files: Storage) -> dict[str, Any] | None:
        owner = owner_of(files)
        if current_thread().name == "heartbeat" and not begun.is_set():
            begun.set()
            go_on.wait(60)
        return owner

    monkeypatch.setattr(lock, "_owner", slow_owner)
    earlier.keep_alive()
    assert begun.wait(60)
    Timer(1.0, go_on.set).start()
    with Lock(place) as later:
        go_on.wait(60)
        earlier.release()  # which waits until the heartbeat has ended
        later.check()


def test_a_storage_that_fails_at_the_end_keeps_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Lock(tmp_path / "run")

    def fail(folder: Folder, name: str) -> None:
        raise ConnectionError(name)

    with monkeypatch.context() as broken:
        broken.setattr(Folder, "delete", fail)
        with pytest.raises(ConnectionError):
            held.release()
    Other(tmp_path / "run").end()


def test_a_storage_that_fails_in_the_middle_does_not_leave_a_lock_that_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = Lock(tmp_path / "run")

    def fail(folder: Folder, name: str, content: bytes) -> bool:
        raise ConnectionError(name)

    with monkeypatch.context() as broken:
        broken.setattr(Folder, "create", fail)
        with pytest.raises(ConnectionError):
            Lock(tmp_path / "run")
    other = Other(tmp_path / "run")
    with pytest.raises(LockedError, match=f"process {other.process.pid} "):
        Lock(tmp_path / "run")
    with pytest.raises(UserError):
        earlier.check()
    other.end()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EACCES])
def test_what_cannot_be_locked_is_said_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(FileLock, "acquire", fail)
    with pytest.raises(UserError) as raised:
        Lock(tmp_path / "run")
    file, run = tmp_path / "run" / ".lock", tmp_path / "run"
    why = f"so a second process could write to {run}: {os.strerror(number)}"
    assert str(raised.value) == f"{file} cannot be locked, {why}"


HOLDS = """
import sys
from cavesson.record import Lock
lock = Lock(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
lock.check()
"""


def test_a_new_folder_does_not_take_the_place_of_a_run_that_is_about_to_begin(tmp_path: Path) -> None:
    """Such a run has nothing in its folder yet but its lock, and would write its first file next."""
    begins = Other(tmp_path / "run", HOLDS + "from cavesson.record import write_run\nwrite_run(sys.argv[1], {})")
    with pytest.raises(LockedError, match=f"process {begins.process.pid} "), new_folder(tmp_path / "run") as folder:
        (folder / "run.json").write_text('{"imported": true}')
    begins.end()
    assert cavesson.open(tmp_path / "run").info == {}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_new_folder_takes_the_place_of_one_that_a_killed_process_left(tmp_path: Path) -> None:
    Other(tmp_path / "run", HOLDS).kill()
    with new_folder(tmp_path / "run") as folder:
        (folder / "run.json").write_text("{}")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["run", "run.json"]
    with Lock(tmp_path / "run"):
        pass


def test_a_recorder_that_is_never_closed_lets_go_at_the_end_of_its_process(tmp_path: Path) -> None:
    Other(tmp_path / "run").end()
    assert not (tmp_path / "run" / "writer.json").exists()


FORKS = RECORDS.replace("print(", "import os\nif os.fork() == 0:\n    time.sleep(60)\n    os._exit(0)\nprint(", 1)


def test_a_child_that_outlives_a_killed_writer_holds_nothing(tmp_path: Path) -> None:
    code = FORKS.replace("time.sleep(60)", "sys.stdout.close(); sys.stdin.close(); os.close(1); time.sleep(20)")
    other = Other(tmp_path / "run", code)
    other.kill()
    with Lock(tmp_path / "run"):
        pass


@pytest.mark.parametrize("gone", ["", "record"])
def test_a_folder_that_was_deleted_is_noticed_at_the_next_step(tmp_path: Path, gone: str) -> None:
    recorder = Recorder(tmp_path / "run")
    recorder.rollouts(0, ROWS)
    recorder.flush()
    shutil.rmtree(tmp_path / "run" / gone)
    recorder.rollouts(1, ROWS)
    with pytest.raises(UserError, match=f"{tmp_path / 'run' / gone} was deleted or moved while it was being written"):
        recorder.flush()
    with pytest.raises(UserError):
        recorder.rollouts(2, ROWS)
    assert not (tmp_path / "run" / "record").exists()
    with pytest.raises(UserError):
        recorder.close()
