"""What a prompt and a notebook show of a run, a training and its result."""

import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import cavesson
from cavesson.notebook import EDGE, HEIGHT, WIDTH, page
from cavesson.record import Recorder, write_run

HOSTILE = '<img src=x onerror="alert(1)">\x1b]0;t\x07&'


def tree(html: str) -> ET.Element:
    """The HTML as a tree: every element is closed, and nothing comes from anywhere else or runs."""
    root = ET.fromstring(html)
    known = {"div", "strong", "table", "tr", "th", "td", "figure", "figcaption", "svg", "polyline"}
    assert {element.tag for element in root.iter()} <= known
    names = {name for element in root.iter() for name in element.attrib}
    assert not {name for name in names if name.startswith("on")} and not names & {"src", "href"}
    assert "http" not in html and "url(" not in html
    return root


def test_a_run_shows_its_facts_and_curves(tmp_path: Path) -> None:
    write_run(tmp_path / "run", {"algorithm": "ppo", "model": {"name": HOSTILE}})
    with Recorder(tmp_path / "run") as recorder:
        for step, reward in enumerate([0.5, math.nan, 1.5, 1.0]):
            recorder.metrics(step, {"reward/mean": reward, "something/else": 1.0})
            row = {"sample": [0], "prompt": ["p"], "response": ["r"], "reward": [reward]}
            recorder.rollouts(step, row)
    run = cavesson.open(tmp_path / "run")
    assert repr(run) == f"Run({str(tmp_path / 'run')!r}, algorithm='ppo', model={HOSTILE!r})"
    root = tree(run._repr_html_())
    cells = {row[0].text: row[1].text for row in root.iter("tr")}
    assert cells["algorithm"] == "ppo" and (cells["steps"], cells["rollouts"]) == ("4", "4")
    assert cells["model"] == HOSTILE.replace("\x1b", "␛").replace("\x07", "␇")
    (caption,) = [element.text for element in root.iter("figcaption")]
    assert caption == "reward/mean: 0.5 → 1"
    (line,) = root.iter("polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    # Steps 0, 2, 3 across the width, and 0.5, 1.5, 1.0 from the bottom to the top; a NaN has no point.
    across = WIDTH - 2 * EDGE
    assert [x for x, _ in points] == [pytest.approx(EDGE + across * step / 3, abs=0.05) for step in (0, 2, 3, 3)]
    assert [y for _, y in points] == [HEIGHT - EDGE, EDGE, HEIGHT / 2, HEIGHT / 2]


def test_a_run_without_anything_yet(tmp_path: Path) -> None:
    write_run(tmp_path / "run", {})
    run = cavesson.open(tmp_path / "run")
    assert repr(run) == f"Run({str(tmp_path / 'run')!r})"
    assert "polyline" not in {element.tag for element in tree(run._repr_html_()).iter()}


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0], [-1.7e308, 1.7e308], [0.0, None, 5e-324], [None, None]])
def test_any_curve_lies_in_its_picture(values: list[float | None]) -> None:
    html = page("t", {}, {"reward/mean": (range(len(values)), values)})
    for number in re.findall(r"[\d.]+,([\d.-]+)", "".join(re.findall('points="(.*?)"', html))):
        assert EDGE <= float(number) <= HEIGHT - EDGE


def test_a_long_curve_stays_small_and_keeps_its_last_point() -> None:
    html = page("t", {}, {"reward/mean": (range(100_000), [float(step) for step in range(100_000)])})
    assert len(html) < 20_000 and f"{WIDTH - EDGE:.1f},{EDGE:.1f}" in html


@pytest.mark.slow
def test_a_training_and_its_result(tmp_path: Path) -> None:
    settings = cavesson.PPORun.model_validate(
        {"run": tmp_path / "run", "steps": 2, "batch_size": 4, "model": {"device": "cpu"}, "kl": {"coef": 0.25}}
    )
    training = cavesson.Training(
        settings, prompts=["a", "b"], rewards=lambda prompts, responses, **_: [1.0] * len(prompts)
    )
    assert repr(training) == f"Training(ppo, {str(tmp_path / 'run')!r}, 0 of 2 steps done)"
    cells = {row[0].text: row[1].text for row in tree(training._repr_html_()).iter("tr")}
    assert (cells["progress"], cells["steps"]) == ("0 of 2 steps", "2")
    assert cells["kl.coef"] == "0.25" and "kl.horizon" not in cells
    result = training.run(report=lambda *_: None)
    assert repr(result) == f"Result({str(tmp_path / 'run')!r}, 2 steps)"
    root = tree(result._repr_html_())
    assert "reward/mean: 1 → 1" in [element.text for element in root.iter("figcaption")]


def test_data_frames_without_arguments_are_the_rows(tmp_path: Path) -> None:
    write_run(tmp_path / "run", {})
    with Recorder(tmp_path / "run") as recorder:
        recorder.rollouts(0, {"sample": [0], "prompt": ["p"], "response": ["r"], "reward": [1.0]})
    run = cavesson.open(tmp_path / "run")
    assert run.pandas()["reward"].tolist() == run.polars()["reward"].to_list() == [1.0]
    assert list(run.pandas().columns) == run.polars().columns == run.rows().column_names


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_a_missing_package_is_one_line(tmp_path: Path, package: str) -> None:
    write_run(tmp_path / "run", {})
    code = f"""
import importlib.machinery, sys
class Nothing(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == {package!r} else super().find_spec(name, path, target)
sys.meta_path[-1] = Nothing
import cavesson
try:
    cavesson.open({str(tmp_path / "run")!r}).{package}()
except cavesson.UserError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == f"{package} is not installed; install it with: pip install {package}\n", done.stderr
