"""Three records of the same run, each with more columns than the one before, agree on what is wrong."""

from pathlib import Path

import pytest

from benchmarks.faults.small.case import Case
from benchmarks.faults.small.generate import make
from benchmarks.faults.small.judged import Judged, judged, worse_with_more
from benchmarks.faults.small.planted import FAULTS
from benchmarks.faults.small.recordings import TEXT, WAYS

# Each run trains for some seconds, from a model that is trained first.
pytestmark = pytest.mark.slow
SICK = {
    "requests-aborted": "reinforce", "verifier-dead": "group_relative", "loss-negated": "group_relative",
    "same-seed": "reinforce",
}  # fmt: skip
"""Faults that text and rewards alone show → the trainer in which they are planted."""
HEALTHY = {"usual": "actor_critic", "four-prompts": "group_relative", "saturated": "reinforce"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that keeps the model from which all runs start."""
    return tmp_path_factory.mktemp("runs")


def said(name: str, trainer: str, runs: Path) -> list[Judged]:
    case = Case(name, name in HEALTHY, trainer, "sums", 5)
    make(case, runs)
    found = judged(runs / case.folder)
    assert [one.way for one in found] == list(WAYS)
    return found


@pytest.mark.parametrize("name", SICK)
def test_what_text_shows_is_named_from_fuller_records(name: str, runs: Path) -> None:
    found = said(name, SICK[name], runs)
    assert TEXT in FAULTS[name].seen
    assert next(one for one in found if one.way == TEXT).is_first
    assert worse_with_more(found) == []


@pytest.mark.parametrize("name", HEALTHY)
def test_no_record_accuses_a_healthy_run(name: str, runs: Path) -> None:
    assert [(one.way, one.errors) for one in said(name, HEALTHY[name], runs) if one.errors] == []
