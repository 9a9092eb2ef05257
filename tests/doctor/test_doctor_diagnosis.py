"""Which rules are applied, and how findings are told apart into causes and consequences."""

import numpy as np
import pytest
from doctor_helpers import healthy, log_softmax
from sick import resample

from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.failures import not_excluded
from cavesson.doctor.reading import Curve, Reading
from cavesson.doctor.report.summary import summary
from cavesson.doctor.rule import APPLIES, rule
from cavesson.doctor.rules import RULES
from cavesson.doctor.series import Series
from cavesson.doctor.words import language
from cavesson.findings.finding import worst
from cavesson.traits import Traits


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return healthy(steps=6).data(tmp_path_factory.mktemp("diagnosis") / "run")


def made(name, reading=None, **changes):
    """A rule that reads always the same."""

    def statistic(data):
        return reading

    statistic.__name__ = name
    texts = {"title": "", "cause": "", "healthy": "", "fix": "", "source": ""}
    return rule(number=1, needs=[], **texts, **changes)(statistic)


def sick(name, since=0, **changes):
    return made(name, Reading(1.0, True, since), **changes)


def folded(data, *rules):
    """Return the consequences of each cause."""
    return {one.rule.name: one.explains for one in diagnose(data, rules).causes}


def test_what_is_not_sick_is_healthy_and_what_says_nothing_is_skipped(data):
    found = diagnose(
        data, [sick("a"), made("b", Reading(1.0, False)), made("c"), made("d", Reading(float("nan"), True))]
    )
    assert [one.rule.name for one in found.findings] == ["a"]
    assert [rule.name for rule, _ in found.healthy] == ["b"]
    assert [one.rule for one in found.skipped] == ["c", "d"]


def test_a_rule_is_applied_where_it_belongs_and_there_is_enough(data):
    rules = [
        sick("enough", min_steps=6),
        sick("few", min_steps=7),
        sick("ours", traits=["clipped", "critic"]),
        sick("theirs", traits=["critic", "grouped"]),
    ]
    found = diagnose(data, rules)
    assert [one.rule.name for one in found.findings] == ["enough", "ours"]
    assert [(one.rule, one.words) for one in found.skipped] == [
        ("few", {"least": 7.0, "steps": 6.0}),
        ("theirs", {}),
    ]
    assert found.skipped[1].reason == APPLIES["grouped"]


@pytest.mark.parametrize(
    ("info", "names"),
    [
        ({}, ["grouped", "clipped", "kl-place"]),
        ({"algorithm": "mine"}, ["grouped", "clipped", "kl-place"]),
        ({"algorithm": "mine", "traits": {"clipped": False, "kl_place": None}}, ["grouped"]),
        (
            {"algorithm": "ppo", "traits": {"grouped": True, "clipped": False, "kl_place": "loss"}},
            ["grouped", "kl-place"],
        ),
        ({"algorithm": "raft"}, ["kl-place"]),
        ({"trainer": "verl", "config": {"algorithm": {"adv_estimator": "remax"}}}, ["clipped", "kl-place"]),
    ],
)
def test_what_a_record_says_of_its_algorithm_decides_and_not_its_name(info, names, tmp_path):
    """What is not known of an algorithm excludes no rule."""
    run = healthy(steps=6)
    run.info = info
    found = diagnose(
        run.data(tmp_path / "run"), [sick(name, traits=[name]) for name in ("grouped", "clipped", "kl_place")]
    )
    assert [one.rule.name for one in found.findings] == names


def test_a_rule_asks_for_traits_that_there_are():
    assert APPLIES.keys() < set(Traits._fields)
    with pytest.raises(ValueError, match="traits: 'groupd' is not one of grouped, "):
        sick("mistyped", traits=["groupd"])


def test_a_consequence_stands_under_the_first_cause_also_through_others(data):
    first, second, third = sick("a", explains=["b"]), sick("b", explains=["c"]), sick("c")
    assert folded(data, first, second, third) == {"a": ("b", "c")}
    assert folded(data, sick("a", explains=["c"]), sick("b", explains=["c"]), third) == {"a": ("c",), "b": ()}


def test_two_rules_that_explain_each_other_are_one_cause(data):
    assert folded(data, sick("a", explains=["b"]), sick("b", explains=["a"])) == {"a": ("b",)}


@pytest.mark.parametrize(("earlier", "cause"), [(-7, "a"), (0, "a"), (5, "a"), (6, "b")])
def test_of_two_rules_that_explain_each_other_the_one_that_began_clearly_earlier_is_the_cause(data, earlier, cause):
    """Those that began within five steps of each other are ordered as the rules are."""
    first, second = sick("a", since=10, explains=["b"]), sick("b", since=10 - earlier, explains=["a"])
    assert folded(data, first, second) == {cause: ("b" if cause == "a" else "a",)}
    assert folded(data, first, sick("b", since=None, explains=["a"])) == {"a": ("b",)}


@pytest.mark.parametrize(("earlier", "is_explained"), [(4, True), (5, True), (6, False)])
def test_what_began_more_than_five_steps_before_a_cause_is_none_of_its_consequences(data, earlier, is_explained):
    causes = folded(data, sick("cause", since=10, explains=["other"]), sick("other", since=10 - earlier))
    assert causes == ({"cause": ("other",)} if is_explained else {"cause": (), "other": ()})


def test_causes_come_first_and_the_gravest_of_them(data):
    rules = [
        sick("note", severity="note", explains=["under"]),
        sick("warning"),
        sick("error", severity="error"),
        sick("under", severity="error"),
    ]
    assert [one.rule.name for one in diagnose(data, rules).findings] == ["error", "warning", "note", "under"]


def test_the_worst_severity(data):
    found = diagnose(data, [sick("a", severity="note"), sick("b")]).findings
    assert worst(one.severity for one in found) == "warning"
    assert worst(()) is None


def test_a_finding_of_a_late_part_does_not_explain_one_of_the_whole_run(tmp_path):
    data = healthy(steps=48, batch=8).data(tmp_path / "run")
    texts = {"title": "", "cause": "", "healthy": "", "fix": "", "source": ""}

    @rule(number=1, needs=[], **texts, windows=True, explains=["general"])
    def late(data):
        return Reading(1.0, data.whole is not data, int(data.rows.steps[0]))

    found = diagnose(data, [late, sick("general", since=30)])
    assert [finding.rule.name for finding in found.causes] == ["late", "general"]
    assert found.causes[0].reading.window == (32, 47)


def test_a_finding_of_a_late_part_whose_beginning_the_whole_run_shows_is_compared_by_that(tmp_path):
    """A jump at step 24, before the window of steps 32 to 47 in which the rule is sure."""
    data = healthy(steps=48, batch=8).data(tmp_path / "run")
    texts = {"title": "", "cause": "", "healthy": "", "fix": "", "source": ""}
    jump = Series(np.arange(48), np.where(np.arange(48) < 24, 0.0, 1.0) + 0.01 * (np.arange(48) % 3))

    @rule(number=1, needs=[], **texts, windows=True, explains=["general"])
    def late(data):
        is_part = data.whole is not data
        part = jump.where(np.isin(jump.step, data.rows.steps))
        return Reading(1.0, is_part, int(data.rows.steps[0]), curve=Curve(part, high=0.5))

    assert folded(data, late, sick("general", since=24)) == {"late": ("general",)}
    assert folded(data, late, sick("general", since=10)) == {"late": (), "general": ()}


def test_what_had_always_risen_may_have_become_a_problem_by_a_later_cause(tmp_path):
    """The curve bends at step 10 and exceeds the limit from step 30 on, after the cause of step 24; or from 16 on."""
    data = healthy(steps=48, batch=8).data(tmp_path / "run")
    bend = Series(np.arange(48), np.maximum(0.0, np.arange(48) - 10.0) + 0.01 * (np.arange(48) % 3))
    for limit, consequences in ((20.0, ("bends",)), (6.0, ())):
        reading = Reading(1.0, True, 10 + int(limit), curve=Curve(bend, high=limit))
        causes = folded(data, sick("cause", since=24, explains=["bends"]), made("bends", reading))
        assert causes["cause"] == consequences


def test_the_summary_counts_the_rules_that_could_be_applied(tmp_path):
    """Each rule is asked alone, on a sick run without the log-probabilities of its sampler."""
    numbers = healthy()
    resample(numbers, lambda policy: log_softmax(policy / 0.6))
    del numbers.tokens["sampler_logprob"]
    data = numbers.data(tmp_path / "run")
    alone = [diagnose(data, [rule]) for rule in RULES]
    found, fine = sum(len(one.findings) for one in alone), sum(len(one.healthy) for one in alone)
    assert found and fine and found + fine < len(RULES)
    diagnosis = diagnose(data, RULES)
    open_ones, left = len(not_excluded(diagnosis)), len(RULES) - found - fine
    assert open_ones and left
    assert summary(diagnosis, language("en")) == (
        f"Not judged: {left} of {len(RULES)} rules (steps: 24); failures that cannot be excluded: {open_ones}. "
        f"Judged: {found + fine} rules, of which {found} found something."
    )
