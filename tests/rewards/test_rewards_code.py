"""The reward `code`: real processes that pass, fail, deceive, and exceed their limits."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from cavesson import processors
from cavesson.errors import UserError
from cavesson.rollout.rewards.code import CodeReward, code_of

ADD = "```python\ndef add(a, b):\n    return a + b\n```"
TESTS = ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(2, 2) == 5", "assert subtract(1, 1) == 0"]


@pytest.fixture(scope="module")
def reward() -> CodeReward:
    return CodeReward(timeout=20, memory=512)


def scores(reward: CodeReward, responses: list[str], tests: Any) -> list[float]:
    return reward([""] * len(responses), responses, tests=tests)


def test_the_reward_is_the_share_of_tests_that_pass(reward: CodeReward) -> None:
    responses = [ADD, "def add(a, b): return 3", "I cannot", ""]
    assert scores(reward, responses, [TESTS] * 4) == [2 / 4, 1 / 4, 0.0, 0.0]
    assert scores(reward, [ADD, ADD], ["assert add(1, 1) == 2", ["assert add(1, 1) == 3"]]) == [1.0, 0.0]


def test_the_last_block_counts(reward: CodeReward) -> None:
    wrong = "```\ndef add(a, b):\n    return 0\n```"
    assert scores(reward, [f"First\n{wrong}\nbetter\n{ADD}\n", f"{ADD}\n{wrong}"], [TESTS[:1]] * 2) == [1.0, 0.0]
    assert code_of("a\n```python\nx = 1\n") == "x = 1\n"  # cut at the length limit
    assert code_of("x = 1") == "x = 1"


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "print('passed'); quit = None; raise KeyboardInterrupt",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "x = bytearray(2 << 30)",  # more than `memory`
        "open('large', 'wb').write(bytes(4 << 20))",
        "import os; assert 'PATH' in os.environ",
        "x = input()",
        "def f(: pass",
        "\ud800",
    ],
)
def test_what_does_not_pass(reward: CodeReward, code: str) -> None:
    assert scores(reward, [code], ["pass"]) == [0.0]


@pytest.mark.parametrize(
    "code",
    [
        "print('x' * 10**7)",
        "import sys; sys.stderr.write('x' * 10**6)",
        "x = bytearray(50 << 20)",
        "import numpy; assert numpy.ones(3).sum() == 3",
    ],
)
def test_what_passes(reward: CodeReward, code: str) -> None:
    assert scores(reward, [code], ["pass"]) == [1.0]


def test_a_test_and_what_it_started_end_at_the_time_limit(tmp_path: Path) -> None:
    place = tmp_path / "pid"
    code = "import subprocess\nchild = subprocess.Popen(['/bin/sleep', '600'])\n"
    code += f"open({str(place)!r}, 'w').write(str(child.pid))\n"
    reward, start = CodeReward(timeout=1), time.monotonic()
    assert scores(reward, [code + "while True: pass", "while True: pass"], ["pass"] * 2) == [0.0, 0.0]
    assert 1 <= time.monotonic() - start < 60
    with suppress(psutil.NoSuchProcess):
        child = psutil.Process(int(place.read_text()))
        deadline = time.monotonic() + 30  # a killed process ends when the system next schedules it
        while child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_the_time_limit_counts_processor_time() -> None:
    """On a machine with other work, correct code takes longer: here, one and a half times the limit."""
    limited = "import resource; assert resource.getrlimit(resource.RLIMIT_CPU) == (1, 1)\n"
    waits = "import time; time.sleep(1.5)"
    assert scores(CodeReward(timeout=0.8), [limited + waits], ["pass"]) == [1.0]


def test_tests_do_not_outlive_a_process_that_is_killed(tmp_path: Path) -> None:
    """One computes, so its processor time ends, and one waits."""
    begin = f"import os, time; open({str(tmp_path)!r} + '/' + str(os.getpid()), 'w').close()\n"
    responses = [begin + code for code in ("while True: pass", "time.sleep(600)")]
    program = "from cavesson.rollout.rewards.code import CodeReward\n"
    program += f"CodeReward(timeout=0.25, concurrency=2)([''] * 2, {responses!r}, tests=['pass'] * 2)"
    trainer, deadline = subprocess.Popen([sys.executable, "-c", program]), time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2:
        assert trainer.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    trainer.kill()
    trainer.wait()
    while any(psutil.pid_exists(int(one.name)) for one in tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("allowed", "quota", "processes", "expected"),
    [
        (8, None, None, 8),
        (8, "max 100000", "2", 4),
        (8, "250000 100000", None, 2),  # two and a half processors
        (2, "400000 100000", None, 2),
        (8, "400000 100000", "3", 1),
        (2, None, "8", 1),
    ],
)
def test_by_default_a_process_runs_as_many_tests_as_it_has_processors(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    allowed: int,
    quota: str | None,
    processes: str | None,
    expected: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)))
    monkeypatch.setattr(processors, "_QUOTA", tmp_path / "cpu.max")
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if processes is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert processors.usable_processors() == expected


def test_a_test_starts_in_an_empty_folder_that_is_removed(reward: CodeReward, tmp_path: Path) -> None:
    code = "import os\nassert os.listdir() == []\nopen('left', 'w').write('x')\n"
    code += f"open({str(tmp_path / 'at')!r}, 'w').write(os.getcwd())"
    assert scores(reward, [code], ["pass"]) == [1.0]
    assert not os.path.exists((tmp_path / "at").read_text())


def test_tests_run_at_the_same_time_as_often_as_said(tmp_path: Path) -> None:
    """Two tests that wait for each other pass only together."""
    wait = "import os, time\nopen('{0}/{1}', 'w').close()\nwhile not os.path.exists('{0}/{2}'): time.sleep(0.01)"
    for concurrency, passed in ((2, [1.0, 1.0]), (1, [0.0, 1.0])):
        place = tmp_path / str(concurrency)
        place.mkdir()
        responses = [wait.format(place, "a", "b"), wait.format(place, "b", "a")]
        assert scores(CodeReward(timeout=1, concurrency=concurrency), responses, ["pass"] * 2) == passed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"timeout": 0}, "reward 'code': options"),
        ({"time": 3}, "reward 'code': options"),
        ({"memory": 4}, "Python does not start with options.memory 4; set a larger limit"),
    ],
)
def test_wrong_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        CodeReward(**options)


@pytest.mark.parametrize("tests", [None, [], "", [3], [""], 7])
def test_wrong_tests(reward: CodeReward, tests: Any) -> None:
    column = None if tests is None else [tests]
    with pytest.raises(UserError, match="needs a column tests" if tests is None else "tests must be a text or a list"):
        scores(reward, [ADD], column)
