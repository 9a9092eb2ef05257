"""The notebooks run from the first cell to the last, and each last expression has something to display."""

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"


def executed(notebook: Path) -> list[Any]:
    """The values of the last expressions of the code cells, which are executed one after the other, as Jupyter does."""
    shown: list[Any] = []
    names: dict[str, Any] = {}
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert not cell["outputs"] and cell["execution_count"] is None
        body = ast.parse("".join(cell["source"]))
        last = body.body.pop() if isinstance(body.body[-1], ast.Expr) else None
        exec(compile(body, notebook.name, "exec"), names)
        if last is not None:
            shown.append(eval(compile(ast.Expression(last.value), notebook.name, "eval"), names))
    return shown


@pytest.fixture(autouse=True)
def _places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notebooks run in their folder, and write to a temporary one."""
    monkeypatch.chdir(NOTEBOOKS)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.mark.slow
def test_train_and_look(capsys: pytest.CaptureFixture[str]) -> None:
    settings, _, run, chart, findings, rollout, _, comparison, _ = executed(NOTEBOOKS / "train_and_look.ipynb")
    assert "steps=20" in repr(settings) and "seed" not in repr(settings)
    assert chart._repr_png_().startswith(b"\x89PNG") and findings.summary in findings._repr_html_()
    rows = {row["metric"]: row for row in comparison.table.to_pylist()}
    assert rows["reward/mean"]["run"] == pytest.approx(np.mean(run.steps()["reward/mean"].to_pylist()[-5:]))
    assert len(rollout.texts) == rollout.row["length"]
    assert capsys.readouterr().out.count(rollout.row["prompt"]) == 1


def test_why_did_this_run_fail(capsys: pytest.CaptureFixture[str]) -> None:
    """The bug that `failed_run.py` planted is found first, and the record agrees with what TRL wrote."""
    report, chart, findings, rollout, parts, _ = executed(NOTEBOOKS / "why_did_this_run_fail.ipynb")
    tables = [pq.read_table(file) for file in sorted(NOTEBOOKS.glob("failed_run/completions/*.parquet"))]
    assert report.rollouts == sum(table.num_rows for table in tables) == 960
    assert len(chart.axes) == 3
    assert [one.rule for one in findings] == ["one-part-dominates", "never-ends"] and "headings" in findings[0].cause
    logged = json.loads((NOTEBOOKS / "failed_run" / "trainer_state.json").read_text())["log_history"]
    clipped = [line["completions/clipped_ratio"] for line in logged if "completions/clipped_ratio" in line]
    assert findings[1].severity == "note" and np.mean(clipped) > 0.9
    # What the bug counts as headings are the signs in the responses.
    assert rollout.row["reward_parts"]["headings"] == rollout.row["response"].count("#") > 5
    expected = [(step, *_means(tables[step - 1])) for step in range(5, 31, 5)]
    np.testing.assert_allclose([row[:3] for row in parts.fetchall()], expected)
    assert findings.summary in capsys.readouterr().out


def _means(table: pa.Table) -> tuple[float, float]:
    return float(np.mean(table["lowercase"])), float(np.mean(table["headings"]))


@pytest.mark.slow
def test_an_agent_with_a_tool(capsys: pytest.CaptureFixture[str]) -> None:
    """Who looks is right more often than who guesses one sky of four, and the policy learns to look."""
    *_, rollout, _, turns, chart, shares, findings = executed(NOTEBOOKS / "an_agent_with_a_tool.ipynb")
    assert list(turns["role"])[-3:] == ["assistant", "tool", "assistant"]
    assert f"[tool look {turns['arguments'].iloc[-2]}]\n{turns['text'].iloc[-2]}" in capsys.readouterr().out
    assert rollout.row["calls"] >= 1
    share = {(early, called): (rollouts, right) for early, called, rollouts, right in shares.fetchall()}
    assert sum(rollouts for rollouts, _ in share.values()) == 10 * 64
    assert share[False, True][1] > 2 * 0.25 > share[True, False][1]
    assert share[False, True][0] > share[True, True][0]
    assert len(chart.axes) == 2 and findings.summary
