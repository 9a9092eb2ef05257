"""The lines of code that record what is missing: they run, they record what they name, and the docs have them."""

import ast
import builtins
import io
import re
from pathlib import Path
from typing import Any

import pytest
from doctor_helpers import healthy
from rich.console import Console

import cavesson
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import Diagnosis, diagnose
from cavesson.doctor.failures import FAILURES, not_excluded
from cavesson.doctor.recording import ALWAYS, WAYS, fewest_recipes, recipes
from cavesson.doctor.report.page import page
from cavesson.doctor.report.plain import plain
from cavesson.doctor.report.terminal import show
from cavesson.doctor.rules import RULES
from cavesson.doctor.words import LANGUAGES, language
from cavesson.record import Recorder, begin_attempt, write_run
from cavesson.record.write.statistics import STATISTICS

DOCS = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text("utf-8")
COMMON = {rule for failure in FAILURES for rule in failure.rules}
NEEDS = sorted({need for rule in RULES if rule.name in COMMON for need in rule.needs if not need.startswith(ALWAYS)})
VALUES: dict[str, Any] = {
    "prompts": ["p", "q"], "responses": ["a", "b c"], "rewards": [0.5, 1.0], "splits": ["train", "eval"],
    "finish_reasons": ["eos", "length"], "kl_coefs": [0.1, 0.1], "token_ids": [[1], [2, 3]], "groups": [0, 0],
    "advantages": [[0.5], [-0.25, -0.25]], "reward_parts": [{"one": 0.5}, {"one": 1.0}], "prompt_ids": [[1], [2]],
    "samples": [0, 0], "roles": ["assistant", "tool"], "names": [None, "search"], "texts": ["a", "b"],
    "first_tokens": [0, 0], "tokens": [1, 2], "sources": [["sampled"], ["sampled", "tool"]],
    "total": 2.0, "objective": 0.25, "approx_kl": 0.01,
    "clip_fraction": 0.1, "first_ratio_error": 0.0, "ratio": 1.0, "coef": 0.05, "grad_norm": 0.5,
}  # fmt: skip
"""Of the variables in the lines; those of all other token columns are numbers."""


def run_lines(code: str) -> None:
    """Run the lines for a custom loop for three steps, as if they had been pasted into one."""
    setup, _, calls = code.partition("\nrecorder.")
    names = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    given = {name: VALUES.get(name, [[-0.5], [-0.25, -1.0]]) for name in names - set(dir(builtins))}
    exec(setup, given)
    for step in range(3):
        exec(f"recorder.{calls}", given | {"step": step})
    given["recorder"].close()


def recorded(need: str, folder: str) -> bool:
    data = RunData(cavesson.open(folder))
    return any(data.has(one) for one in need.split("|"))


@pytest.mark.parametrize("need", NEEDS)
def test_the_lines_for_an_own_loop_record_what_they_name(need, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (recipe,) = recipes({}, [need])
    run_lines(recipe.code)
    assert recorded(need, "runs/own")
    assert recipe.columns and all(recorded(column, "runs/own") for column in recipe.columns)


def test_the_rules_of_every_failure_exist():
    assert {rule.name for rule in RULES} >= COMMON


def test_one_call_records_all_that_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (recipe,) = recipes({"format": "rl-logging-board"}, NEEDS)
    assert recipe.trainer == "your own loop"
    run_lines(recipe.code)
    assert [need for need in NEEDS if not recorded(need, "runs/own")] == []
    assert [column for column in recipe.columns if not recorded(column, "runs/own")] == []


def test_a_setting_alone_needs_no_line():
    assert recipes({}, ["info.config.ppo.lam"]) == []


def test_nothing_is_to_be_added_to_our_own_trainer():
    assert recipes({"cavesson": "0.1", "algorithm": "grpo"}, ["tokens.sampler_logprob"]) == []


@pytest.mark.parametrize(
    ("info", "trainer"),
    [
        ({"trainer": "trl 1.16.0", "algorithm": "grpo"}, "TRL"),
        ({"format": "trl"}, "TRL"),
        ({"trainer": "verl", "algorithm": "ppo"}, "verl"),
        ({"format": "verl"}, "verl"),
        ({"format": "openrlhf"}, "OpenRLHF"),
        ({"format": "prime-rl"}, "prime-rl"),
        ({"cavesson": "0.1"}, "your own loop"),
        ({"trainer": "another"}, "your own loop"),
    ],
)
def test_the_line_is_that_of_the_run_s_trainer_alone(info, trainer):
    found = recipes(info, ["tokens.logprob", "tokens.ref_logprob"])
    assert {recipe.trainer for recipe in found} == {trainer}
    assert {column for recipe in found for column in recipe.columns} == {"tokens.logprob", "tokens.ref_logprob"}


def test_what_an_import_has_without_a_condition_is_not_recorded_by_importing_again():
    found = recipes({"format": "nemo-rl"}, ["tokens.logprob", "tokens.ref_logprob"])
    assert [one.columns for one in found] == [("tokens.ref_logprob",)]


def test_a_column_that_needs_a_setting_says_so_and_others_do_not():
    (both,) = recipes({"format": "verl"}, ["tokens.sampler_logprob", "tokens.logprob"])
    assert both.code.endswith("\n# tokens.sampler_logprob: actor_rollout_ref.rollout.calculate_log_probs=True")
    (one,) = recipes({"format": "verl"}, ["tokens.logprob"])
    assert "\n#" not in one.code
    (statistic,) = recipes({"format": "trl"}, ["rows.kl_k1|steps.kl/objective"])
    assert statistic.columns == ("rows.kl_k1",) and "# tokens.ref_logprob: beta > 0" in statistic.code


def test_what_the_trainer_cannot_record_is_recorded_by_hand():
    (recipe,) = recipes({"format": "nemo-rl"}, ["tokens.token_reward"])
    assert recipe.trainer == "your own loop" and '"token_reward": token_rewards' in recipe.code


def bare(folder: Path, **info: Any) -> tuple[RunData, Diagnosis]:
    """A run with nothing but texts and rewards."""
    made = healthy()
    write_run(folder, info)
    with Recorder(folder, attempt=begin_attempt(folder, start_step=0)) as recorder:
        for step in range(len(made.mask)):
            recorder.rollouts(step, {name: made.rows[name][step] for name in ("prompt", "response", "reward")})
    data = RunData(cavesson.open(folder))
    return data, diagnose(data, RULES)


@pytest.mark.parametrize("info", [{}, {"format": "trl"}])
def test_terminal_page_and_json_show_the_lines(info, tmp_path):
    both = bare(tmp_path / "run", **info)
    lacking = [need for one in not_excluded(both[1]) for need in one.lacking]
    (recipe,) = recipes(info, lacking)
    for name in LANGUAGES:
        out = io.StringIO()
        show(Console(file=out, width=1000), *both, language(name), every_failure=True)
        text, html = out.getvalue(), page(*both, language(name))
        title = language(name).phrases.get("To record {what} with {trainer}", "To record {what} with {trainer}")
        start = title.partition("{")[0]
        for line in recipe.code.splitlines():
            assert f"    {line}" in [one.rstrip() for one in text.splitlines()]
        assert start in text and start in html and "docs/integrations.md#" in text
        _short, block = re.findall(r"<pre>(.*?)</pre>", html, re.S)
        assert block.replace("&quot;", '"').replace("&gt;", ">") == recipe.code
        assert plain(*both, language(name))["recording"] == [
            {"trainer": recipe.trainer, "columns": recipe.columns, "code": recipe.code,
             "docs": "docs/integrations.md#what-records-which-column"}
        ]  # fmt: skip


@pytest.mark.parametrize("info", [{}, {"format": "trl"}])
def test_a_short_report_shows_three_failures_and_the_lines_that_decide_more_than_half(info, tmp_path):
    both = bare(tmp_path / "run", **info)
    titles = [str(one.failure.title) for one in not_excluded(both[1])]
    short, every, html = io.StringIO(), io.StringIO(), page(*both, language("en"))
    show(Console(file=short, width=1000), *both, language("en"))
    show(Console(file=every, width=1000), *both, language("en"), every_failure=True)
    for title in titles[:3]:
        assert title in short.getvalue() and title in every.getvalue() and title in html
    for title in titles[3:]:
        assert title not in short.getvalue() and title in every.getvalue()
        assert title in html.partition(f"<summary>{len(titles) - 3} more</summary>")[2]
    assert f"({len(titles)})" in short.getvalue() and f"{len(titles) - 3} more: " in short.getvalue()
    assert "run --all" in short.getvalue() and "more: " not in every.getvalue()
    (decided,) = re.findall(r"To decide (\d+) of them", short.getvalue())
    assert len(titles) / 2 < int(decided) < len(titles)


def test_few_additions_decide_more_than_half_of_the_failures():
    several = [
        ["tokens.logprob", "tokens.ref_logprob", "tokens.value"],
        ["rows.kl_k1|steps.kl/objective"],  # computed from two columns of tokens
        ["rows.split"],
        ["tokens.logprob"],
        ["info.kl.place", "tokens.logprob"],  # a column alone does not decide it
        [],
    ]
    # By what each adds: split (1), logprob (1), then ref_logprob; three of six are not yet more than half.
    found, decided = fewest_recipes({}, several)
    assert decided == 4  # and value, after which nothing is left that columns decide
    assert {name for one in found for name in one.columns} == {
        "rows.split", "tokens.logprob", "tokens.ref_logprob", "tokens.value",
    }  # fmt: skip
    found, decided = fewest_recipes({}, several[1:4])
    assert decided == 2 and {name for one in found for name in one.columns} == {"rows.split", "tokens.logprob"}


def test_what_a_hook_records_without_a_condition_is_no_addition():
    several = [["tokens.ref_logprob"], ["tokens.logprob", "rows.prompt_ids", "tokens.advantage"], ["steps.time/step"]]
    ((recipe,), decided) = fewest_recipes({"format": "verl"}, several[:1] + several[1:2] * 2)
    assert decided == 2 and recipe.columns == ("tokens.logprob", "rows.prompt_ids", "tokens.advantage")
    # A time is recorded by hand only, and the lines are those of the hook.
    ((recipe,), decided) = fewest_recipes({"format": "verl"}, several)
    assert decided == 2 and recipe.trainer == "verl" and "tokens.ref_logprob" in recipe.columns
    ((recipe,), decided) = fewest_recipes({"format": "verl"}, several[2:])
    assert decided == 1 and recipe.trainer == "your own loop"


def test_where_everything_is_excluded_no_lines_are_shown(tmp_path):
    data = healthy().data(tmp_path / "run")
    diagnosis = diagnose(data, [rule for rule in RULES if rule.name == "negative-kl"])
    assert plain(data, diagnosis, language("en"))["recording"] == []
    assert "<pre>" not in page(data, diagnosis, language("en"))


def columns_in(cell: str, kind: str) -> set[str]:
    return {f"{kind}.{name}" for name in re.findall(r"`(\w+)`", cell)}


def conditions_in(cell: str, columns: set[str]) -> dict[str, str]:
    """Return the condition of each column in a cell such as "`a`, `b`: PPO; `c`: beta > 0"."""
    found = {}
    for part in filter(None, cell.strip().split("; ")):
        names, _, condition = part.partition(": ")
        for name in re.findall(r"`(\w+)`", names):
            (column,) = [one for one in columns if one.partition(".")[2] == name]
            found[column] = condition
    return found


def test_the_table_in_the_docs_is_what_the_ways_record():
    computed = {f"rows.{name}" for name in STATISTICS}
    table = DOCS.partition("## What records which column")[2]
    rows = {cells[0]: cells[1:] for line in re.findall(r"^\| \[(.*)\|$", table, re.M) for cells in [line.split("|")]}
    for trainer in {way.trainer for way in WAYS}:
        (cells,) = [row for title, row in rows.items() if title.startswith(f"{trainer}]")]
        ways = [way for way in WAYS if way.trainer == trainer]
        written = columns_in(cells[0], "rows") | columns_in(cells[1], "tokens") | columns_in(cells[2], "turns")
        assert written == set().union(*(way.records for way in ways)) - computed
        wanted = {column: text for way in ways for column, text in way.requires.items()}
        assert conditions_in(cells[3], written) == wanted


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_the_docs_have_the_lines(way):
    text = " ".join(DOCS.split())
    for line in way.code.splitlines():
        assert " ".join(line.partition("  #")[0].split()) in text


def test_what_a_condition_is_stated_of_is_recorded():
    assert [one for way in WAYS for one in way.requires if one not in way.records] == []


def test_the_settings_as_a_whole_are_recorded_where_run_json_has_them(tmp_path: Path) -> None:
    """By what run.json has: settings of ours, or nothing of them."""
    write_run(tmp_path / "ours", {"cavesson": "0", "config": {"kl": {"coef": 0.1}}})
    write_run(tmp_path / "theirs", {"trainer": "verl"})
    ours, theirs = (RunData(cavesson.open(tmp_path / name)) for name in ("ours", "theirs"))
    assert ours.recorded("info.config") and not theirs.recorded("info.config")
