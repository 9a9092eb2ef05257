"""Responses that no reward judges, or that only some parts judge, in the tools that print and write rewards."""

import json
import subprocess
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavesson.config import load
from cavesson.ops.intervals import mean_interval
from cavesson.tools.compare import compare, rows
from cavesson.tools.evaluate import evaluate
from cavesson.tools.score import estimate_gain, score
from cavesson.tools.settings import CompareSettings, EvaluateSettings, ScoreSettings

REWARDS = """
def short(prompts, responses, **columns):
    \"\"\"Judges every response to all but the first prompt.\"\"\"
    return [None if prompt == "On the table" else float(len(one) < 9) for prompt, one in zip(prompts, responses)]

def silent(prompts, responses, **columns):
    return [None] * len(responses)
"""
PROMPTS = ["On the table", "My", "A dog and"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps({'prompt': one})}\n" for one in PROMPTS))
    return tmp_path


def flags(folder: Path, *names: str) -> list[str]:
    uses = ", ".join(f'{{use = "{folder}/rewards.py:{name}"}}' for name in names)
    return ["--rewards", f"[{uses}]", "--device", "cpu"]


def test_evaluate_counts_what_is_judged_and_names_a_reward_that_judges_nothing(models: Path, folder: Path) -> None:
    given = ["--data.path", f"{folder}/prompts.jsonl", "--samples", "2", "--sampling.max_new_tokens", "8"]
    found = evaluate(str(models / "one"), load(EvaluateSettings, None, [*given, *flags(folder, "short", "silent")]))
    judged = [one["short"] for one in found.responses if one["short"] is not None]
    assert len(found.responses) == 6 and len(judged) == 4 and found.rewards["reward"].mean == fmean(judged)
    *_, total, part, idle = str(found).splitlines()
    for name, line in (("reward", total), ("short", part)):
        assert line.startswith(f"{name}  {fmean(judged):.3f} (") and line.endswith(", 95 % interval, 4 of 6 responses")
    assert idle == "silent  judges none of 6 responses"
    alone = evaluate(str(models / "one"), load(EvaluateSettings, None, [*given, *flags(folder, "silent")]))
    assert str(alone) == "silent  judges none of 6 responses" and alone.rewards == {}


def test_compare_counts_what_is_not_judged_and_sorts_it_last(models: Path, folder: Path) -> None:
    given = ["--prompts", f"{folder}/prompts.jsonl", "--samples", "2", "--sampling.max_new_tokens", "8"]
    settings = [*given, *flags(folder, "short"), "--out", f"{folder}/out"]
    found = compare([str(models / "one"), str(models / "two")], load(CompareSettings, None, settings))
    table = dict(rows(found))
    assert table["not judged by any reward"] == ["2 of 6", "2 of 6"]
    assert not any("nan" in cell for cells in table.values() for cell in cells)
    written = json.loads((folder / "out" / "comparison.json").read_text(), parse_constant=pytest.fail)
    for column in written["columns"]:
        assert [one["reward"] is None for one in column["responses"]] == [True, True, False, False, False, False]
    keys = [part.split('"')[0] for part in (folder / "out" / "comparison.html").read_text().split('data-key="')[1:]]
    assert keys[1:3] == keys[4:6] == ["", ""] and all(float(key) in (0, 1) for key in keys[7:9])

    nobody = compare(
        [str(models / "one"), str(models / "two")], load(CompareSettings, None, [*given, *flags(folder, "silent")])
    )
    assert dict(rows(nobody))["not judged by any reward"] == ["6 of 6", "6 of 6"]
    assert nobody.columns[1].difference is nobody.columns[1].win_rate is None


SORT = """
const cells = %s.map(key => ({cells: [{}, {dataset: {key}}]}));
const heading = () => ({firstElementChild: {addEventListener: (_, act) => { heading.act = act; }},
  attributes: {}, hasAttribute(n) { return n in this.attributes; }, getAttribute(n) { return this.attributes[n]; },
  setAttribute(n, v) { this.attributes[n] = v; }, removeAttribute(n) { delete this.attributes[n]; }});
const said = [];
const body = {rows: cells, append: (...rows) => said.push(rows.map(row => row.cells[1].dataset.key))};
globalThis.document = {getElementById: () => ({tHead: {rows: [{cells: [heading(), heading()]}]}, tBodies: [body]})};
%s
heading.act(); heading.act();
console.log(JSON.stringify(said));
"""


def test_the_page_sorts_them_behind_all_others_both_ways() -> None:
    script = Path(__file__).parents[2] / "src/cavesson/tools/templates/comparison.js"
    program = SORT % (json.dumps(["", "-1", "2", "", "0"]), script.read_text())
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [["2", "0", "-1", "", ""], ["-1", "0", "2", "", ""]]


def test_score_says_how_many_a_part_judges(folder: Path) -> None:
    lines: list[dict[str, Any]] = [{"prompt": prompt, "response": "yes"} for prompt in PROMPTS]
    (folder / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    out = ["--out", f"{folder}/out.jsonl"]
    summary = score(f"{folder}/in.jsonl", load(ScoreSettings, None, [*flags(folder, "short", "silent"), *out]))
    assert str(summary).splitlines()[1:] == [
        # Both that are judged are right: 0.025 ** (1 / 2).
        "reward  1.000 (0.158 to 1.000), 2 of 3 responses",
        "short  1.000 (0.158 to 1.000), 2 of 3 responses",
        "not judged by any reward: 1 response",
    ]
    written = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert [one["reward"] for one in written] == [None, 1.0, 1.0]


@given(st.lists(st.tuples(*[st.sampled_from([0.0, 0.5, 1.0])] * 2, st.integers(0, 3)), min_size=1), st.booleans())
def test_the_gain_of_a_share_is_at_most_1(values: list[tuple[float, float, int]], signed: bool) -> None:
    sure = [(float(one > 0), float(other > 0), group) for one, other, group in values] if signed else values
    after, before = ([2 * one[i] - 1 if signed else one[i] for one in sure] for i in (0, 1))
    groups = [group for *_, group in sure]
    found = estimate_gain(after, before, groups)
    plain = mean_interval([a - b for a, b in zip(after, before, strict=True)], groups)
    most = 2 if signed else 1
    assert found.mean == plain.mean and (found.low is None) == (plain.low is None)
    if plain.low is not None and plain.high is not None:
        assert (found.low, found.high) == (max(plain.low, -most), min(plain.high, most))


def test_the_gain_of_other_rewards_is_not_limited() -> None:
    assert estimate_gain([3.0, 5.0], [0.0, 0.0], [0, 1]) == mean_interval([3.0, 5.0], [0, 1])
