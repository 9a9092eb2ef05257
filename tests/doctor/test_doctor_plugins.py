"""Rules of the user's own, as docs/doctor.md shows them."""

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
from doctor_helpers import healthy

import cavesson
from cavesson.doctor import diagnose
from cavesson.doctor.data import RunData
from cavesson.doctor.plugins import all_rules, rules_in
from cavesson.errors import UserError

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"


@pytest.fixture
def file(tmp_path):
    section = PAGE.read_text().split("\n## Write your own rule\n")[1]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (tmp_path / "greets.py").write_text(code)
    return tmp_path / "greets.py"


@pytest.mark.parametrize(("share", "found"), [(0.3, True), (0.05, False)])
def test_the_rule_of_the_page_finds_what_it_says(share, found, file, tmp_path):
    made = healthy()
    greets = np.random.default_rng(1).random(made.rows["response"].shape) < share
    made.rows["response"] = np.where(greets, "Hello there", made.rows["response"])
    data = RunData(cavesson.open(made.write(tmp_path / "run")))
    diagnosis = diagnose(data, rules_in(file))
    assert [finding.rule.name for finding in diagnosis.findings] == (["greets"] if found else [])


def test_own_rules_stand_beside_ours(file):
    assert [rule.name for rule in all_rules([file])][-1] == "greets" and len(all_rules([file])) == len(all_rules()) + 1


def test_an_installed_package_may_bring_a_rule(file, tmp_path, monkeypatch):
    installed = tmp_path / "installed"
    (installed / "greetings-1.dist-info").mkdir(parents=True)
    (installed / "greetings-1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: greetings\nVersion: 1\n"
    )
    (installed / "greetings-1.dist-info" / "entry_points.txt").write_text("[cavesson.rules]\ngreets = greets:greets\n")
    file.rename(installed / "greets.py")
    monkeypatch.syspath_prepend(installed)
    assert [rule.name for rule in all_rules()][-1] == "greets"


@pytest.mark.parametrize("code", ["", "1 +", "raise ValueError", None])
def test_a_file_without_a_rule_is_one_line(code, tmp_path):
    file = tmp_path / "rules.py"
    if code is not None:
        file.write_text(code)
    with pytest.raises(UserError, match=r"rules\.py"):
        rules_in(file)


OWN = """from cavesson.doctor import Reading, rule

@rule(number=0, needs=["rows.response"], title="T", cause="Seen {{seen}}{cause}.", healthy="h", fix="f", source="s")
def mine(data):
    {body}
"""


@pytest.mark.parametrize(
    ("body", "cause", "said"),
    [
        ("raise ValueError('a mistake')", "", r"mine raised ValueError: a mistake \(.*rules\.py, line 5\)"),
        ("return {}['nothing']", "", r"mine raised KeyError: 'nothing' \(.*rules\.py, line 5\)"),
        ("import json; json.loads('')", "", r"mine raised JSONDecodeError.*rules\.py, line 5\)"),
        ("import sys; sys.exit()", "", r"mine raised SystemExit(: 0)? \(.*rules\.py, line 5\)"),
        ("data.rows['reward'][:] = 0", "", r"mine raised ValueError: .*read-only \(.*rules\.py, line 5\)"),
        ("data.sample['logprob'][0] = 0", "", r"mine raised ValueError: .*read-only \(.*rules\.py, line 5\)"),
        ("data.rows.step.sort()", "", r"mine raised ValueError: .*read-only \(.*rules\.py, line 5\)"),
        ("return 0.5", "", "mine returns 0.5; it must return a Reading"),
        ("return Reading(1.0, unhealthy=True)", " of {all}", "mine: .*placeholder.*'all'"),
        ("return Reading(1.0, unhealthy=True)", " {of", "mine: .*placeholder"),
    ],
)
def test_a_mistake_in_a_rule_is_a_line_that_names_its_place(body, cause, said, tmp_path):
    file = tmp_path / "rules.py"
    file.write_text(OWN.format(body=body, cause=cause))
    data = RunData(cavesson.open(healthy(steps=2, batch=4).write(tmp_path / "run")))
    with pytest.raises(UserError, match=said):
        diagnose(data, rules_in(file))


def test_a_rule_that_changes_the_settings_does_so_for_itself(tmp_path):
    data = RunData(cavesson.open(healthy(steps=2, batch=4).write(tmp_path / "run")))
    before = data.setting("config.kl.coef")
    data.info["config"]["kl"]["coef"] = 99
    data.setting("config.kl")["coef"] = 98
    assert data.setting("config.kl.coef") == before != 99


def test_the_words_of_a_rule_are_needed_where_it_finds_something(tmp_path):
    file = tmp_path / "rules.py"
    file.write_text(OWN.format(body="return Reading(1.0, unhealthy=False)", cause=" of {all}"))
    data = RunData(cavesson.open(healthy(steps=2, batch=4).write(tmp_path / "run")))
    assert [rule.name for rule, _ in diagnose(data, rules_in(file)).healthy] == ["mine"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ('needs=["response"]', "'response' is not one of rows.NAME"),
        ('needs=["rows.response|reward"]', "'reward' is not one of rows.NAME"),
        ('needs=["rows.response"], severity="fatal"', "'fatal' is not one of error, warning, note"),
    ],
)
def test_what_a_rule_needs_and_how_grave_it_is_have_known_names(change, said, tmp_path):
    file = tmp_path / "rules.py"
    file.write_text(OWN.format(body="return None", cause="").replace('needs=["rows.response"]', change))
    with pytest.raises(UserError, match=said):
        rules_in(file)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("nowhere:rule", "loading nowhere:rule of cavesson.rules raised ModuleNotFoundError"),
        ("json:loads", "json:loads of cavesson.rules is not a Rule"),
    ],
)
def test_a_package_whose_rule_is_none_is_one_line(value, said, monkeypatch):
    entry = EntryPoint("theirs", value, "cavesson.rules")
    monkeypatch.setattr("cavesson.plugins.entry_points", lambda group: [entry])
    with pytest.raises(UserError, match=said):
        all_rules()


def test_two_rules_of_one_name_are_refused(file, tmp_path):
    again = tmp_path / "again.py"
    again.write_text(file.read_text())
    with pytest.raises(UserError, match="greets"):
        all_rules([file, again])
