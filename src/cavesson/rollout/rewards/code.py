"""Whether the code in a response passes tests: each test runs in its own Python process, with limits."""

import json
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import repeat
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import Field

from cavesson.config import Settings, check
from cavesson.errors import UserError
from cavesson.processors import usable_processors

_FENCE = re.compile(r"^```[^\n]*\n(.*?)(?:^```|\Z)", re.MULTILINE | re.DOTALL)
_LARGEST_FILE = 1 << 20
# Every thread of NumPy's would reserve its own memory.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_START = 30.0
"""Most seconds that Python itself may take to start, when the reward is built."""
_PATIENCE = 4
"""A test may take this many times its processor time, because other programs use the processors too."""
# A limit that is set before this program starts would need code of ours between fork and exec, where threads forbid it.
_PROGRAM = """
import ctypes, json, os, resource, signal, sys
given = json.load(sys.stdin)
signal.alarm(given["longest"])  # should the process that has started this one be killed
if sys.platform == "linux":  # where the kernel can end it at once
    ctypes.CDLL(None).prctl(1, 9)
    os.getppid() == given["parent"] or os._exit(1)
for name, most in given["limits"].items():
    resource.setrlimit(getattr(resource, name), (most, most))
out, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
for stream in (0, 1, 2):
    os.dup2(null, stream)
names = {"__name__": "__main__"}
for part in ("code", "test"):
    exec(compile(given[part], part, "exec"), names)
os.write(out, given["passed"].encode())
"""


class CodeSettings(Settings):
    """The limits of a test."""

    timeout: float = Field(5.0, gt=0)
    """seconds of processor time that a test may take, rounded up, with the start of Python; a test that waits is ended
    after four times as long"""
    memory: int = Field(1024, ge=1)
    """megabytes of address space that a test may use"""
    concurrency: int = Field(0, ge=0)
    """tests that run at the same time; 0 = one per processor that this process may use"""


class CodeReward:
    """The share of the tests in the column `tests` that the code of a response passes, 0 to 1; see `CodeSettings`.

    The code is the last block between ``` fences, else the whole response. A test is Python code, such as
    `assert add(1, 2) == 3`; it runs after the response's code, and passes if nothing is raised. Each test gets a new
    process, an empty folder and hardly any environment variables, and can import the packages of this Python. At the
    time limit, which counts processor time, its process group is killed. This is not a sandbox: the code can read files
    and use the network.

    Raises:
        UserError: an option is wrong, the system cannot limit processes, or Python does not start within the limits.
    """

    def __init__(self, **options: Any) -> None:
        self.settings = check(CodeSettings, options, "reward 'code': options")
        if sys.platform == "win32":
            raise UserError("reward 'code' needs a Unix system, which can limit the memory of a process")
        begun = time.monotonic()
        if not self._passes("", "", _START):
            raise UserError(
                f"reward 'code': Python does not start with options.memory {self.settings.memory}; set a larger limit"
            )
        self.longest = _PATIENCE * (self.settings.timeout + time.monotonic() - begun)

    def __call__(
        self, prompts: Sequence[str], responses: Sequence[str], tests: Sequence[Any] | None = None, **_: Any
    ) -> list[float]:
        each = tests_of(prompts, tests)
        pairs = [(code_of(response), one) for response, some in zip(responses, each, strict=True) for one in some]
        with ThreadPoolExecutor(self.settings.concurrency or usable_processors()) as pool:
            passed = iter(list(pool.map(self._passes, *zip(*pairs, strict=True), repeat(self.longest))))
        return [sum(next(passed) for _ in some) / len(some) for some in each]

    def _passes(self, code: str, test: str, longest: float) -> bool:
        """Return whether a test passes after some code, within the limits and this many seconds."""
        # The end of the program says nothing about the test: the code may have ended it.
        word = secrets.token_hex(16)
        limits = {"RLIMIT_AS": self.settings.memory << 20, "RLIMIT_FSIZE": _LARGEST_FILE, "RLIMIT_CORE": 0}
        limits["RLIMIT_CPU"] = math.ceil(self.settings.timeout)
        program = {
            "code": code,
            "test": test,
            "passed": word,
            "limits": limits,
            "parent": os.getpid(),
            "longest": math.ceil(longest) + 1,
        }
        with TemporaryDirectory(prefix="cavesson-code-", ignore_cleanup_errors=True) as folder:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", _PROGRAM],
                cwd=folder,
                env=_ENVIRONMENT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                said, _ = process.communicate(json.dumps(program).encode(), longest)
            except subprocess.TimeoutExpired:
                said = b""
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                for pipe in (process.stdin, process.stdout):
                    if pipe is not None:
                        with suppress(OSError):  # what was not written any more
                            pipe.close()
        return said == word.encode()


def code_of(response: str) -> str:
    """Return the last block between ``` fences, which need not be closed, else the whole response."""
    blocks: list[str] = _FENCE.findall(response)
    return blocks[-1] if blocks else response


def tests_of(prompts: Sequence[str], tests: Sequence[Any] | None) -> list[list[str]]:
    """Return the tests of some prompts.

    Raises:
        UserError: there are none, or those of a prompt are not texts.
    """
    if tests is None:
        raise UserError("the reward code needs a column tests with the tests of every prompt")
    return [_listed(prompt, given) for prompt, given in zip(prompts, tests, strict=True)]


def _listed(prompt: str, tests: Any) -> list[str]:
    listed = [tests] if isinstance(tests, str) else tests
    if not (isinstance(listed, list | tuple) and listed) or not all(
        isinstance(one, str) and one.strip() for one in listed
    ):
        raise UserError(f"the reward code: tests must be a text or a list of texts, not {tests!r} (prompt {prompt!r})")
    return list(listed)
