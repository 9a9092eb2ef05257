"""What an opened run shows in a notebook: findings, charts, comparisons and rollouts."""

import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cavesson
from cavesson.analysis.chart import MetricCurve, smoothed
from cavesson.record import Recorder, write_run, write_vocabulary

HOSTILE = '<img src=x onerror="alert(1)">\x1b]0;t\x07&"'
VISIBLE = HOSTILE.replace("\x1b", "␛").replace("\x07", "␇")
TURNS = {
    "sample": [0, 0, 0],
    "role": ["assistant", "tool", "assistant"],
    "name": [None, "look", None],
    "arguments": [None, "{}", None],
    "text": ["a", HOSTILE, "b"],
    "first_token": [0, 1, 2],
    "tokens": [1, 1, 1],
}


def recorded(
    folder: Path, metrics: dict[str, list[float]], turns: dict[str, Any] | None = None
) -> cavesson.RunAnalysis:
    """A run of one response per step, of the three tokens a, HOSTILE and b."""
    write_run(folder, {"algorithm": "ppo"})
    write_vocabulary(folder, ["a", "h", "b"], ["a", HOSTILE, "b"])
    tokens = {
        "attended": np.ones((1, 3), bool), "learned": np.array([[True, False, True]]),
        "token_id": np.array([[0, 1, 2]]), "logprob": np.array([[-1.0, -3.0, -2.0]]),
        "ref_logprob": np.array([[-2.0, -3.0, -1.5]]),
    }  # fmt: skip
    row = {"sample": [0], "prompt": [HOSTILE], "response": ["a b"], "reward": [0.5]}
    with Recorder(folder) as recorder:
        for step, values in enumerate(zip(*metrics.values(), strict=True)):
            recorder.rollouts(step, row, tokens, turns)
            recorder.metrics(step, dict(zip(metrics, values, strict=True)))
    return cavesson.open(folder)


def tokens_of(html: str) -> list[tuple[str, float, bool]]:
    """The text of each coloured token, the signed strength of its colour, and whether it is faint."""
    found = []
    for span in ET.fromstring(html).iter("span"):
        if "title" in span.attrib:
            colour = re.match(r"background:rgba\((\d+),\d+,\d+,([\d.]+)\)", span.attrib["style"])
            assert colour is not None
            sign = 1 if colour[1] == "42" else -1
            found.append((span.text or "", sign * float(colour[2]), "opacity" in span.attrib["style"]))
    return found


def test_tokens_are_coloured_by_what_training_changed(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", {"reward/mean": [0.5]})
    rollout = run.rollout(0, 0)
    row, tokens = rollout
    assert row["response"] == "a b" and tokens.num_rows == 3
    assert repr(rollout) == "Rollout(step=0, sample=0, 3 tokens)"
    # log π − log π_ref is 1, 0 and −0.5; the 98 % quantile of the sizes 0, 0.5, 1 is 0.98.
    (a, first, a_faint), (tool, second, tool_faint), (b, third, b_faint) = tokens_of(rollout._repr_html_())
    assert (a, tool, b) == ("a", VISIBLE, "b") and (a_faint, tool_faint, b_faint) == (False, True, False)
    assert (first, abs(second)) == (0.62, 0.0) and third == pytest.approx(-0.62 * 0.5 / 0.98, abs=0.006)
    tags = {element.tag for element in ET.fromstring(rollout._repr_html_()).iter()}
    assert tags <= {"div", "strong", "table", "tr", "th", "td", "i", "span", "small"}


def test_a_rollout_is_printed_as_texts(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", {"reward/mean": [0.5]})
    said = str(run.rollout(0, 0))
    assert said.startswith("step 0, sample 0: reward 0.500, length 2, ")
    assert said.endswith(f"\n\n[prompt]\n{VISIBLE}\n\n[response]\na b")


def test_an_episode_is_a_conversation(tmp_path: Path) -> None:
    rollout = recorded(tmp_path / "run", {"reward/mean": [0.5]}, TURNS).rollout(0, 0)
    assert str(rollout).endswith(f"\n[assistant]\na\n\n[tool look {{}}]\n{VISIBLE}\n\n[assistant]\nb")
    body = list(ET.fromstring(rollout._repr_html_()))[-1]
    said = [element.text or element[0].text for element in body if element.tag in ("div", "span")][:-1]
    assert said == ["assistant", "a", "tool look {}", VISIBLE, "assistant", "b"]


def test_runs_are_compared_by_the_last_values(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", {"reward/mean": [0.0, 1.0, 3.0], "kl/objective": [1.0, 2.0, math.nan]})
    other = recorded(tmp_path / "other", {"reward/mean": [5.0, 7.0], "loss/value": [1.0, 1.0]})
    compared = run.compare(tmp_path / "other", last=2)
    lines = {row["metric"]: (row["run"], row["other"], row["difference"]) for row in compared.table.to_pylist()}
    assert lines["reward/mean"] == (2.0, 6.0, 4.0) and lines["loss/value"] == (None, 1.0, None)
    assert not {"step", "attempt"} & set(lines)
    assert run.compare(other).table["difference"].to_pylist()[0] == 4.0
    (row,) = [row for row in ET.fromstring(compared._repr_html_()).iter("tr") if row[0].text == "reward/mean"]
    assert [cell.text for cell in row] == ["reward/mean", "2", "6", "4"]
    assert re.search(r"reward/mean\W+2\W+6\W+4\W", repr(compared))


def test_a_curve_of_many_steps_is_means_with_their_deviation() -> None:
    curve = MetricCurve(np.arange(6.0), np.array([1.0, 3.0, 5.0, 5.0, 0.0, 8.0]))
    steps, means, deviations = smoothed(curve, 3)
    assert steps.tolist() == [0.5, 2.5, 4.5] and means.tolist() == [2.0, 5.0, 4.0]
    assert deviations.tolist() == [1.0, 0.0, 4.0]
    whole = smoothed(curve, 6)
    assert whole.means.tolist() == curve.values.tolist() and not whole.deviations.any()


def test_a_chart_has_a_panel_per_metric(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", {"reward/mean": [1.0, math.nan, 3.0, 5.0], "other": [1.0, 2.0, 3.0, 4.0]})
    chart = run.plot("other", "reward/mean", points=2, findings=False)
    assert [axes.get_ylabel() for axes in chart.axes] == ["other", "reward/mean"]
    first, second = (axes.lines[0].get_xydata().tolist() for axes in chart.axes)
    # The NaN is omitted; 1 and the pair 3, 5 are left.
    assert first == [[0.5, 1.5], [2.5, 3.5]] and second == [[0.0, 1.0], [2.5, 4.0]]
    assert chart._repr_png_().startswith(b"\x89PNG")
    assert [axes.get_ylabel() for axes in run.plot(findings=False).axes] == ["reward/mean"]
    with pytest.raises(cavesson.UserError, match=r"has no metric 'reward/men'; did you mean 'reward/mean'\?"):
        run.plot("reward/men")
