"""Set up before anything of ours is imported: every call into `ops` is checked against the shapes it declares."""

import os
import random
import shutil
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded, and what is not there is not waited for

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from transformers import PreTrainedTokenizerBase

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

jaxtyping.install_import_hook("cavesson.ops", "beartype.beartype")

# Several test processes share the cores.
torch.set_num_threads(1)

# For the same reason how long an example took says nothing about the code: by default 200 ms fail a test.
settings.register_profile("busy", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# Where tests are started in the background Ctrl-C is ignored, and would be by every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """What a test calls in this process leaves the handlers of Ctrl-C and SIGTERM as they were."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """One token per byte; token 0 ends a response, token 1 pads."""
    from cavesson.models.tiny import tiny_tokenizer

    return tiny_tokenizer()


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    """The system's Chromium; for one module, because Playwright's event loop stands in the way of others."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs Chromium: apt install chromium, or have another one on the PATH as `chromium`")
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
