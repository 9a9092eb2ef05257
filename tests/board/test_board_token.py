"""The board's token: every board has one, unless the user wants none."""

import os
import signal
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.cookiejar import CookieJar
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
from index_helpers import new_run, record

from cavesson.board.serve import _page_that_leads_to


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = new_run(tmp_path_factory.mktemp("token") / "run")
    record(folder, [0])
    return folder


@contextmanager
def board(run: Path, *flags: str, **environment: str) -> Iterator[str]:
    """Run `cavesson board`, and yield the address that it prints."""
    command = [sys.executable, "-m", "cavesson", "board", str(run), "--port", "0", "--no-browser", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.send_signal(signal.SIGINT)


def status(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_board_on_this_machine_has_a_token(run: Path) -> None:
    with board(run) as address:
        base, (name, _, token) = address.partition("?")[0], urlsplit(address).query.partition("=")
        assert name == "token" and len(token) >= 32
        runs = f"{base}api/runs"
        assert [status(base), status(runs), status(f"{runs}?token=wrong")] == [401, 401, 401]
        assert status(runs, Authorization=f"Bearer {token}") == 200
        assert status(runs, Authorization="Bearer wrong") == 401
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        with opener.open(address, timeout=60) as page:
            assert "token" not in page.geturl()
        with opener.open(runs, timeout=60) as answer:
            assert answer.status == 200


def test_the_token_can_come_from_the_environment(run: Path) -> None:
    with board(run, CAVESSON_BOARD_TOKEN="mine") as address:
        assert address.endswith("/?token=mine")
        assert status(f"{address.partition('?')[0]}api/runs", Authorization="Bearer mine") == 200


def test_without_a_token_every_user_of_the_machine_reads(run: Path) -> None:
    with board(run, "--no-token") as address:
        assert "token" not in address and status(f"{address}api/runs") == 200
        assert status(f"{address}api/runs", Host="evil.example") == 403


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--no-token", "--host", "0.0.0.0"], "--no-token is not allowed on 0.0.0.0"),
        (["--no-token", "--token", "x"], "give only one of --token, --no-token"),
    ],
)
def test_flags_that_exclude_each_other(run: Path, flags: list[str], said: str) -> None:
    command = [sys.executable, "-m", "cavesson", "board", str(run), "--no-browser", "--port", "0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith(f"cavesson: {said}") and done.stderr.count("\n") == 1


def test_the_browser_is_given_a_page_that_only_the_user_can_read() -> None:
    url = _page_that_leads_to("http://127.0.0.1:6008/?token=a&b")
    page = Path(url2pathname(urlsplit(url).path))
    assert "token" not in url and 'content="0; url=http://127.0.0.1:6008/?token=a&amp;b"' in page.read_text()
    assert stat.S_IMODE(page.parent.stat().st_mode) == 0o700
