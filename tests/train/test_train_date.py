"""A chat template that writes today's date writes the one on which the run began, whenever the run is resumed."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from train_helpers import build, quiet, settings, uneven

import cavesson
from cavesson.data.template import template_time, templates_at
from cavesson.train.run import Training

DATED = (
    "Today: {{ strftime_now('%d %b %Y') }}\n{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CHAT: dict[str, Any] = {"data__chat": True, "data__template": DATED, "checkpoint__every": 1}
EAST, WEST = "XXX-14", "XXX+12"
"""Time zones of places where it is never the same day."""


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch):
    """Moves to another time zone."""

    def move(name: str) -> str:
        monkeypatch.setenv("TZ", name)
        time.tzset()
        return template_time().strftime("Today: %d %b %Y\n")

    yield move
    monkeypatch.undo()
    time.tzset()


def dates(folder: Path) -> set[str]:
    return {prompt.split("user:")[0] for prompt in cavesson.open(folder).rows(["prompt"])["prompt"].to_pylist()}


def resume(folder: Path, steps: int) -> None:
    Training(settings(folder, **CHAT, steps=steps), prompts=["a", "b"], rewards=uneven, resume=True).run(quiet)


def test_a_run_keeps_the_date_on_which_it_began(tmp_path, zone):
    run, fresh, inputs = tmp_path / "run", tmp_path / "fresh", {"prompts": ["a", "b"]}
    first = zone(EAST)
    build(run, inputs, **CHAT, steps=1).run(quiet)
    second = zone(WEST)
    assert first != second
    resume(run, 2)
    assert dates(run) == {first}
    build(fresh, inputs, **CHAT, steps=1).run(quiet)
    assert dates(fresh) == {second}


def test_a_run_of_an_older_version_has_the_date_of_its_first_attempt(tmp_path, zone):
    today = zone(WEST)
    build(tmp_path / "run", {"prompts": ["a", "b"]}, **CHAT, steps=1).run(quiet)
    file = tmp_path / "run" / "run.json"
    info = json.loads(file.read_text())
    del info["began"]
    file.write_text(json.dumps(info))
    first = tmp_path / "run" / "attempts" / "0000.json"
    assert json.loads(first.read_text())["started"]
    resume(tmp_path / "run", 2)
    assert dates(tmp_path / "run") == {today}


def test_the_date_holds_inside_of_its_block_only(zone):
    zone(EAST)
    then = template_time()
    zone(WEST)
    with templates_at(then):
        assert abs(template_time() - then).total_seconds() < 1
    assert abs(template_time() - then).total_seconds() > 20 * 3600
