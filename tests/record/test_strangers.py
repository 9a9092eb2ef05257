"""Run folders that a stranger has made: opening them runs no code, sends no request, and reads and writes nothing else.

A server on this machine counts the requests; a file outside the run must be neither shown nor changed.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from record_helpers import rollouts

import cavesson
from cavesson.errors import UserError
from cavesson.object_storage import SCHEMES, checked_url
from cavesson.record import Recorder, compact, write_run, write_vocabulary
from cavesson.record.read.query import query
from cavesson.record.storage import Folder, storage

SECRET = "what is outside"


class Counter(ThreadingHTTPServer):
    def __init__(self) -> None:
        self.requests = 0
        super().__init__(("127.0.0.1", 0), _Counting)
        self.place = f"127.0.0.1:{self.server_port}"


class _Counting(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Counter)
        self.server.requests += 1
        self.send_error(404)

    do_HEAD = do_PUT = do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Counter]:
    counter = Counter()
    thread = threading.Thread(target=counter.serve_forever)
    thread.start()
    yield counter
    counter.shutdown()
    thread.join()
    counter.server_close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    write_vocabulary(folder, ["a"], ["a"])
    with Recorder(folder) as recorder:
        for step in range(3):
            rows, tokens = rollouts(2, 1)
            recorder.rollouts(step, rows, {"mask": tokens["mask"], "token_id": tokens["mask"] * 0})
            recorder.metrics(step, {"reward/mean": 0.5})
    return folder


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    file = tmp_path / "outside.txt"
    file.write_text(SECRET)
    return file


def cli(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cavesson", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | environment)


PLACES = (
    "http://SERVER/run", "https://SERVER/run", "file:///etc", "local:///etc", "ftp://SERVER/run", "github://a:b@/x",
    "reference://::http://SERVER/reference.json", "simplecache::http://SERVER/run", "simplecache::s3://bucket/run",
    "zip://*::http://SERVER/run.zip", "s3://bucket/run::http://SERVER/x", "filecache://x::file:///etc", "hf://a/b",
    "memory://run", "webhdfs://SERVER/run", "sftp://SERVER/run", "S3://bucket/run", "s3://u:pw@bucket/run",
    "s3://bucket/run?versionId=1", "/etc", "../outside", "s3:/bucket", "dask://SERVER/x", "jupyter://SERVER/?token=x",
)  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("allowed", [False, True])
def test_a_record_elsewhere_is_only_in_object_storage(run: Path, server: Counter, place: str, allowed: bool) -> None:
    named = place.replace("SERVER", server.place)
    write_run(run, {"record": named})
    raw = json.dumps({"record": named})  # as a stranger writes it
    (run / "run.json").write_text(raw)
    with pytest.raises(UserError, match=r"run\.json: record: ") as raised:
        cavesson.open(run, allow_remote=allowed)
    assert server.requests == 0 and "\n" not in str(raised.value)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("place", [one for one in PLACES if "://" in one])
def test_the_command_line_names_object_storage_only(server: Counter, place: str) -> None:
    with pytest.raises(UserError, match=r"is not a place in object storage|has a password or a port"):
        storage(place.replace("SERVER", server.place))
    assert server.requests == 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_object_stores_that_the_docs_name_are_places(scheme: str) -> None:
    assert checked_url(f"{scheme}://bucket/some/run=1/") == f"{scheme}://bucket/some/run=1"


def test_object_storage_is_asked_only_if_the_user_allows_it(run: Path, server: Counter) -> None:
    write_run(run, {"record": "s3://bucket/run"})
    keys = {"AWS_ENDPOINT_URL": f"http://{server.place}", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    quick = {**keys, "AWS_MAX_ATTEMPTS": "1", "AWS_DEFAULT_REGION": "us-east-1"}
    done = cli("show", run, **quick)
    assert (done.returncode, done.stdout, server.requests) == (2, "", 0)
    assert (
        done.stderr.startswith(f"cavesson: the record of {run} is at s3://bucket/run; ")
        and done.stderr.count("\n") == 1
    )
    assert "--allow-remote" in done.stderr
    done = cli("show", run, "--allow-remote", **quick)
    assert done.returncode == 2 and server.requests > 0


COMMANDS = {
    "show": ["show", "RUN"],
    "sql": ["sql", "RUN", "select * from rows"],
    "export": ["export", "RUN", "OUT"],
    "doctor": ["doctor", "RUN"],
    "compact": ["compact", "RUN"],
    "push": ["push-to-hub", "RUN", "a/b", "--dry-run"],
    "board": ["board", "RUN", "--no-browser", "--port", "0"],
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_follows_a_run_to_another_place(run: Path, server: Counter, tmp_path: Path, command: str) -> None:
    marker = tmp_path / "marker"
    template = "{{ cycler.__init__.__globals__.os.popen('touch " + str(marker) + "').read() }}"
    reference = tmp_path / "reference.json"
    reference.write_text(json.dumps({"version": 1, "templates": {"u": template}, "refs": {"run.json": ["{{u}}"]}}))
    for place in (f"reference://::file://{reference}", f"http://{server.place}/run", f"file://{tmp_path}"):
        (run / "run.json").write_text(json.dumps({"record": place}))
        words = {"RUN": run, "OUT": tmp_path / "out"}
        done = cli(*(words.get(word, word) for word in COMMANDS[command]))
        assert done.returncode == 2 and "is not a place in object storage" in done.stderr, done
        assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1
    assert server.requests == 0 and not marker.exists() and not (tmp_path / "out").exists()


def put_link(place: Path, target: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        place.rename(place.with_name(f"{place.name}.away"))
    else:
        place.unlink(missing_ok=True)
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(target)


LINKS = (
    "run.json",
    "record",
    "attempts",
    "attempts/0000.json",
    "compactions",
    "compactions/a.json",
    "vocabulary.parquet",
)


@pytest.mark.parametrize("name", LINKS)
def test_links_do_not_lead_out_of_a_run(run: Path, outside: Path, name: str) -> None:
    target = outside.parent if name in ("record", "attempts", "compactions") else outside
    put_link(run / name, target)
    with pytest.raises(UserError, match="is a link that leads out of") as raised:
        opened = cavesson.open(run)
        opened.rows()
        opened.token_texts([0])
    assert str(run / name) in str(raised.value) and SECRET not in str(raised.value)
    assert outside.read_text() == SECRET


@pytest.mark.parametrize("kind", ["rows", "tokens", "steps"])
def test_links_in_the_record_do_not_lead_out(run: Path, tmp_path: Path, kind: str) -> None:
    (found,) = list(run.glob(f"record/{kind}-*.parquet"))[:1]
    found.rename(tmp_path / "other.parquet")
    found.symlink_to(tmp_path / "other.parquet")
    with pytest.raises(UserError, match="leads out of"):
        cavesson.open(run).arrow(kind)
    with pytest.raises(UserError, match="leads out of"):
        query(cavesson.open(run), f"select * from {kind}", seconds=60)


def test_a_link_within_a_run_and_one_to_a_run_are_followed(run: Path, tmp_path: Path) -> None:
    (run / "record").rename(run / "files")
    (run / "record").symlink_to("files")
    (tmp_path / "link").symlink_to(run)
    assert cavesson.open(tmp_path / "link").rows().num_rows == 6


@pytest.mark.parametrize(
    "name", [".lock", "writer.json", "record/.journal-0001-0000", "record/rows-00000009-0001-0000.parquet"]
)
def test_nothing_is_written_through_a_link(run: Path, outside: Path, name: str) -> None:
    put_link(run / name, outside)
    with pytest.raises(UserError, match="leads out of"), Recorder(run) as recorder:
        rows, tokens = rollouts(2, 1)
        recorder.rollouts(9, rows, {"mask": tokens["mask"], "token_id": tokens["mask"] * 0})
        recorder.flush()
        compact(run)
    assert outside.read_text() == SECRET


@pytest.mark.parametrize("name", ["run.json", "attempts/0000.json", "vocabulary.parquet", ".lock"])
def test_a_pipe_in_place_of_a_file_does_not_hang(run: Path, name: str) -> None:
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    with pytest.raises(UserError, match="is neither a file nor a folder"):
        opened = cavesson.open(run)
        opened.rows()
        opened.token_texts([0])
        Folder(run).lock_file()


def test_a_link_to_a_device_does_not_hang(run: Path) -> None:
    put_link(run / "run.json", Path("/dev/zero"))
    with pytest.raises(UserError, match="leads out of"):
        cavesson.open(run)


INJECTION = "0 UNION ALL BY NAME SELECT content AS prompt FROM read_text('OUTSIDE')"


@pytest.mark.parametrize(
    "changed",
    [
        {"stop": INJECTION, "last": INJECTION, "first": ""},
        {"stem": "../../outside"},
        {"stem": "x/../../../outside"},
        {"stop": 2.5},
        {"attempt": None},
    ],
)
def test_a_manifest_with_other_types_is_refused(run: Path, outside: Path, changed: dict[str, object]) -> None:
    compact(run)
    (manifest,) = run.glob("compactions/*.json")
    content = json.loads(manifest.read_text().replace("OUTSIDE", str(outside)))
    for segment in content["rows"]:
        segment.update(changed)
    manifest.write_text(json.dumps(content).replace("OUTSIDE", str(outside)))
    with pytest.raises(UserError, match="does not say what was merged"):
        query(cavesson.open(run), "select * from rows", seconds=60)


def test_a_name_with_dots_stays_in_the_folder(run: Path) -> None:
    with pytest.raises(UserError, match="which is outside of it"):
        Folder(run).read("record/../../outside.txt")
