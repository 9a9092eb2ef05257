"""Singular and plural."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from cavesson.demo import run as demo
from cavesson.text.counting import counted, some_of


@pytest.mark.parametrize(
    ("count", "expected"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (21, "21 steps"), (1000, "1000 steps")]
)
def test_one_is_one_and_all_else_are_several(count: int, expected: str) -> None:
    assert counted(count, "step") == expected


@pytest.mark.parametrize(("count", "expected"), [(0, ""), (1, "0"), (2, "0, 1"), (3, "0, 1, …"), (9, "0, 1, …")])
def test_a_long_list_names_the_first_few(count: int, expected: str) -> None:
    assert some_of(map(str, range(count)), 2) == expected


def test_a_demo_of_one_step_says_so() -> None:
    interval = {"mean": 0.0, "low": -1.0, "high": 1.0}
    held_out = {"openings": 1, "reward_before": interval, "reward_after": interval, "gain": interval}
    training = {"steps": 1, "seconds": 27.4, "kl_lowest": 0.0, "kl_highest": 0.0}
    console = Console(file=io.StringIO(), width=200)
    demo._print(console, {"held_out": held_out, "training": training, "samples": []}, Path("runs/demo"))
    assert isinstance(console.file, io.StringIO)
    assert "; 1 step in 27 s\n" in console.file.getvalue()
