"""A run whose record is in object storage, a real S3-compatible server, behind a proxy that fails."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from account_helpers import account
from several_helpers import command, together
from train_helpers import PROMPTS, WATCHED, everything, finish, quiet, settings, tiny_flags, uneven
from unreliable_proxy import WAYS, Unreliable, unreliable

import cavesson
from cavesson.algorithms.runs import RolloutRun
from cavesson.errors import StoppedError, UserError
from cavesson.record import LockedError, Recorder
from cavesson.record.maintain.compaction import compact
from cavesson.record.storage import storage
from cavesson.rollout.rewards.table import Reward
from cavesson.train.checkpoint import latest
from cavesson.train.doctor import verdict
from cavesson.train.run import Training

BASE: dict[str, Any] = {"steps": 4, "checkpoint__every": 3, "sampling__random_length": (1, 5)}
UNRECORDED = "unrecorded"


@pytest.fixture
def bucket(object_storage: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Unreliable]:
    """A proxy before the server, at which all file systems of the test ask."""
    import s3fs

    with unreliable(os.environ["AWS_ENDPOINT_URL"]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        s3fs.S3FileSystem.clear_instance_cache()
        yield proxy
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same run with its record in its folder."""
    folder = tmp_path_factory.mktemp("local") / "run"
    finish(folder, **BASE)
    return everything(folder)


def place(name: str) -> str:
    return f"s3://bucket/{name}"


def begin(folder: Path, rewards: Any = uneven, resume: bool = False, **changes: Any) -> Training:
    record = changes.pop("record", place(folder.parent.name))
    made = settings(folder, **{**BASE, "record": record, **changes})
    # The reward that counts requests is another function than the one of the whole run.
    return Training(made, prompts=PROMPTS, rewards=rewards, resume=resume, accept_changes=resume)


@pytest.mark.slow
def test_every_tenth_request_fails_and_nothing_is_lost(
    bucket: Unreliable, local: dict[str, Any], tmp_path: Path
) -> None:
    bucket.every = 10
    begin(tmp_path / "run").run(quiet)
    bucket.every = 0
    assert set(bucket.failed) == set(WAYS) and len(bucket.failed) > 4
    assert everything(tmp_path / "run") == local
    account(tmp_path / "run", PROMPTS, 4)
    assert not (tmp_path / "run" / UNRECORDED).exists() and not (tmp_path / "run" / "record").exists()


@pytest.mark.slow
@pytest.mark.parametrize("fails", [1, 2, 4], ids=["in the first step", "in the middle", "in the last step"])
def test_a_store_that_is_gone_ends_the_run_which_resumes(
    bucket: Unreliable, local: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    calls = [0]

    def reward(prompts: list[str], responses: list[str], **_: Any) -> list[float]:
        calls[0] += 1
        bucket.down = calls[0] >= 1 + fails  # after the trial
        return uneven(prompts, responses)

    with pytest.raises(StoppedError) as stopped:
        begin(tmp_path / "run", [Reward("uneven", reward)]).run(quiet)
    said = str(stopped.value).splitlines()
    assert f"{place(tmp_path.name)} cannot be reached: " in said[0] and len(said) == 2
    assert said[1].endswith(f"resume the run to upload the rest of the record, {tmp_path / 'run' / UNRECORDED}")
    assert "--resume" in stopped.value.__notes__[0] or "resume=True" in stopped.value.__notes__[0]
    done = latest(tmp_path / "run")
    assert done is not None and fails <= done.step <= 4
    with pytest.raises(UserError, match=f"{place(tmp_path.name)} cannot be reached"):
        begin(tmp_path / "run", resume=True)
    bucket.down = False
    compact(place(tmp_path.name))
    begin(tmp_path / "run", resume=True).run(quiet)
    assert everything(tmp_path / "run") == local
    account(tmp_path / "run", PROMPTS, 4)
    assert not (tmp_path / "run" / UNRECORDED).exists()


def stored(server: str, proxy: str, *arguments: str) -> None:
    """A command, as work for `together`; the first process asks the server itself, all others the proxy."""
    known = {"AWS_ENDPOINT_URL": server if os.environ["RANK"] == "0" else proxy, "AWS_MAX_ATTEMPTS": "1"}
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ.update(known | keys)
    command(*arguments)


@pytest.mark.slow
def test_all_processes_end_if_one_cannot_reach_the_store_and_resume_as_one(bucket: Unreliable, tmp_path: Path) -> None:
    flags = tiny_flags("ppo", tmp_path / "run", record=place(tmp_path.name), steps=6, checkpoint__every=4)
    server = bucket.server.geturl()
    bucket.lasts = 25
    ended = together(tmp_path, 2, stored, server, bucket.url, "ppo", *flags)
    assert [one.code for one in ended] == [3, 3], ended
    lines = [line for line in ended[0].err.splitlines() if line.startswith("cavesson: ")]
    assert len(lines) == 1 and f"steps: {place(tmp_path.name)} cannot be reached: " in lines[0], ended[0].err
    assert "Traceback" not in ended[0].err + ended[1].err and (tmp_path / "run" / UNRECORDED).exists()
    bucket.lasts, bucket.down = None, False
    assert together(tmp_path, 1, stored, server, bucket.url, "ppo", "--resume", "run")[0].code == 0
    account(place(tmp_path.name), PROMPTS, 6)


@pytest.mark.slow
def test_the_doctor_reads_the_record_where_it_is(bucket: Unreliable, tmp_path: Path) -> None:
    made = begin(tmp_path / "run", **{**WATCHED, "steps": 3})
    made.run(quiet)
    assert isinstance(made.settings, RolloutRun)
    assert any("filtered" in line for line in verdict(made.settings.doctor, tmp_path / "run"))
    assert not (tmp_path / "run" / "index").exists()  # it belongs to the record


@pytest.mark.slow
def test_folder_and_url_show_the_same_run(bucket: Unreliable, tmp_path: Path) -> None:
    begin(tmp_path / "run", steps=2).run(quiet)
    url = place(tmp_path.name)
    with pytest.raises(UserError, match=f"is at {url}; if you trust the run, read it with --allow-remote"):
        cavesson.open(tmp_path / "run")
    one, other = cavesson.open(tmp_path / "run", allow_remote=True), cavesson.open(url)
    assert one.folder == other.folder == url and one.info == other.info and "record" not in one.info
    assert one.rows() == other.rows() and one.vocabulary.num_rows == 258
    account(url, PROMPTS, 2)
    held = f"from cavesson.record import Lock; lock = Lock({url!r}); print('held', flush=True); input()"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", held], **pipes) as other_process:
        assert other_process.stdout is not None and other_process.stdout.readline() == "held\n"
        with pytest.raises(LockedError, match=f"{url} is being written by process {other_process.pid}"):
            begin(tmp_path / "run", resume=True, steps=3)
        other_process.communicate("\n")
    begin(tmp_path / "run", resume=True, steps=3).run(quiet)
    account(tmp_path / "run", PROMPTS, 3)
    assert cavesson.open(url).info["steps"] == 3
    with pytest.raises(UserError, match=r"cannot resume with .*s3://bucket/other"):
        begin(tmp_path / "run", resume=True, record="s3://bucket/other")


def test_a_run_that_fails_at_once_leaves_nothing(bucket: Unreliable, tmp_path: Path) -> None:
    def broken(prompts: list[str], responses: list[str], **_: Any) -> list[float]:
        calls.append(0)
        return [1.0] * len(responses) if len(calls) == 1 else [float("nan")]

    calls: list[int] = []
    with pytest.raises(UserError):
        begin(tmp_path / "run", broken).run(quiet)
    files = storage(place(tmp_path.name))
    assert not (tmp_path / "run").exists()
    assert files.names("") == files.names("record") == files.names("attempts") == []
    begin(tmp_path / "run", steps=1).run(quiet)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ("s3://nobucket/run", "s3://nobucket/run cannot be reached: .*bucket does not exist"),
        ("abfs://x/y", "abfs://x/y cannot be reached: .*adlfs"),
    ],
)
def test_a_place_that_cannot_be_written_is_one_line_before_anything_is_loaded(
    bucket: Unreliable, tmp_path: Path, record: str, said: str
) -> None:
    with pytest.raises(UserError, match=said) as raised:
        begin(tmp_path / "run", record=record, model__path="no/such/model")
    assert len(str(raised.value).splitlines()) == 1 and not (tmp_path / "run").exists()


def test_a_place_with_a_run_is_refused(bucket: Unreliable, tmp_path: Path) -> None:
    with Recorder(place(tmp_path.name)) as recorder:
        recorder.metrics(0, {"a": 1.0})
    with pytest.raises(UserError, match=r"already contains the record of a run; choose another place with --record"):
        begin(tmp_path / "run", model__path="no/such/model")


def test_without_the_package_the_line_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.registry import _registry

    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(_registry, "s3", raising=False)
    with pytest.raises(UserError, match=r"s3://bucket/run cannot be reached: .*; try pip install 'cavesson\[s3\]'"):
        begin(tmp_path / "run", record="s3://bucket/run", model__path="no/such/model")


@pytest.mark.parametrize(
    "url",
    ["runs/record", "ftp://user:secret@host/run", "s3://", "nothing://x/y", "file:///tmp/x", "s3://key:secret@b/x"],
)
def test_what_is_no_place_for_a_record(tmp_path: Path, url: str) -> None:
    with pytest.raises(ValueError, match="record"):
        settings(tmp_path / "run", record=url)
