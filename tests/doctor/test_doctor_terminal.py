"""A diagnosis in the terminal: the findings, where to look, and the names of the rest."""

import io

import pytest
import sick_reward
from doctor_helpers import healthy
from rich.console import Console

import cavesson
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.report.page import page
from cavesson.doctor.report.terminal import show
from cavesson.doctor.rules import RULES
from cavesson.doctor.words import LANGUAGES, language
from cavesson.record import write_run


@pytest.fixture(scope="module")
def sick(tmp_path_factory):
    made = healthy()
    made.metrics["policy/clip_fraction"][10:] = 0.5
    made.tokens["ref_logprob"][0] -= 0.1
    del made.tokens["value"]
    data = made.data(tmp_path_factory.mktemp("terminal") / "[red]")
    return data, diagnose(data, RULES)


def shown(sick, name="en", width=80):
    out = io.StringIO()
    show(Console(file=out, width=width), *sick, language(name))
    return out.getvalue()


def test_a_finding_says_since_when_what_to_change_and_where_to_look(sick):
    text = shown(sick)
    assert "error: The policy differs from its reference before any training  since step 0" in text
    assert "lower learning rate or passes per batch" in text  # the run has no such settings
    place = next(one for one in sick[1].causes if one.rule.name == "kl-at-start").reading.evidence[0]
    assert f"step {place.step} · sample {place.sample} · token {place.start}" in text
    assert text.count("cavesson show ") == 1


def test_where_nothing_could_be_measured_nothing_is_said_to_be_right(tmp_path):
    write_run(tmp_path, {})
    data = RunData(cavesson.open(tmp_path))
    empty = data, diagnose(data, RULES)
    assert not empty[1].healthy
    for name, said in ("en", "Nothing could be checked."), ("zh", "没有可以检查的内容。"):
        for text in shown(empty, name), page(*empty, language(name)):
            assert said in text and "none found" not in text


def test_what_was_recorded_commands_no_terminal(tmp_path):
    made = healthy()
    sick_reward.case["one-part-dominates"][0](made)
    for parts in made.rows["reward_parts"].flat:
        parts["a\x1b[31mb\u202e"] = parts.pop("one")
    data = made.data(tmp_path / "run")
    text = shown((data, diagnose(data, RULES)))
    assert "a␛[31mb⟨RLO⟩ accounts for" in " ".join(text.split()) and "\x1b" not in text


def test_the_folder_is_named_as_it_is(sick):
    assert shown(sick, width=1000).count("[red]") == 3  # at the top, and in the commands that show more


def test_every_rule_is_named_once_as_healthy_or_not_looked_at_for_a_reason_said_once(sick):
    _, _, rest = shown(sick, width=1000).partition("\nLooked at and within range")
    _, diagnosis = sick
    names = [name for line in rest.splitlines() if line.startswith("  ") for name in line.strip().split(", ")]
    assert names[: len(diagnosis.healthy)] == [rule.name for rule, _ in diagnosis.healthy]
    assert sorted(names[len(diagnosis.healthy) :]) == sorted(one.rule for one in diagnosis.skipped)
    lacking = {name for one in diagnosis.skipped for name in one.words.get("what", "").split(", ") if name}
    (line,) = [line for line in rest.splitlines() if "not recorded: " in line]
    assert sorted(line.partition("not recorded: ")[2].split(", ")) == sorted(lacking) != []
    assert f"({len(diagnosis.healthy)})" in rest


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("name", LANGUAGES)
def test_it_fits_the_terminal(sick, name, width):
    text = shown(sick, name, width)
    console = Console(width=width)
    assert max(console.measure(line).maximum for line in text.splitlines()) <= width
