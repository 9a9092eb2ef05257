"""The doctor names faults planted in trained episodes, and is silent on healthy ones: a part of the benchmark."""

import json
from pathlib import Path

import pytest

from benchmarks.faults import document
from benchmarks.faults.case import EPISODES, Case
from benchmarks.faults.episodes.rules import NAMES
from benchmarks.faults.episodes.trained.evaluate import judged
from benchmarks.faults.episodes.trained.generate import HELD_OUT, cases, make, planted
from benchmarks.faults.episodes.trained.healthy import HEALTHY
from benchmarks.faults.episodes.trained.office import CITIES, forecast
from benchmarks.faults.episodes.trained.planted import FAULTS
from benchmarks.faults.episodes.trained.setup import RUNS, train, warm_start


@pytest.fixture(scope="session")
def guesser(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers a question about the weather with a word, and knows no tools."""
    rows = [
        {"messages": [{"role": "user", "content": f'sky in "{city}"'}, {"role": "assistant", "content": "sunny"}]}
        for city in CITIES
    ]
    return warm_start(tmp_path_factory.mktemp("guesser"), rows * 4, steps=15)


@pytest.fixture(scope="session")
def clerk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has seen half of the usual demonstrations."""
    return warm_start(tmp_path_factory.mktemp("clerk"), steps=500)


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [("paid-by-turn", "ppo"), ("replies-learned", "grpo"), ("calls-masked", "rloo")],
)
def test_masks_of_trained_episodes_are_judged(name: str, algorithm: str, guesser: Path, tmp_path: Path) -> None:
    """Of a game of three guesses, in which a healthy run learns every guess and no reply."""
    case = Case(name, 2 if name in FAULTS else -1, algorithm, EPISODES, 0)
    setup = planted(case, guesser)
    HEALTHY["paid-by-turn"](setup)
    setup.steps = 2
    setup.settings |= {"batch_size": 8}
    setup.settings["sampling"] |= {"max_new_tokens": 8}
    train(setup, tmp_path / case.folder)
    (tmp_path / case.folder / "case.json").write_text(json.dumps(case._asdict()), encoding="utf-8")
    for foreign in (False, True):
        found = judged(tmp_path / case.folder, foreign=foreign)
        assert NAMES.intersection(found.named) == set(FAULTS[name].causes[:1] if name in FAULTS else ())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "algorithm"),
    [("tool-breaks", "grpo"), ("results-cut", "rloo"), ("replies-learned", "ppo")],
)
def test_a_fault_in_trained_episodes_is_named(name: str, algorithm: str, clerk: Path, tmp_path: Path) -> None:
    case = Case(name, 2, algorithm, EPISODES, 0)
    make(case, tmp_path, clerk)
    assert not (tmp_path / case.folder / "failed.txt").exists()
    found = judged(tmp_path / case.folder)
    assert found.is_named
    assert found.since is not None and abs(found.since - FAULTS[name].onset) <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "algorithm"), [("usual", "grpo"), ("unknown-cities", "rloo"), ("done-by-call", "ppo")]
)
def test_healthy_trained_episodes_have_no_finding(name: str, algorithm: str, clerk: Path, tmp_path: Path) -> None:
    case = Case(name, -1, algorithm, EPISODES, 0)
    make(case, tmp_path, clerk)
    assert not (tmp_path / case.folder / "failed.txt").exists()
    assert NAMES.isdisjoint(judged(tmp_path / case.folder).named)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAULTS, *HEALTHY])
def test_every_run_of_episodes_can_be_trained(name: str, clerk: Path, tmp_path: Path) -> None:
    """What a fault replaces is where the fault expects it."""
    setup = planted(Case(name, 2 if name in FAULTS else -1, "grpo", EPISODES, 0), clerk)
    setup.steps = 2
    train(setup, tmp_path / "run")


def test_every_rule_of_episodes_has_a_fault_and_every_kind_is_held_out_five_times() -> None:
    assert {one.causes[0] for one in FAULTS.values()} == NAMES
    held_out = list(cases(HELD_OUT))
    assert len({one.folder for one in held_out}) == len(held_out)
    for name in (*FAULTS, *HEALTHY):
        runs = [one for one in held_out if one.name == name]
        assert len(runs) == 5 and {one.part for one in runs} == {"held out"}
        assert {one.algorithm for one in runs} == set(RUNS)
        assert {one.level for one in runs} == ({0, 1, 2} if name in FAULTS else {-1})


def test_the_document_has_what_was_measured() -> None:
    written = Path(__file__).parents[2] / "docs" / "doctor-benchmark.md"
    assert document.EPISODES.read_text(encoding="utf-8").strip() in written.read_text(encoding="utf-8")


def test_a_forecast_can_be_cut_where_the_doctor_looks() -> None:
    """It is longer than any word that a question needs, and of many lengths, so that only a cut makes them equal."""
    lengths = [len(forecast(city, day)) for city in CITIES for day in range(200)]
    assert min(lengths) >= 60 and max(map(lengths.count, lengths)) < len(lengths) / 8
