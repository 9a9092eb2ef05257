"""Scores of results that are made by hand."""

from pathlib import Path

import cavesson
from benchmarks.faults import document, scores
from benchmarks.faults.case import PARTS, Case
from benchmarks.faults.peers import Said
from benchmarks.faults.results import Result, Until

TOP_K = Case("top-k", 0, "ppo", "small", 3)
USUAL = Case("usual", -1, "ppo", "small", 3)
STALE = Case("engine-stale", 2, "grpo", "small", 3)
RESULTS = [
    Result(TOP_K, 32, ("filtered-sampling",), caught=6, fell=8),
    Result(STALE, 32, ("kl-explosion", "reward-falls", "truncated", "sampler-stale"), caught=12, fell=8),
    Result(Case("frozen", 1, "grpo", "small", 3), 32),
    Result(USUAL, 32, ("gradient-spike",)),
    Result(USUAL._replace(algorithm="grpo"), 18),
]


def test_parts() -> None:
    sizes = {"small": "calibration", "other": "other size, seen", "large": "third size, seen", "smol": "SmolLM2"}
    for size, part in sizes.items():
        assert TOP_K._replace(size=size, seed=0).part == part
    assert [TOP_K._replace(seed=seed).part for seed in range(5)] == ["calibration"] * 3 + ["held out"] * 2
    assert TOP_K._replace(name="top-k+frozen").part == "two faults"
    late = [TOP_K._replace(seed=seed, onset=20).part for seed in (0, 3)]
    assert late == ["late, calibration", "late, held out"]
    assert {*sizes.values(), "held out", "two faults", *late} == set(PARTS)


def test_score() -> None:
    one = scores.score(RESULTS)
    # One of three named first, two named at all, one of them fourth; of six names two are right; one alarm in 50 steps.
    assert (one.runs, one.first, one.third, one.named) == (3, 1 / 3, 1 / 3, 2 / 3)
    assert (one.precision, one.healthy_steps, one.alarms) == (2 / 6, 50, 20.0)


def test_how_well_the_beginning_of_faults_is_found() -> None:
    late = STALE._replace(onset=20)
    found = [
        Result(late, since=22, between=(19, 24)),
        Result(late._replace(seed=1), since=30, between=(28, 31)),
        Result(TOP_K, since=0, between=(0, 0)),
        Result(late._replace(seed=2), since=17),
        Result(late._replace(seed=4)),  # not named
        Result(Case("engine-garbled", 1, "ppo", "small", 3), since=15, between=(15, 15)),  # it begins there by itself
        Result(USUAL),
    ]
    # Errors of 2, 10, 0, 3 and 0 steps; three of four intervals hold the truth, which are 6, 4, 1 and 1 steps wide.
    one = scores.onsets(found)
    assert (one.runs, one.error, one.within, one.covered, one.width) == (5, 2, 4 / 5, 3 / 4, 2.5)
    assert "| late | 5 | 2.0 | 80 % | 2 | 75 % |" in document.onsets({"late": found})
    assert "| late | 0 | – | – | – | – |" in document.onsets({"late": [Result(USUAL)]})
    assert document.described(late) == "engine-stale, severe, grpo, seed 3, from step 20"


def test_a_run_is_caught_where_it_is_named_before_its_true_reward_falls() -> None:
    assert scores.in_time(RESULTS) == (1, 2)
    assert "| of these, caught before it fell | 50 % (1) |" in document.timing(RESULTS)


def test_only_what_an_import_lacks_is_beyond_it() -> None:
    own = {one.case: one for one in RESULTS}
    frozen = RESULTS[2].case
    own[frozen] = Result(frozen, skipped=("zero-gradient",))
    found = [
        Result(TOP_K, skipped=("filtered-sampling",)),  # not recorded there
        Result(STALE, skipped=("kl-flat",)),  # what was planted can be seen
        Result(frozen, skipped=("zero-gradient",)),  # kl-flat can be seen
        Result(USUAL, skipped=("kl-flat",)),
    ]
    assert scores.visible(found, own) == found[1:]
    # Both of its causes are skipped: one by the run itself, so that the other alone is not what makes it invisible.
    assert scores.visible([Result(frozen, skipped=("zero-gradient", "kl-flat"))], own) != []
    assert scores.visible([Result(frozen, skipped=("zero-gradient", "kl-flat"))], {frozen: Result(frozen)}) == []


def test_the_document_says_what_was_not_measured_and_lists_what_is_wrong() -> None:
    imports = {"verl": [Result(USUAL, 32, ("gradient-spike", "truncated"))]}
    figures = document.Figures(RESULTS, RESULTS, imports, [], "`--peers-python` was not given")
    text = document.document(figures, 9)
    assert "from 5 of the 9 runs" in text
    assert "rldoctor and rlprobe were not run: `--peers-python` was not given." in text
    assert "| usual, healthy, ppo, seed 3, verl | truncated |" in text  # the spike is said of the run itself too
    wrong = "| engine-stale, severe, grpo, seed 3 | kl-explosion, reward-falls, truncated, sampler-stale |"
    assert wrong in document.case_by_case(figures)
    assert "| held out | 3 | 33 % | 33 % | 67 % | 33 % | 50 | 20.0 |" in text
    assert "| third size" not in text


def test_the_document_says_what_others_say() -> None:
    said = {"rldoctor": Said([["plateau", "warning"]], ["reward_hacking"]), "rlprobe": Said([], [])}
    peers = [(RESULTS[0], said), (RESULTS[3], said)]
    text = document.document(document.Figures(RESULTS, RESULTS, {}, peers, None), 5)
    assert "| this doctor | 1 | 100 % | 100 % | 100 % | 50 % | 32 | 31.2 | 1 | 100 % |" in text
    assert "| rldoctor | 1 | 0 % | 0 % | 0 % | 0 % | 32 | 31.2 | 0 | – |" in text
    assert "rldoctor `plateau` 1; rlprobe nothing" in text
    assert "of 2 runs: `reward_hacking` 2" in text


def test_a_run_is_cut_after_some_steps_whatever_columns_are_read(tmp_path: Path) -> None:
    with cavesson.Recorder(tmp_path / "run") as out:
        for step in range(3):
            out.rollouts(step, {"prompt": ["p"], "response": ["r"], "reward": [float(step)]})
    until = Until(cavesson.open(tmp_path / "run"), 2)
    assert until.rows(["reward"]).to_pydict() == {"reward": [0.0, 1.0]}
    assert until.rows(["reward", "step"]).to_pydict() == {"reward": [0.0, 1.0], "step": [0, 1]}
    assert until.rows()["step"].to_pylist() == [0, 1]
