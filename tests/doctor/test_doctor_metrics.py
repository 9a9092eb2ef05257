"""docs/metrics.md names the metrics that rules read, and a metric whose meaning is unknown is no error."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doctor_helpers import healthy

import cavesson.doctor
from cavesson.doctor.data import RunData
from cavesson.doctor.derive import BY_NAME
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.names import ALIASES
from cavesson.doctor.rules import RULES
from cavesson.record import Recorder, begin_attempt, write_run
from cavesson.record import open as open_run

DOCS = Path(__file__).parents[2] / "docs"
CODE = "\n".join(file.read_text("utf-8") for file in Path(cavesson.doctor.__file__).parent.rglob("*.py"))
LOGGED_HERE = "\n".join(file.read_text("utf-8") for file in (DOCS / "algorithms").glob("*.md"))
ROWS = re.findall(
    r"^\| `([^`]+)` \|([^|]*)\|(.*)\|$", (DOCS / "metrics.md").read_text("utf-8").replace(r"\|", ""), re.M
)


def test_the_page_lists_each_metric_that_rules_read_under_all_its_names() -> None:
    read = set(re.findall(r"\bsteps\.([a-z_]+/[a-z_0-9/]+)", CODE)) | set(re.findall(r'metric\("([^"]+)"\)', CODE))
    derived = {name for name in read if f"steps.{name}" in BY_NAME and f"`{name}`" not in LOGGED_HERE}
    assert [name for name, *_ in ROWS] == list(dict.fromkeys(name for name, *_ in ROWS))
    assert {name for name, *_ in ROWS} == (read | ALIASES.keys()) - derived
    for name, others, _ in ROWS:
        assert tuple(re.findall(r"`([^`]+)`", others)) == ALIASES.get(name, ()), name


def test_the_page_says_of_each_when_it_is_measured() -> None:
    for name, _, rest in ROWS:
        what, _of, _unit, measured = (cell.strip() for cell in rest.split("|"))
        assert what and measured in ("before", "during", "before or during", "after"), name


def run(folder: Path, metrics: dict[str, Any], info: dict[str, Any], steps: int = 24) -> RunData:
    made = healthy()
    write_run(folder, info)
    with Recorder(folder, attempt=begin_attempt(folder, 0)) as recorder:
        for step in range(steps):
            rows = {name: made.rows[name][step] for name in ("prompt", "response", "reward")}
            tokens = {name: made.tokens[name][step] for name in ("token_id", "logprob", "ref_logprob", "mask")}
            recorder.rollouts(step, rows, tokens)
            recorder.metrics(step, {name: float(np.broadcast_to(one, steps)[step]) for name, one in metrics.items()})
    return RunData(open_run(folder))


def errors(data: RunData) -> set[str]:
    return {one.rule.name for one in diagnose(data, RULES).findings if one.severity == "error"}


@pytest.mark.parametrize("prefix", ["", "train/"])
@pytest.mark.parametrize("level", [-3.0, 0.4, 50.0])
def test_a_kl_entropy_or_ratio_of_which_nobody_knows_what_it_is_is_no_error(
    level: float, prefix: str, tmp_path: Path
) -> None:
    """With and without tokens to compare it with."""
    metrics = {f"{prefix}{name}": level + np.linspace(0, 0.1, 24) for name in ("kl", "entropy", "ratio")}
    with_tokens = run(tmp_path / "tokens", metrics, {})
    assert errors(with_tokens) <= errors(run(tmp_path / "alone", {}, {}))
    write_run(tmp_path / "metrics", {})
    with Recorder(tmp_path / "metrics") as recorder:
        for step in range(24):
            recorder.metrics(step, {name: float(values[step]) for name, values in metrics.items()})
    assert errors(RunData(open_run(tmp_path / "metrics"))) == set()


@pytest.mark.parametrize(("level", "rule"), [(-3.0, "negative-kl"), (50.0, "unknown-estimate")])
def test_what_a_kl_would_show_is_undecided_without_a_trainer_and_an_error_with_one(
    level: float, rule: str, tmp_path: Path
) -> None:
    rules = [one for one in RULES if one.name == rule]
    for name, info in {"unknown": {}, "trl": {"trainer": "trl 1.16.0", "algorithm": "grpo"}}.items():
        folder = tmp_path / name
        if rule == "negative-kl":
            write_run(folder, info)
            with Recorder(folder) as recorder:
                for step in range(24):
                    recorder.metrics(step, {"kl": level})
            data = RunData(open_run(folder))
        else:
            data = run(folder, {"kl": level}, info)
        found = diagnose(data, rules)
        assert [one.rule.name for one in found.findings] == ([rule] if name == "trl" else [])
        assert [one.undecided for one in found.skipped] == ([] if name == "trl" else [True])
