"""The doctor looks at a growing run in separate processes, now and then."""

import os
import subprocess
import sys
import time

import psutil
import pytest
from doctor_helpers import healthy

from cavesson.doctor.watch import Watch
from cavesson.findings.stored import Findings, findings_file, read_findings, write_findings


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return healthy(steps=6).write(tmp_path_factory.mktemp("watch") / "run")


@pytest.fixture
def file(tmp_path):
    return findings_file(tmp_path)


def ended(watch, state):
    for _ in range(600):
        if watch.poll(state):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_it_looks_once_at_each_state_of_the_record(run, file):
    watch = Watch(str(run), file, share=1.0)
    assert ended(watch, "one")
    first = file.stat().st_mtime_ns
    assert read_findings(file).findings.keys() == {"en", "zh", "vi"}
    time.sleep(2 * (watch._next - time.time()) if watch._next > time.time() else 0)
    assert not watch.poll("one") and watch._process is None
    assert ended(watch, "two")
    assert file.stat().st_mtime_ns > first


@pytest.mark.slow
def test_it_rests_a_hundred_times_as_long_as_it_looked(run, file):
    watch = Watch(str(run), file)
    began = time.time()
    assert watch.look("one")
    took = time.time() - began
    assert 0.5 * took < (watch._next - time.time()) / 100 < 1.1 * took
    watch.poll("two")
    assert watch._process is None


def known(file, seconds, ago):
    write_findings(file, Findings(run="", version="", seconds=seconds, last_step=0, findings={}))
    os.utime(file, (time.time() - ago,) * 2)


@pytest.mark.parametrize(("ago", "looks"), [(190, False), (210, True)])
def test_the_last_look_of_another_watch_counts(run, file, ago, looks):
    known(file, 2.0, ago)
    watch = Watch(str(run), file)
    watch.poll("one")
    assert (watch._process is not None) == looks
    if watch._process:
        watch._process.kill()
        watch._process.wait()


def test_what_is_known_already_is_not_looked_at_again(run, file):
    watch = Watch(str(run), file, share=1.0)
    assert watch.look("one")
    again = Watch(str(run), file)
    again._next = 0
    again.poll("one")
    assert again._process is None


def test_a_first_look_can_be_put_off(run, file):
    watch = Watch(str(run), file, after=50)
    watch.poll("one")
    assert watch._process is None and 49 < watch._next - time.time() <= 50


@pytest.mark.slow
def test_a_look_waits_for_one_that_is_under_way(run, file, monkeypatch):
    watch = Watch(str(run), file, share=1.0)
    watch.poll("one")
    first, start, ended = watch._process, watch._start, []
    monkeypatch.setattr(watch, "_start", lambda version: ended.append(first.poll()) or start(version))
    assert watch.look("two")
    assert ended == [0] and watch._process is None


def test_a_look_that_fails_is_told_and_not_tried_again_on_the_same_record(tmp_path, file, capfd):
    watch = Watch(str(tmp_path / "nothing"), file, share=1.0)
    assert not watch.look("one")
    assert "nothing" in capfd.readouterr().err
    watch._next = 0
    watch.poll("one")
    assert watch._process is None
    assert not file.exists()


def test_a_run_that_was_removed_meanwhile_stays_removed(run, tmp_path):
    watch = Watch(str(run), tmp_path / "index" / "findings.json")
    assert watch.look("one")
    assert not (tmp_path / "index").exists()


def is_running(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for yet has."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_a_look_ends_with_the_process_that_asked_for_it(run, file):
    code = "import sys; from cavesson.doctor.watch import Watch; from pathlib import Path\n"
    code += f"w = Watch({str(run)!r}, Path({str(file)!r})); w.poll('one'); print(w._process.pid)"
    started = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    deadline = time.monotonic() + 60
    while is_running(int(started.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not file.exists()
    assert started.stderr == ""
