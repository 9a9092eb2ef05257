"""The judge's arithmetic, on what a doctor might have said; and what the benchmark promises of itself."""

from collections import Counter

import pytest

from benchmarks.faults.others.case import LATE, PARTS, SECOND, THIRD, TRAINERS, WAYS, Case, part
from benchmarks.faults.others.document import lines
from benchmarks.faults.others.evaluate import cells
from benchmarks.faults.others.fault import Fault
from benchmarks.faults.others.generate import ROOT, SMOL, cases
from benchmarks.faults.others.healthy import HEALTHY
from benchmarks.faults.others.judged import Judged, _not_excluded
from benchmarks.faults.others.planted import FAULTS, third, unseen
from benchmarks.faults.others.scores import score
from cavesson.doctor.diagnosis import Detection, Diagnosis
from cavesson.doctor.reading import Reading, Skipped
from cavesson.doctor.rules import RULES
from cavesson.findings.words import Phrase

FLIPPED = Case("penalty-flipped", False, "ppo", "couplets", 0)
LATER = Case("penalty-flipped-late", False, "ppo", "couplets", 0)
USUAL = Case("usual", True, "ppo", "couplets", 0)


def said(case: Case, *named: str, way: str = "board", **more: object) -> Judged:
    return Judged(case, way, steps=50, named=named, **more)


def test_shares_are_those_of_the_recordings_that_show_the_fault():
    found = score(
        [
            said(FLIPPED, "penalty-wrong", "kl-explosion"),  # first; the other name is a true consequence
            said(FLIPPED, "length-bias", "penalty-wrong"),  # named, not first
            said(FLIPPED, "kl-explosion"),  # a consequence is not the cause
            said(FLIPPED),
            said(FLIPPED, "stalls", way="completions"),  # not determined: counts for precision alone
            said(USUAL),
            said(USUAL, "stalls"),
        ]
    )
    assert (found.determined, found.undetermined) == (4, 1)
    assert found.first == 1 / 4
    assert found.named == 2 / 4
    assert found.precision == 4 / 7  # of seven names, length-bias and stalls, twice, are wrong
    assert (found.healthy_steps, found.alarms) == (100, 10.0)
    assert found.not_excluded == 0.0


def test_onsets_are_compared_where_the_fault_begins_late_and_is_named():
    found = score(
        [
            said(LATER, "penalty-wrong", since=28, onset=25),
            said(LATER, "penalty-wrong", since=23, onset=25),
            said(LATER, "penalty-wrong", since=45, onset=25),
            said(LATER, "penalty-wrong", since=None, onset=25),
            said(FLIPPED, "penalty-wrong", since=9, onset=0),
        ]
    )
    assert found.onsets == (2, 3, 20)
    assert found.onset == 3


def test_what_cannot_be_seen_can_be_named_as_not_excluded():
    hidden = [
        said(FLIPPED, way="completions", not_excluded=("penalty-wrong", "truncated")),
        said(FLIPPED, way="completions"),
    ]
    assert score(hidden).not_excluded == 0.5


def test_nothing_to_judge_is_a_dash():
    assert cells("board", score([])) == ["board", "0", "–", "–", "–", "0", "–", "–", "0", "–"]


def test_a_late_fault_is_in_the_part_of_the_same_fault_from_the_start():
    late = [name for name in FAULTS if name.endswith(LATE)]
    assert len(late) >= 8
    for name in late:
        assert part(name) == part(name.removesuffix(LATE))
        assert FAULTS[name].onset_in(50) == 25
        assert FAULTS[name].causes == FAULTS[name.removesuffix(LATE)].causes


def test_every_fault_is_one_that_the_doctor_can_name():
    names = {rule.name for rule in RULES}
    for one in FAULTS.values():
        assert one.causes and names.issuperset((*one.causes, *one.also))
        assert not set(one.causes) & set(one.also)
        assert set(one.trainers) <= set(TRAINERS)
        assert all(set(ways) <= set(WAYS) for ways in one.seen.values())


def test_the_benchmark_has_what_it_promises():
    every = list(cases())
    assert len(set(every)) == len(every)
    assert len({name.removesuffix(LATE) for name in FAULTS}) >= 20
    assert len(HEALTHY) >= 6
    assert set(SMOL) <= set(FAULTS)
    for which in PARTS:
        assert sum(part(name) == which for name in FAULTS) >= 15
        assert sum(part(name) == which for name in HEALTHY) >= 3
    healthy = Counter(case.name for case in every if case.healthy and case.task == "couplets")
    assert set(healthy.values()) == {3 * len(TRAINERS)}
    for name, one in FAULTS.items():
        planted = [case for case in every if case.name == name and case.task == "couplets"]
        assert [case.seed for case in planted] == [0, 1, 2]
        assert {case.trainer for case in planted} == set(one.trainers)


@pytest.mark.parametrize("module, listed, kinds", [(unseen, SECOND, 3), (third, THIRD, 4)])
def test_a_later_part_is_what_was_written_after_the_rules(module, listed, kinds):
    written = {one.name for one in vars(module).values() if isinstance(one, Fault)}
    assert written < listed and written.isdisjoint(SMOL)
    assert len(listed - written) == kinds and listed - written < set(HEALTHY)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("penalty-flipped", "first"),
        ("reward-first", "first"),
        ("greedy-late", "second"),
        ("roomy", "second"),
        ("verifier-lenient-late", "third"),
        ("accumulated", "third"),
    ],
)
def test_the_part_of_a_name_does_not_change(name, expected):
    assert part(name) == expected


def test_new_faults_leave_the_runs_of_the_others_as_they_are():
    """Which trainer a fault is planted in with which seed must not depend on faults that were added later."""
    late = [case.trainer for case in cases() if case.name == "outliers-late" and case.task == "couplets"]
    assert late == ["ppo", "grpo", "rloo"]


def test_the_page_lists_the_faults_as_they_are():
    page = (ROOT / "benchmarks" / "faults" / "others" / "README.md").read_text(encoding="utf-8")
    assert "\n".join(lines()) in page


def test_only_what_the_report_lists_counts_as_not_excluded():
    """A run too short for group-advantages may have wrong advantages; where one is found, they are shown."""
    few = Skipped("group-advantages", 72, Phrase("needs {least} steps"), undecided=True)
    rule = next(rule for rule in RULES if rule.name == "advantage-sign")
    found = Diagnosis((Detection(rule, Reading(0.0, True)),), (), (few,))
    assert _not_excluded(Diagnosis((), (), ())) == ()
    assert "advantage-sign" in _not_excluded(Diagnosis((), (), (few,)))
    assert _not_excluded(found) == ()
