"""Rules of the user's own, as docs/doctor.md shows them."""

import re
from pathlib import Path

import numpy as np
import pytest
from doctor_helpers import healthy

import dressage
from dressage.doctor import diagnose
from dressage.doctor.data import RunData
from dressage.doctor.own import all_rules, rules_in
from dressage.errors import UserError

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"


@pytest.fixture
def file(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "greets.py").write_text(code)
    return tmp_path / "greets.py"


@pytest.mark.parametrize(("share", "found"), [(0.3, True), (0.05, False)])
def test_the_rule_of_the_page_finds_what_it_says(share, found, file, tmp_path):
    made = healthy()
    greets = np.random.default_rng(1).random(made.rows["response"].shape) < share
    made.rows["response"] = np.where(greets, "Hello there", made.rows["response"])
    data = RunData(dressage.open(made.write(tmp_path / "run")))
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
    (installed / "greetings-1.dist-info" / "entry_points.txt").write_text("[dressage.rules]\ngreets = greets:greets\n")
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


def test_two_rules_of_one_name_are_refused(file, tmp_path):
    again = tmp_path / "again.py"
    again.write_text(file.read_text())
    with pytest.raises(UserError, match="greets"):
        all_rules([file, again])
