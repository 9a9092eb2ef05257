"""A measurement is repeated while other programs are busy, and knows whose processor time is whose."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.quiet import quietly, spread

BURN = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass"


def burn(seconds: float) -> None:
    """Use this much processor time in a process that is waited for."""
    subprocess.run([sys.executable, "-c", BURN.format(seconds)], check=True)


@pytest.fixture
def neighbour() -> Iterator[None]:
    """Another program that is busy all the time."""
    process = subprocess.Popen([sys.executable, "-c", BURN.format(600)])
    yield
    process.kill()
    process.wait()


def test_it_is_repeated_while_another_program_is_busy(neighbour: None) -> None:
    done: list[int] = []

    def measure() -> int:
        burn(0.5)
        done.append(len(done))
        return done[-1]

    result, others = quietly(measure, busy=0.05, attempts=3)
    assert done == [0, 1, 2] and result in done
    assert others > 0.05


def test_its_own_processes_are_not_others() -> None:
    alone = min(quietly(lambda: burn(1.0), attempts=1)[1] for _ in range(3))
    beside = max(quietly(lambda: burn(0.0), attempts=1)[1] for _ in range(3))
    assert alone < beside + 0.9  # of one core that it has kept busy itself
    result, _ = quietly(lambda: "done", busy=float("inf"), attempts=5)
    assert result == "done"


def test_the_quietest_attempt_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([0.0, 2.0, 2.0, 2.5, 2.5, 5.5])
    clock = iter([0.0, 1.0, 1.0, 2.0, 2.0, 3.0])
    monkeypatch.setattr("benchmarks.quiet._used_by_others", lambda: next(used))
    monkeypatch.setattr("benchmarks.quiet.perf_counter", lambda: next(clock))
    results = iter("abc")
    assert quietly(lambda: next(results), busy=0.1, attempts=3) == ("b", 0.5)


def test_a_median_is_told_with_its_range() -> None:
    assert spread([3.0, 1.0, 2.0, 10.0]) == "2.5 (1–10)"
    assert spread([0.01, 0.03, 0.02], ".1%") == "2.0% (1.0%–3.0%)"
