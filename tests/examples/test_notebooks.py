"""The notebooks run from the first cell to the last, and each last expression has something to display."""

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
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


@pytest.mark.slow
def test_train_and_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    settings, _, run, chart, findings, rollout, _, comparison, _ = executed(NOTEBOOKS / "train_and_look.ipynb")
    assert "steps=20" in repr(settings) and "seed" not in repr(settings)
    assert chart._repr_png_().startswith(b"\x89PNG") and findings.summary in findings._repr_html_()
    rows = {row["metric"]: row for row in comparison.table.to_pylist()}
    assert rows["reward/mean"]["run"] == pytest.approx(np.mean(run.steps()["reward/mean"].to_pylist()[-5:]))
    assert len(rollout.texts) == rollout.row["length"]
    assert capsys.readouterr().out.count(rollout.row["prompt"]) == 1
