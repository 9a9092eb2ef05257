"""What a notebook shows of the findings of a run."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from doctor_helpers import healthy
from sick_kl import explosion

import cavesson


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> cavesson.RunAnalysis:
    made = healthy()
    explosion(made)
    made.settle()
    return cavesson.open(made.write(tmp_path_factory.mktemp("runs") / "run"))


def test_findings_are_objects_that_display_themselves(run: cavesson.RunAnalysis) -> None:
    findings = run.findings("en")
    (one,) = [one for one in findings if one.rule == "kl-explosion"]
    assert one.severity == "warning" and f"warning: {one.title}  since step {one.since_step}" in repr(findings)
    root = ET.fromstring(findings._repr_html_())
    heads = [head.text or "" for head in root.iter("strong")]
    assert heads[0] == findings.summary and len(heads) == 1 + len(findings)
    cells = [cell.text for cell in root.iter("td")]
    assert one.cause in cells and one.fix in cells
    assert run.findings("zh").summary != findings.summary


def test_a_chart_marks_where_findings_begin(run: cavesson.RunAnalysis) -> None:
    begun = {(one.since_step, one.title) for one in run.findings() if one.root and one.since_step is not None}
    (axes,) = run.plot("kl/objective").axes
    _, *marks = axes.lines
    assert begun and {(mark.get_xdata()[0], mark.get_label()) for mark in marks} == begun


def test_a_healthy_run_says_so(tmp_path: Path) -> None:
    findings = cavesson.open(healthy().write(tmp_path / "run")).findings("en")
    assert not findings and repr(findings).replace("\n", " ").split() == findings.summary.split()
    assert "none found anything wrong" in findings.summary
