"""A run's model reaches a Hub: a real server that speaks the few requests a push makes."""

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cavesson.errors import UserError
from cavesson.exporters.hub import prepare
from cavesson.record import Recorder, begin_attempt, write_run

CONFIG: dict[str, Any] = {
    "run": "/home/me/secret/run", "model": {"path": "owner/base", "lora": None}, "kl": {"coef": 0.05, "target": None},
    "data": {"path": "/home/me/secret/prompts.jsonl", "mix": []},
    "rewards": [{"use": "/home/me/secret/mine.py:polite", "weight": 1.0}],
}  # fmt: skip


class Hub(ThreadingHTTPServer):
    """Keeps what was created and committed.

    Args:
        refuses: part of the address that is answered with `status` instead.
        status: of that answer; its reason is "no room left".
        mode: how it wants `model.safetensors`; the other files are regular ones.
    """

    def __init__(self, refuses: str = "nothing", status: int = 200, mode: str = "regular") -> None:
        self.refuses, self.status, self.mode = refuses, status, mode
        super().__init__(("127.0.0.1", 0), _Answers)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.tokens: set[str | None] = set()


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.tokens.add(self.headers["authorization"])
        if self._refuse():
            return
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self._answer({"url": f"{self.server.url}/owner/mine"})
        elif self.path == "/api/models/owner/mine/preupload/main":
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = [self.server.mode if name == "model.safetensors" else "regular" for name in names]
            files = [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in zip(names, modes, strict=True)]
            self._answer({"files": files})
        elif self.path.endswith("objects/batch"):
            error = {"code": 403, "message": "no room left"}
            self._answer({"objects": [one | {"error": error} for one in json.loads(body)["objects"]]})
        elif self.path.startswith("/api/models/owner/mine/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._answer(
                {"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.server.url}/owner/mine/commit/0"}
            )
        else:
            self._answer({"warnings": [], "errors": []})

    def do_GET(self) -> None:
        if not self._refuse():
            self._answer({"id": "owner/mine", "sha": "0" * 40, "siblings": []})

    def _refuse(self) -> bool:
        if self.server.refuses not in self.path:
            return False
        self._answer({"error": "no room left"}, self.server.status)
        return True

    def _answer(self, content: Any, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Page(_Answers):
    """What a network asks to log in with, whatever was wanted."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<html>welcome to the train</html>")


@contextmanager
def serve(server: ThreadingHTTPServer) -> Iterator[str]:
    """The address of a server while it serves."""
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    with serve(server):
        yield server


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    write_run(
        folder, {"algorithm": "grpo", "cavesson": "9.9", "config": CONFIG, "steps": 2, "versions": {"torch": "2.x"}}
    )
    with Recorder(folder, attempt=begin_attempt(folder, 0)) as recorder:
        recorder.metrics(0, {"reward/mean": 0.25})
        recorder.metrics(1, {"reward/mean": 0.75})
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"a": 1}')
    (folder / "model" / "model.safetensors").write_bytes(bytes(range(256)) * 9)
    (folder / "model" / "README.md").write_text("a card of somebody else")
    return folder


def push(
    run: Path, endpoint: str, *flags: str, name: str = "owner/mine", **changes: str
) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    environment |= {"HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-m", "cavesson", "push-to-hub", str(run), name, *flags]
    return subprocess.run(command, env=environment | changes, capture_output=True, text=True, timeout=120)


def test_the_model_arrives_with_a_card(run: Path, hub: Hub) -> None:
    done = push(run, hub.url)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"pushed   {hub.url}/owner/mine/commit/0\n"
    assert hub.created[0]["name"] == "mine" and hub.created[0]["organization"] == "owner"
    assert hub.created[0]["visibility"] == "private"
    assert hub.tokens == {"Bearer hf_test"}
    card = hub.files.pop("README.md").decode()
    assert hub.files == {name: (run / "model" / name).read_bytes() for name in ("config.json", "model.safetensors")}
    front = card.split("---\n")[1]
    assert 'base_model: "owner/base"' in front and '"grpo"' in front and 'library_name: "transformers"' in front
    for line in (
        "| reward/mean | 0.25 | 0.75 |",
        "| data | prompts.jsonl |",
        "| kl.coef | 0.05 |",
        "| rewards | mine.py:polite |",
    ):
        assert line in card
    assert "secret" not in card and "somebody else" not in card


def test_a_dry_run_sends_nothing(run: Path, hub: Hub) -> None:
    done = push(run, hub.url, "--dry-run")
    assert done.returncode == 0 and hub.created == [] and hub.files == {}
    assert "2,304 bytes  model.safetensors" in done.stdout and "| reward/mean | 0.25 | 0.75 |" in done.stdout


def test_what_cannot_be_pushed_is_said(run: Path) -> None:
    (run / "model").rename(run / "elsewhere")
    done = push(run, "http://127.0.0.1:9")
    assert done.returncode == 2 and "has no trained model" in done.stderr


def test_a_card_names_a_starting_model_only_if_there_was_one(run: Path) -> None:
    """The settings still have the path's default, which training did not use."""
    info = json.loads((run / "run.json").read_text())
    for change, words in (
        ({"config": CONFIG | {"model": {"path": "tiny", "new": {"layers": 2}}}}, "random weights trained by grpo"),
        (
            {"config": CONFIG | {"model": {"path": "tiny"}}, "model": {"name": "a model of mine"}},
            "a model of mine trained",
        ),
    ):
        (run / "run.json").write_text(json.dumps(info | change))
        card = prepare(run, "owner/mine").card
        assert words in card
        assert "base_model" not in card and "tiny" not in card and "model.path" not in card


def test_what_a_users_own_loop_has_trained_is_refused_with_a_way_out(tmp_path: Path) -> None:
    write_run(tmp_path, {"config": {"learning_rate": 1e-5}})
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match=f"not trained by Cavesson.*hf upload owner/mine {tmp_path}/model"):
        prepare(tmp_path, "owner/mine")


REFUSED = "cavesson: owner/mine cannot be pushed: the Hub answered "


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("refuses", "status", "line"),
    [
        ("/api/", 401, f"{REFUSED}401: no room left; log in with: hf auth login"),
        ("/api/", 402, f"{REFUSED}402: no room left"),
        ("/api/", 403, f"{REFUSED}403: no room left"),
        ("repos/create", 404, f"{REFUSED}404: no room left"),
        ("repos/create", 429, f"{REFUSED}429: no room left"),
        ("preupload", 404, f"{REFUSED}404: no room left"),
        ("commit", 400, f"{REFUSED}400: no room left"),
        ("commit", 403, f"{REFUSED}403: no room left"),
        ("commit", 413, f"{REFUSED}413: no room left"),
    ],
)
def test_a_refusal_is_one_line(run: Path, refuses: str, status: int, line: str) -> None:
    with serve(Hub(refuses, status)) as url:
        done = push(run, url)
    assert (done.returncode, done.stderr) == (2, f"{line}\n")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({}, "the connection to URL failed: Network error: Request error: HTTP status client error (403 Forbidden), "),
        ({"HF_HUB_DISABLE_XET": "1"}, "LFS batch API returned errors: Encountered error for file with OID "),
    ],
    ids=["xet", "lfs"],
)
def test_a_large_file_without_room_is_one_line(run: Path, environment: dict[str, str], line: str) -> None:
    with serve(Hub("xet-write-token", 403, mode="lfs")) as url:
        done = push(run, url, HF_HUB_DISABLE_PROGRESS_BARS="1", **environment)
    expected = f"cavesson: owner/mine cannot be pushed: {line.replace('URL', url)}"
    assert done.returncode == 2 and done.stderr.startswith(expected), done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("endpoint", "environment", "line"),
    [
        ("http://127.0.0.1:9", {}, "the connection to http://127.0.0.1:9 failed: [Errno 111] Connection refused"),
        ("http://hub.invalid", {}, "the connection to http://hub.invalid failed: "),
        ("http://127.0.0.1:9", {"HF_HUB_OFFLINE": "1"}, "the connection to http://127.0.0.1:9 failed: Cannot reach "),
    ],
    ids=["nobody", "no-name", "offline"],
)
def test_no_connection_is_one_line(run: Path, endpoint: str, environment: dict[str, str], line: str) -> None:
    done = push(run, endpoint, **environment)
    assert done.returncode == 2 and done.stderr.startswith(f"cavesson: owner/mine cannot be pushed: {line}")
    assert done.stderr.count("\n") == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["a/b/c", "owner/mi--ne", "owner/no name"])
def test_a_name_that_is_none_is_one_line_and_asks_nobody(run: Path, hub: Hub, name: str) -> None:
    done = push(run, hub.url, name=name)
    assert done.returncode == 2 and done.stderr.startswith(f"cavesson: {name!r} cannot be a name on the Hub: ")
    assert done.stderr.count("\n") == 1 and hub.tokens == set()


def test_a_page_instead_of_a_hub_is_one_line(run: Path) -> None:
    with serve(ThreadingHTTPServer(("127.0.0.1", 0), _Page)) as url:
        done = push(run, url)
    expected = f"cavesson: owner/mine cannot be pushed: the server at {url} is not a Hub\n"
    assert (done.returncode, done.stderr) == (2, expected)


@pytest.mark.parametrize("name", ["notes.txt", "folder"])
def test_links_of_the_model_do_not_lead_to_other_files(run: Path, hub: Hub, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "key").write_text("a private key")
    (run / "model" / name).symlink_to(outside if name == "folder" else outside / "key")
    done = push(run, hub.url)
    assert done.returncode == 2 and "is a link that leads out of" in done.stderr and done.stderr.count("\n") == 1
    assert hub.created == [] and hub.files == {}
