"""What a reward does to its process, and what is left of it: settings, streams, signals, and processes it forks."""

import asyncio
import io
import locale
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reward_helpers import call_reward

from cavesson.errors import UserCodeError
from cavesson.handlers import handling
from cavesson.rollout.rewards.surroundings import still_running

RESPONSES = ["one", "two"]


def call(what: Callable[[], Any]) -> list[float]:
    def reward(prompts: list[str], responses: list[str]) -> list[float]:
        what()
        return [1.0, 2.0]

    return call_reward(reward, "mine", RESPONSES, RESPONSES, {})["mine"]


def leave_timer() -> None:
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.9)


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "gradients": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "default dtype": (lambda: torch.set_default_dtype(torch.float64), lambda: torch.zeros(1).dtype),
    "default device": (lambda: torch.set_default_device("meta"), lambda: torch.zeros(1).device),
    "threads": (lambda: torch.set_num_threads(torch.get_num_threads() + 1), torch.get_num_threads),
    "determinism": (
        lambda: torch.use_deterministic_algorithms(True),
        torch.are_deterministic_algorithms_enabled,
    ),
    "precision": (lambda: torch.set_float32_matmul_precision("medium"), torch.get_float32_matmul_precision),
    "anomalies": (lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled),
    "cudnn": (lambda: setattr(torch.backends.cudnn, "benchmark", True), lambda: torch.backends.cudnn.benchmark),
    "numpy's errors": (lambda: np.seterr(all="raise"), np.geterr),
    "locale": (lambda: locale.setlocale(locale.LC_ALL, "C"), lambda: locale.setlocale(locale.LC_ALL)),
    "warnings": (lambda: warnings.simplefilter("error"), lambda: list(warnings.filters)),
    "logging": (lambda: logging.disable(logging.CRITICAL), lambda: logging.getLogger("x").isEnabledFor(logging.ERROR)),
    "recursion": (lambda: sys.setrecursionlimit(700), sys.getrecursionlimit),
    "folder": (lambda: os.chdir("/"), os.getcwd),
    "stdout": (lambda: setattr(sys, "stdout", None), lambda: sys.stdout),
    "stderr": (lambda: setattr(sys, "stderr", io.StringIO()), lambda: sys.stderr),
    "SIGTERM": (lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN), lambda: signal.getsignal(signal.SIGTERM)),
    "SIGINT": (lambda: signal.signal(signal.SIGINT, signal.SIG_IGN), lambda: signal.getsignal(signal.SIGINT)),
    "timer": (leave_timer, lambda: (signal.getsignal(signal.SIGALRM), 0 < signal.getitimer(signal.ITIMER_REAL)[0] < 1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_reward_changes_is_put_back(name: str) -> None:
    change, read = CHANGES[name]
    before = read()

    def changed() -> None:
        change()
        assert read() != before

    assert call(changed) == [1.0, 2.0]
    assert read() == before
    with pytest.raises(UserCodeError, match="raised ZeroDivisionError"):
        call(lambda: (change(), 1 / 0))
    assert read() == before


@pytest.mark.parametrize("what", ["sys.stdout.close()", "os.close(1)", "os.dup2(os.open(os.devnull, os.O_RDWR), 1)"])
def test_a_closed_stdout_is_open_afterwards(capfd: pytest.CaptureFixture[str], what: str) -> None:
    with capfd.disabled():
        before = os.fstat(1)
    call(lambda: exec(what, {"sys": sys, "os": os}))
    print("still here")
    os.write(1, b"and here\n")
    assert capfd.readouterr().out == "still here\nand here\n"
    with capfd.disabled():
        assert os.fstat(1)[:3] == before[:3]


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (asyncio.CancelledError(), "CancelledError"),
        (GeneratorExit("over"), "GeneratorExit: over"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (BaseException("x"), "BaseException: x"),
        (StopIteration(), "StopIteration"),
        (Silent(), "Silent"),
        (BaseExceptionGroup("both", [SystemExit()]), "BaseExceptionGroup: both (1 sub-exception)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_whatever_a_reward_raises_names_it(error: BaseException, said: str) -> None:
    def fail() -> None:
        raise error

    line = fail.__code__.co_firstlineno + 1
    with pytest.raises(UserCodeError) as raised:
        call(fail)
    assert str(raised.value) == f"the reward mine raised {said} ({__file__}, line {line})"


def test_a_result_that_raises_names_the_reward() -> None:
    class Number(float):
        def __float__(self) -> float:
            raise asyncio.CancelledError

    with pytest.raises(UserCodeError, match="the reward mine raised CancelledError"):
        call_reward(lambda prompts, responses: [Number(1)] * 2, "mine", RESPONSES, RESPONSES, {})


def test_ctrl_c_inside_a_reward_is_no_failure_of_the_reward() -> None:
    with handling(signal.default_int_handler, signal.SIGINT), pytest.raises(KeyboardInterrupt):
        call(lambda: signal.raise_signal(signal.SIGINT))


def child(work: Callable[[], None]) -> int:
    """Fork a process, and return how it ends: its exit code, or minus the signal that ended it."""
    number = os.fork()
    if not number:
        work()
        os._exit(7)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        done, status = os.waitpid(number, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(number, signal.SIGKILL)
    os.waitpid(number, 0)
    raise AssertionError("the process does not end")


@pytest.mark.parametrize("place", ["main thread", "other thread"])
def test_a_forked_process_has_the_handlers_from_before_ours(place: str) -> None:
    seen: list[int] = []
    ends: list[int] = []

    def fork() -> None:
        ends.append(child(lambda: signal.raise_signal(signal.SIGTERM)))

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with handling(lambda *_: seen.append(1), signal.SIGTERM), handling(lambda *_: seen.append(2), signal.SIGTERM):
            if place == "main thread":
                fork()
            else:
                thread = threading.Thread(target=fork)
                thread.start()
                thread.join()
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (ends, seen) == ([-signal.SIGTERM], [2])


def test_a_signal_right_after_a_fork_is_not_lost() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ends: list[int] = []
    try:
        with handling(lambda *_: None, signal.SIGTERM):
            for _ in range(20):
                number = os.fork()
                if not number:
                    time.sleep(0.2)
                    os._exit(7)
                os.kill(number, signal.SIGTERM)
                ends.append(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]))
            assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ends == [-signal.SIGTERM] * 20


@pytest.mark.parametrize(("ending", "code"), [("return", 0), ("sys.exit()", 0), ("sys.exit(3)", 1), ("1 / 0", 1)])
def test_a_forked_process_never_returns_from_a_reward(tmp_path: Path, ending: str, code: int) -> None:
    process, ends = os.getpid(), []

    def forks() -> None:
        number = os.fork()
        if number:
            ends.append(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]))
        elif ending != "return":
            exec(ending, {"sys": sys})

    try:
        call(forks)
    finally:
        if os.getpid() != process:
            os._exit(99)
    assert ends == [code]


def test_a_reward_that_still_runs_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with still_running("the reward slow", every=0.05):
        deadline = time.monotonic() + 20
        said = ""
        while "0.1 s" not in said and time.monotonic() < deadline:
            time.sleep(0.01)
            said += capsys.readouterr().err
    assert said.splitlines()[:2] == [
        "cavesson: the reward slow is still running after 0.05 s",
        "cavesson: the reward slow is still running after 0.1 s",
    ]
    time.sleep(0.15)
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""
