"""A path that is not a run: the runs that may have been meant are named."""

import os
from pathlib import Path

import pytest

import cavesson.record
from cavesson.errors import UserError
from cavesson.record.read.nearby import MAX_NAMED, runs_nearby


@pytest.fixture
def place(tmp_path, monkeypatch):
    for name in ("runs/first", "runs/second", "runs/old/third", "runs/notes"):
        (tmp_path / name).mkdir(parents=True)
        if name != "runs/notes":
            (tmp_path / name / "run.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("runs/frist", "did you mean runs/first?"),
        ("first", "did you mean runs/first?"),
        ("rnus/secnd", "did you mean runs/second?"),
        ("runs/thrid", "did you mean runs/old/third?"),
        ("runs/first/index", "runs nearby: runs/first"),
        ("runs", "runs nearby: runs/first, runs/old/third, runs/second"),
        ("runs/*.json", "runs nearby: runs/first, runs/old/third, runs/second"),
        ("runs/notes", "runs nearby: runs/first, runs/old/third, runs/second"),
        ("/proc/self/none/of/these", ""),
    ],
)
def test_runs_that_may_have_been_meant_are_named(place, path, meant):
    assert runs_nearby(Path(path)) == meant
    with pytest.raises(UserError, match="is not a run folder") as raised:
        cavesson.record.open(path)
    assert str(raised.value).endswith(meant or "of another trainer")
    assert ("does not exist" in str(raised.value)) == (not os.path.exists(path))


def test_of_many_runs_few_are_named(place):
    for number in range(20):
        (place / "runs" / f"seed-{number}").mkdir()
        (place / "runs" / f"seed-{number}" / "run.json").write_text("{}")
    assert runs_nearby(place / "runs" / "zzz").endswith(f"and {23 - MAX_NAMED} more")
    assert runs_nearby(place / "runs" / "seed-x").count("seed-") == MAX_NAMED
