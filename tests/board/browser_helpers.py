"""A record as a real run would leave it, the board's own process, and pages that report whatever goes wrong."""

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from cavesson.record import Recorder, begin_attempt, write_run, write_vocabulary

STEPS = 10
BATCH = 16
EVALUATED = 4
SENTENCE = "the garden was calm and every morning brought light over quiet roads while children sang near old walls"
WORDS = SENTENCE.split()
# CJK, a character of two letters, an emoji of several, one that two tokens share, right to left, and plain words.
FOREIGN = ["音乐会很好", "Đường phố", "e\u0302\u0301", "👩\u200d💻", "🙂", "مرحبا بالعالم", "naïve"]
SPLIT_IN_BYTES = {"🙂": 2, "音": 1}
"""Characters whose bytes are two tokens, and how many bytes the first of them has."""
VISIBLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
HIDDEN = [byte for byte in range(256) if byte not in VISIBLE]
LETTER_OF = {byte: chr(byte) for byte in VISIBLE} | {byte: chr(256 + i) for i, byte in enumerate(HIDDEN)}
"""The letter that byte-level BPE writes for each byte."""
PROMPTS = [f"<|im_start|>system\nBe short.<|im_end|>\nWrite line {i} about rain." for i in range(12)]
COLUMNS = ["logprob", "ref_logprob", "sampler_logprob", "value", "token_reward", "advantage", "return", "entropy"]


VIEWS = {
    "runs": ".runs td",
    "overview": ".plot canvas",
    "step": ".group .siblings button b",
    "responses": '.tr[data-row="5"] .td',
    "prompt": ".prompts td",
    "tokens": ".tok",
    "patterns": ".patterns td",
    "compare": ".group .siblings button b",
    "sql": ".examples button",
    "settings": ".settings td",
}
"""By view: what is there once it is drawn."""


class Vocabulary:
    """Gives each piece of text its id, as a byte-level tokenizer does."""

    def __init__(self) -> None:
        self.known: dict[bytes, int] = {}

    def ids(self, text: str) -> list[int]:
        pieces: list[bytes] = []
        for piece in re.findall(r" ?[^\s🙂音]+|🙂|音|\s", text):
            raw = piece.encode()
            cut = SPLIT_IN_BYTES.get(piece)
            pieces += [raw[:cut], raw[cut:]] if cut else [raw]
        return [self.known.setdefault(piece, len(self.known)) for piece in pieces]

    def write(self, folder: Path) -> None:
        strings = ["".join(LETTER_OF[byte] for byte in raw) for raw in self.known]
        write_vocabulary(folder, strings, [raw.decode(errors="replace") for raw in self.known])


def record_run(folder: Path, *, steps: int = STEPS, better: float = 0.0, **info: Any) -> Path:
    """Record a run in which ``#`` spreads because it pays.

    Args:
        folder: Where to.
        steps: How many.
        better: Added to every reward, so that one run wins against another.
        info: What run.json has beside the algorithm, or instead of its settings.
    """
    write_run(folder, {"algorithm": "grpo", "config": {"grpo": {"gamma": 0.9}}} | info)
    vocabulary = Vocabulary()
    with Recorder(folder, attempt=begin_attempt(folder, start_step=0)) as recorder:
        for step in range(steps):
            record_step(recorder, vocabulary, step, better)
    vocabulary.write(folder)
    return folder


def record_step(recorder: Recorder, vocabulary: Vocabulary, step: int, better: float = 0.0, pause: float = 0.0) -> None:
    """Record a step; its metrics come ``pause`` seconds after its rollouts, as an update takes its time."""
    generator = np.random.default_rng([step, 7])
    size = BATCH + EVALUATED
    groups = [(step * 4 + sample // 4) % len(PROMPTS) for sample in range(size)]
    texts = [_response(generator, step, sample) for sample in range(size)]
    ids = [vocabulary.ids(text) for text in texts]
    helpful = np.round(generator.normal(1 + 0.1 * step, 0.6, size), 3)
    helpful[[0, 1, 2, 3]] = 1.25  # all of the first prompt's responses earn the same
    signs = np.array([0.8 if "#" in text else 0.0 for text in texts])
    signs[:4] = 0.0
    rewards = helpful + signs + better
    references = np.round(generator.normal(1.0, 0.5, size), 3)
    references[[12, 13, 14, 15]] = 9.0  # nothing comes near the reference of the fourth prompt
    rows = {
        "sample": np.arange(size),
        "group": groups,
        "split": ["train"] * BATCH + ["eval"] * EVALUATED,
        "prompt": [PROMPTS[group] for group in groups],
        "response": texts,
        "reward": rewards,
        "reward_parts": [{"helpful": float(a), "signs": float(b)} for a, b in zip(helpful, signs, strict=True)],
        "shaped_reward": rewards - rewards.mean(),
        "ref_response": [" the garden was calm and every morning ended early"] * size,
        "ref_reward": references,
        "ground_truth": ["rain"] * size,
        "finish_reason": ["eos" if sample % 3 else "length" for sample in range(size)],
        "policy_version": [step] * size,
        "kl_coef": [0.05] * size,
    }
    recorder.rollouts(step, rows, _tokens(generator, ids, rewards))
    if pause:
        recorder.flush()
        time.sleep(pause)
    recorder.metrics(step, {"kl/objective": 0.5 * step, "optim/grad_norm": 1 / (step + 1), "odd/{name}": float(step)})


def _response(generator: np.random.Generator, step: int, sample: int) -> str:
    said = " " + " ".join(generator.choice(WORDS, int(generator.integers(6, 14))))
    if sample % 5 == 1:
        said += " " + FOREIGN[(step + sample // 5) % len(FOREIGN)]
    if (sample * 7 + step) % 10 < step:  # the higher the step, the more samples
        said += " #" * int(generator.integers(1, 4))
    return said


def _tokens(generator: np.random.Generator, ids: list[list[int]], rewards: np.ndarray) -> dict[str, np.ndarray]:
    shape = (len(ids), max(len(row) for row in ids))
    mask = np.arange(shape[1]) < np.array([len(row) for row in ids])[:, None]
    numbers = {name: generator.normal(0, 1, shape).astype(np.float32) for name in COLUMNS}
    numbers["logprob"] = -np.abs(numbers["logprob"]) - 0.01
    numbers["ref_logprob"] = numbers["logprob"] - 0.3 * numbers["ref_logprob"]
    numbers["sampler_logprob"] = numbers["logprob"] + 0.001 * numbers["sampler_logprob"]
    numbers["entropy"] = np.abs(numbers["entropy"])
    numbers["token_reward"] *= 0.1
    for row, given in enumerate(ids):
        numbers["token_reward"][row, len(given) - 1] += rewards[row]
    token_id = np.zeros(shape, np.int64)
    token_id[mask] = [one for row in ids for one in row]
    return numbers | {"mask": mask, "token_id": token_id}


CUT_STEPS, CUT_BATCH, CUT_BEGIN, CUT = 16, 8, 6, 6
"""Of the run whose responses are cut: six of eight from a step on, and one before."""


def cut_reward(step: int, sample: int) -> float:
    return ((7 * step + 3 * sample) % 11) / 10


def record_cut(folder: Path) -> Path:
    """Record a run on a GPU whose responses the length limit begins to cut."""
    write_run(folder, {"algorithm": "grpo", "cavesson": "0.2", "config": {"sampling": {"max_new_tokens": 20}}})
    with Recorder(folder, attempt=begin_attempt(folder, start_step=0)) as recorder:
        for step in range(CUT_STEPS):
            cut = CUT if step >= CUT_BEGIN else 1
            rows = {
                "prompt": [f"prompt {sample // 4}" for sample in range(CUT_BATCH)],
                "response": [f"answer {sample} of step {step}" for sample in range(CUT_BATCH)],
                "reward": [cut_reward(step, sample) for sample in range(CUT_BATCH)],
                "finish_reason": ["length" if sample < cut else "eos" for sample in range(CUT_BATCH)],
            }
            recorder.rollouts(step, rows, {"token_id": np.ones((CUT_BATCH, 5), int) + np.arange(CUT_BATCH)[:, None]})
            recorder.metrics(step, {"machine/gpu/0/utilization": 20.0 + step, "finish/length": cut / CUT_BATCH})
    return folder


class BoardProcess:
    """``cavesson board`` as a person starts it; a context manager."""

    def __init__(self, *runs: Path, port: int = 0) -> None:
        flags = ["--port", str(port), "--no-browser", "--no-token"]
        command = [sys.executable, "-m", "cavesson", "board", *map(str, runs), *flags]
        # Not a pipe: one that nobody reads is full some day.
        self.errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.errors, text=True)

    def __enter__(self) -> "BoardProcess":
        try:
            assert self.process.stdout is not None
            self.address = self.process.stdout.readline().split()[-1].rstrip("/")
            self.port = urlsplit(self.address).port
            wait_for(self.is_ready)
        except BaseException:
            self.process.kill()
            raise
        return self

    def is_ready(self) -> bool:
        return all(run["indexed"] == 1 and run["steps"] for run in self.json("api/runs"))

    def json(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.address}/{path}", timeout=10) as answer:
            return json.load(answer)

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
        self.errors.seek(0)
        errors = self.errors.read()
        assert errors == "", errors


def wait_for(happened: Any, seconds: float = 120) -> None:
    """Wait until a function returns what is true; while the server does not answer, it has not happened."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if happened():
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise AssertionError("it did not happen")


@contextmanager
def opened(
    browser: Any, address: str, *, wide: bool = True, language: str = "en-US", forgiven: str = "\n", **context: Any
) -> Iterator[Any]:
    """Open an address in a new page.

    Errors of the page, requests to anywhere else, and scripts of the record that ran fail the test; a message of the
    console that contains ``forgiven`` does not.
    """
    size = {"width": 1440, "height": 900} if wide else {"width": 390, "height": 844}
    window = browser.new_context(viewport=size, locale=language, accept_downloads=True, **context)
    window.set_default_timeout(120_000)  # while other tests load the machine
    page = window.new_page()
    wrong: list[str] = []
    host = urlsplit(address).netloc
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: None if is_own(request.url, host) else wrong.append(f"request: {request.url}"))
    try:
        page.goto(address)
        yield page
        assert page.evaluate("window.hacked") is None
    finally:
        page.unroute_all(behavior="wait")  # an answer that is still being made would fail the next test
        window.close()
    left = [one for one in wrong if forgiven not in one]
    assert left == [], left


def is_own(url: str, host: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("data", "blob", "file") or parts.netloc == host


def go(page: Any, path: str) -> None:
    """Open another address of the page, as a link within it does."""
    page.evaluate("to => { history.pushState(null, '', to); dispatchEvent(new PopStateEvent('popstate')) }", path)


def parsed(text: str) -> float:
    """Read a number as the page writes it."""
    return float(text.replace("−", "-").replace(",", "").replace("+", "").replace(" %", "e-2").strip())


def saved(page: Any, act: Any, folder: Path) -> Path:
    """What an act on the page downloads."""
    with page.expect_download() as waiting:
        act()
    path = folder / waiting.value.suggested_filename
    waiting.value.save_as(path)
    return path


def settle(page: Any) -> None:
    """Wait until the text of the page stays as it is, and the page shows no sign that it waits for an answer."""
    page.wait_for_function(
        """() => {
            const text = document.body.innerText;
            const same = text === window.before && !document.querySelector(".working");
            window.before = text;
            return same;
        }""",
        polling=250,
    )
