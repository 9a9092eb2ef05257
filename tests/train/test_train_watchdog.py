"""The watchdog: which process hangs, what is said about it, and that all of them end."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavesson.watchdog import Place, Seen, hanging, sentence

SCRIPT = Path(__file__).parent / "hanging.py"
SEEN = st.builds(
    Seen,
    st.builds(Place, st.integers(0, 3), st.integers(0, 3), st.just("update")),
    st.integers(0, 20).map(float),
)


def at(arrivals: int, seconds: float, stage: str = "step 3, reward") -> Seen:
    return Seen(Place(arrivals, 0, stage), seconds)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([at(5, 61), at(4, 61)], [1]),
        ([at(4, 61), at(5, 61)], [0]),
        ([at(5, 1), at(4, 61)], [1]),  # the one ahead has just arrived
        ([at(5, 61), at(4, 59)], []),  # the one ahead may wait; what it waits for has moved since
        ([at(5, 61), at(4, 61), at(4, 61)], [1, 2]),
        ([at(5, 61), at(4, 61), at(4, 2)], []),  # one of those behind still moves
        ([at(4, 60), at(4, 61)], [0, 1]),
        ([at(4, 59), at(4, 61)], []),
    ],
)
def test_the_process_furthest_behind_hangs(seen: list[Seen], expected: list[int]) -> None:
    assert hanging(seen, 60) == expected


@given(st.lists(SEEN, min_size=1, max_size=5), st.integers(1, 20))
def test_those_that_hang_are_behind_all_others_and_have_not_moved(seen: list[Seen], longest: int) -> None:
    ranks = hanging(seen, longest)
    others = [one for rank, one in enumerate(seen) if rank not in ranks]
    for one in (seen[rank] for rank in ranks):
        assert one.seconds >= longest and all(one.place.arrivals < other.place.arrivals for other in others)
    if not ranks:
        last = min(one.place.arrivals for one in seen)
        assert any(one.seconds < longest for one in seen if one.place.arrivals == last)


def test_a_process_that_moves_is_seen_from_zero_again() -> None:
    seen = Seen(Place(1, 0, "update")).then(Place(1, 0, "update"), 2).then(Place(1, 0, "update"), 3)
    assert seen.seconds == 5
    for moved in (Place(2, 0, "update"), Place(1, 1, "update")):
        assert seen.then(moved, 4) == Seen(moved, 0)


def test_the_sentence_names_processes_stage_and_time() -> None:
    assert sentence([at(5, 61.4), at(4, 61.4)], [1], 60) == (
        'process 1 of 2 (counted from 0) has made no progress in "step 3, reward" for 61 s while the others wait '
        "(parallel.timeout is 60 s)"
    )
    some = sentence([at(4, 61), at(5, 0), at(4, 61), at(4, 61)], [0, 2, 3], 60)
    assert some.startswith("processes 0, 2 and 3 of 4 (counted from 0) have made no progress in ")
    assert sentence([at(4, 7)] * 2, [0, 1], 6.5) == (
        'all 2 processes have made no progress in "step 3, reward" for 7 s '
        "(parallel.timeout is 6.5 s; raise it if that stage takes longer)"
    )
    many = sentence([at(4, 61)] * 20 + [at(5, 1)], range(20), 60)
    assert many.startswith("processes 0, 1, 2, 3, 4, 5, 6, 7 and … of 21 (counted from 0) have made")


def processes(how: str, rank: str) -> list["subprocess.Popen[str]"]:
    """Two processes without a launcher, so that the first one holds the store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), how, rank],
            env=os.environ | common | {"RANK": str(number), "LOCAL_RANK": str(number), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]


def said(errors: str) -> list[str]:
    return [line for line in errors.splitlines() if line.startswith("cavesson: ")]


@pytest.mark.parametrize(
    "rank", ["0", pytest.param("1", marks=pytest.mark.slow), pytest.param("all", marks=pytest.mark.slow)]
)
def test_all_processes_end_if_one_hangs_and_one_says_which(rank: str) -> None:
    both = processes("asleep", rank)
    errors = "".join(process.communicate(timeout=200)[1] for process in both)
    (line,) = said(errors)
    who = "all 2 processes have" if rank == "all" else f"process {rank} of 2 (counted from 0) has"
    assert line.startswith(f'cavesson: {who} made no progress in "nap" for '), errors
    assert line.endswith("; continue with: cavesson go")
    assert [process.returncode for process in both] == [2, 2] and "Traceback" not in errors, errors


@pytest.mark.slow
def test_a_stopped_process_is_named_by_the_other() -> None:
    both = processes("stopped", "1")
    try:
        _, errors = both[0].communicate(timeout=200)
    finally:
        both[1].kill()  # without a launcher, nobody else ends it
        _, more = both[1].communicate()
    (line,) = said(errors)
    assert line.startswith('cavesson: process 1 of 2 (counted from 0) has made no progress in "nap" for '), errors
    assert both[0].returncode == 2 and both[1].returncode == -signal.SIGKILL and not said(more)


@pytest.mark.slow
def test_slow_steps_are_no_hang() -> None:
    start = time.monotonic()
    both = processes("steps", "all")
    errors = "".join(process.communicate(timeout=200)[1] for process in both)
    assert [process.returncode for process in both] == [0, 0] and not said(errors), errors
    assert time.monotonic() - start > 3.6
