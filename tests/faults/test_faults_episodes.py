"""The doctor names faults planted in simulated episodes of tools and users, and is silent on healthy ones."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "index"))

from index_helpers import indexed

import cavesson
from benchmarks.faults.episodes.planted import FAULTS, HEALTHY, ONSET
from benchmarks.faults.episodes.rules import NAMES, OF_EPISODES
from benchmarks.faults.episodes.world import World, write
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import Diagnosis, diagnose
from cavesson.doctor.failures import FAILURES, not_excluded
from cavesson.doctor.groups import kind_effects
from cavesson.doctor.readings import lengths
from cavesson.doctor.report.chart import drawn
from cavesson.doctor.rules import RULES
from cavesson.doctor.rules.leaks import _of_rows, _of_values, _order
from cavesson.doctor.words import language
from cavesson.index.filters import matches
from cavesson.record import Recorder, write_run

OWN = {failure.title for failure in FAILURES if NAMES.intersection(failure.rules)}


def said(world: World, folder: Path) -> tuple[RunData, Diagnosis]:
    data = RunData(cavesson.open(write(world, folder)))
    return data, diagnose(data, OF_EPISODES)


def planted(name: str, level: int, **changes: object) -> World:
    world = replace(World(seed=7), **changes)
    FAULTS[name].plant(world, FAULTS[name].levels[level])
    return world


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_first_with_its_place_and_its_beginning(name: str, tmp_path: Path) -> None:
    data, found = said(planted(name, 2), tmp_path)
    fault, first = FAULTS[name], found.causes[0]
    assert first.rule.name in fault.causes and first.reading.evidence
    assert (
        drawn(first.reading, language("en")).startswith("<svg") or name.endswith("leaks") or first.reading.curve is None
    )
    if fault.onset:
        assert first.reading.since is not None and abs(first.reading.since - ONSET) <= 2
    for one in first.reading.evidence:
        row, _ = data.run.rollout(one.step, one.sample or 0)
        assert row["step"] == one.step
    for code in ("en", "zh", "vi"):
        texts = language(code).texts(first.rule, first.reading, first.names)
        assert "{" not in texts.cause + texts.fix


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "rule"),
    [("tool-breaks", "calls-fail"), ("too-few-turns", "turn-limit"), ("calls-for-nothing", "tool-always-called")],
)
def test_the_board_selects_the_episodes_that_the_rule_counted(name: str, rule: str, tmp_path: Path) -> None:
    data, found = said(planted(name, 2), tmp_path)
    (one,) = [one for one in found.findings if one.rule.name == rule]
    counted, snapshot = one.reading.affected, indexed(tmp_path)
    first, last = one.affected.steps
    hits = np.flatnonzero(matches(one.affected.filter, snapshot, data.run))
    selected = {(step, sample) for step, sample in snapshot.keys(hits) if first <= step <= last}
    wanted = counted.which & (counted.rows.step >= first)
    pairs = zip(counted.rows.step[wanted].tolist(), counted.rows.sample[wanted].tolist(), strict=True)
    assert selected == set(pairs) != set()


def test_every_rule_of_episodes_has_a_fault() -> None:
    assert {cause for fault in FAULTS.values() for cause in fault.causes} == NAMES


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_of_episodes_has_no_finding(name: str, tmp_path: Path) -> None:
    _, found = said(HEALTHY[name](World(seed=3)), tmp_path)
    assert [(one.rule.name, one.reading.seen) for one in found.findings] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_of_many_seeds_have_no_finding(name: str, tmp_path: Path) -> None:
    for seed in range(10, 16):
        _, found = said(HEALTHY[name](World(seed=seed)), tmp_path / str(seed))
        assert [(one.rule.name, one.reading.seen) for one in found.findings] == [], seed


def test_no_error_is_named_in_healthy_episodes_by_any_rule(tmp_path: Path) -> None:
    data = RunData(cavesson.open(write(World(seed=4), tmp_path)))
    assert [one.rule.name for one in diagnose(data, RULES).findings if one.severity == "error"] == []


@pytest.mark.parametrize("own", [True, False])
def test_advice_names_settings_of_ours_only_in_our_runs(own: bool, tmp_path: Path) -> None:
    _, found = said(planted("too-few-turns", 2, own=own), tmp_path)
    (one,) = [one for one in found.findings if one.rule.name == "turn-limit"]
    fix = language("en").texts(one.rule, one.reading, one.names).fix
    assert ("environment.max_turns" in fix) == own
    # 97 % of the episodes reach the limit of 4 turns, 50 % are allowed: ln 0.5 / ln 0.97 = 23 times, and at most 8.
    assert one.settings == ({"environment.max_turns": 4 * 8} if own else {})


def test_a_run_without_episodes_lacks_nothing_that_rules_of_episodes_need(tmp_path: Path) -> None:
    """A run of single responses: there is nothing to record, and no failure of episodes to exclude."""
    world = World(own=False, with_turns=False, with_sources=False, calls=lambda step: 0.0, others=())
    _, found = said(world, tmp_path)
    assert {one.rule for one in found.skipped} == NAMES
    assert all(not one.lacking for one in found.skipped)
    assert not OWN & {one.failure.title for one in not_excluded(found)}


def test_episodes_without_turns_say_what_would_have_to_be_recorded(tmp_path: Path) -> None:
    _, found = said(World(with_turns=False), tmp_path)
    open_ones = {one.failure.title: one.lacking for one in not_excluded(found)}
    assert any("turns.role" in lacking for lacking in open_ones.values())


def test_the_order_of_a_permutation_has_the_variance_that_all_of_them_have() -> None:
    """The score of every order of five values, enumerated: mean 0 and variance 1."""
    values = np.array([0.0, 1.0, 1.0, 4.0, 9.0])
    scores = []
    for order in itertools.permutations(values.tolist()):
        found = _order(np.repeat(np.arange(20), 5), np.tile(np.arange(5), 20), np.tile(order, 20))
        assert found is not None
        scores.append(found[1] / np.sqrt(20))  # twenty equal groups have the score of one, times the root of twenty
    np.testing.assert_allclose([np.mean(scores), np.var(scores)], [0.0, 1.0], atol=1e-12)


def test_effects_of_kinds_are_those_that_were_added() -> None:
    """Lengths that are a sum of a kind's and a step's: what is left without the kinds is the step's, but for a mean."""
    generator = np.random.default_rng(0)
    step, kind = np.repeat(np.arange(10), 40), np.repeat(np.arange(10), 40) < generator.integers(0, 12, 400)
    added, of_step = np.array([3.0, 11.0]), np.linspace(0, 2, 10)
    values = added[kind.astype(int)] + of_step[step]
    left = values - kind_effects(values, kind.astype(int), step) - of_step[step]
    # The projections alternate eight times: a little of what kinds and steps share is left.
    assert np.ptp(left) < 0.05 < 1 < np.ptp(values - of_step[step])


def test_episodes_do_not_grow_because_more_of_them_call_a_tool(tmp_path: Path) -> None:
    """A simulated agent whose turns have the lengths of their texts at every step, and which calls more and more."""
    world = World(seed=3, calls=lambda step: min(1.0, 0.1 + step / 20), others=())
    found = lengths(RunData(cavesson.open(write(world, tmp_path))))
    points = found.by_step()
    assert abs(points.last() / points.first() - 1) < 0.05
    totals = found.rows.by_step(found.rows["length"])
    assert totals.last() > 1.25 * totals.first()


def asks_of_cities(folder: Path, cities: list[list[str]], results: list[list[str]], siblings: int) -> RunData:
    """Record steps that ask for cities, each for several episodes; the result of an episode is that of its city."""
    write_run(folder, {"algorithm": "grpo"})
    with Recorder(folder) as recorder:
        for step, (asked, said) in enumerate(zip(cities, results, strict=True)):
            size = len(asked) * siblings
            texts = [text for one in said for text in ["look", one] * siblings]
            recorder.rollouts(
                step,
                {"group": np.repeat(np.arange(len(asked)), siblings).tolist(), "response": ["sunny"] * size,
                 "prompt": [f"sky in {one}" for one in asked for _ in range(siblings)], "reward": [0.0] * size},
                {},
                {"sample": np.repeat(np.arange(size), 2).tolist(), "role": ["assistant", "tool"] * size,
                 "text": texts, "name": [None, "weather"] * size},
            )  # fmt: skip
    return RunData(cavesson.open(folder))


@pytest.mark.parametrize("begun_last", [True, False])
def test_results_of_another_row_of_the_step_are_a_leak(begun_last: bool, tmp_path: Path) -> None:
    """All episodes of a step get the result of one row: of the same step, or of any step, which is not a leak."""
    draw = np.random.default_rng(0)
    names = [f"city{number}" for number in range(24)]
    rows = [[str(one) for one in draw.choice(names, 8, replace=False)] for _ in range(60)]
    results = [[f"Sunny in {row[-1] if begun_last else draw.choice(names)}".upper()] * 8 for row in rows]
    found = _of_rows(asks_of_cities(tmp_path / "run", rows, results, siblings=4).turns)
    assert found is not None
    assert (found.chance < 1e-4 and found.amount > 0.05) == begun_last


def test_the_equal_results_of_one_prompt_count_once(tmp_path: Path) -> None:
    """Fourteen prompts are told of the one before and six of the one behind: of 2^20 ways, 60,460 have as many."""
    rows = [[f"city{3 * step + place}" for place in range(3)] for step in range(20)]
    results = [["", row[0] if step < 14 else row[2], ""] for step, row in enumerate(rows)]
    found = _of_values(asks_of_cities(tmp_path / "run", rows, results, siblings=8).turns)
    assert found is not None
    assert found.amount == pytest.approx((14 - 6) / 20) and found.chance == pytest.approx(60460 / 2**20)
