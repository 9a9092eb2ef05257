"""Set up before anything of ours is imported: every call into `ops` is checked against the shapes it declares."""

import ctypes
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded, and what is not there is not waited for
os.environ["MKL_NUM_THREADS"] = "1"  # PyTorch's threads, here and in every process a test starts: tests share the cores
# All tests, and every process that one starts, share a cache that is not the user's.
os.environ["XDG_CACHE_HOME"] = (
    os.environ["XDG_CACHE_HOME"] if "PYTEST_XDIST_WORKER" in os.environ else tempfile.mkdtemp(prefix="cavesson-tests-")
)

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from transformers import PreTrainedTokenizerBase

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

jaxtyping.install_import_hook("cavesson.ops", "beartype.beartype")

# The duration of an example depends on what else is running: by default 200 ms fail a test.
settings.register_profile("busy", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("busy"), max_examples=10)
settings.load_profile("busy")

# Where tests are started in the background Ctrl-C is ignored, and after `nohup` the end of the terminal: every process
# that a test starts would ignore them, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_configure(config: pytest.Config) -> None:
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        # Some of these tests fork, after which CUDA does not work in a process whose parent has used it.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_unconfigure() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow-part", metavar="K/N", help="of the slow tests, run only part K of N, from 0 to N − 1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow cases and those with a browser, and leave out the slow ones that are not in the part asked for."""
    _mark_sampled(items)
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.browser)
    if part := config.getoption("--slow-part"):
        number, of = _numbers(part)
        kept, others = [], []
        for item in items:
            (others if item.get_closest_marker("slow") and _part(item, of) != number else kept).append(item)
        config.hook.pytest_deselected(items=others)
        items[:] = kept


def _numbers(part: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", part)
    if found is None or not int(found[1]) < int(found[2]):
        raise pytest.UsageError(f"--slow-part {part}: give a part and the number of parts, such as 0/8 or 7/8")
    return int(found[1]), int(found[2])


def _part(item: pytest.Item, of: int) -> int:
    """The part that a test is in; all cases of a test are in the same, because they share what is expensive."""
    return zlib.crc32(item.nodeid.split("[")[0].encode()) % of


def _mark_sampled(items: list[pytest.Item]) -> None:
    """Of a test marked `sampled(n)`, all cases but n are slow; which ones is drawn by the test's name."""
    cases: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("sampled"):
            cases[item.nodeid.split("[")[0], mark.args[0]].append(item)
    for (name, count), found in cases.items():
        for item in random.Random(name).sample(found, max(0, len(found) - count)):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    """A test leaves the handlers of Ctrl-C and SIGTERM and the working directory as they were."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)], Path.cwd()
    yield
    assert ([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)], Path.cwd()) == before


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """One token per byte; token 0 ends a response, token 1 pads."""
    from cavesson.models.tiny import tiny_tokenizer

    return tiny_tokenizer()


@pytest.fixture(scope="module")
def read_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system that is mounted read-only, which root cannot write either."""
    place = tmp_path_factory.mktemp("read-only")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", str(place).encode(), b"tmpfs", 1, None):  # 1 = MS_RDONLY
        pytest.skip("this process may not mount file systems")
    yield place
    libc.umount2(str(place).encode(), 2)  # 2 = MNT_DETACH: also while another process is in it


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    """The system's Chromium; for one module, because Playwright's event loop stands in the way of others."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs Chromium: apt install chromium, or have another one on the PATH as `chromium`")
    playwright.expect.set_options(timeout=30_000)  # after 5 seconds a busy machine may not have drawn the page
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: "Browser") -> "Iterator[Page]":
    """An empty page, 1280 × 900; what it reports as an error afterwards fails the test."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    yield page
    page.close()
    assert errors == []


@pytest.fixture(scope="module")
def object_storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An S3-compatible server, in its own process, on a port that it chooses."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    before = dict(os.environ)
    try:
        settings = {"AWS_ENDPOINT_URL": _address(process, log), "AWS_DEFAULT_REGION": "us-east-1"}
        settings |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_EC2_METADATA_DISABLED": "true"}
        os.environ.update(settings)
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()  # one made earlier keeps the address of its server
        try:
            s3fs.S3FileSystem().mkdir("bucket")
        except OSError as error:
            raise AssertionError(f"exit code {process.poll()}: {log.read_text()}") from error
        yield "s3://bucket"
    finally:
        os.environ.clear()
        os.environ.update(before)
        process.kill()
        process.wait(60)


def _address(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """Wait until the server says where it listens."""
    for _ in range(1200):
        said = re.search(r"Running on (http://\S+)\n", log.read_text())
        if said:
            return said.group(1)
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    raise AssertionError(f"the server has not started: {log.read_text()}")
