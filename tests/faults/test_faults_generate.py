"""Which runs the benchmark of planted faults is made of."""

import itertools
from pathlib import Path

from benchmarks.faults import generate, world
from benchmarks.faults.fault import ONLINE
from benchmarks.faults.healthy import HEALTHY
from benchmarks.faults.planted import FAULTS, LATE


def test_the_other_sizes_have_each_fault_once_and_every_healthy_kind_of_run() -> None:
    cases = list(generate.cases(seeds=2))
    for size in ("other", "large"):
        here = [case for case in cases if case.size == size]
        assert sorted(case.name for case in here if case.faults and "+" not in case.name) == sorted(FAULTS)
        healthy = [(case.name, case.algorithm) for case in here if not case.faults]
        assert sorted(healthy) == sorted(itertools.product(HEALTHY, ONLINE))


def test_the_third_size_has_the_faults_otherwise_than_the_second() -> None:
    cases = list(generate.cases(seeds=2))
    other, large = ({c.name: c for c in cases if c.size == size and c.faults} for size in ("other", "large"))
    for name, fault in FAULTS.items():
        assert large[name].algorithm in fault.algorithms
        assert large[name].level != other[name].level
        assert large[name].algorithm != other[name].algorithm or len(fault.algorithms) < 3
    assert world.SIZES["large"].seed != world.SIZES["other"].seed


def test_late_faults_come_last_and_begin_in_the_middle() -> None:
    cases = list(generate.cases(seeds=5))
    late = [case for case in cases if case.onset]
    assert cases[-len(late) :] == late  # so that a folder of earlier runs goes on
    assert sorted((case.name, case.seed) for case in late) == sorted(itertools.product(LATE, range(5)))
    assert {case.onset for case in late} == set(range(20, 29))
    assert all(case.algorithm in FAULTS[case.name].algorithms for case in late)
    assert {case.level for case in late} == {1, 2}
    assert late[0].folder.endswith(f"--0--from-{late[0].onset}")


def test_a_late_fault_changes_no_setting_of_the_run_before_it(tmp_path: Path) -> None:
    (tmp_path / "base-small-0" / "critic").mkdir(parents=True)
    for case in generate.cases(seeds=1):
        if case.onset:
            setup = generate.planted(case, tmp_path)
            assert setup.before is not None and (setup.before.steps, setup.steps) == (case.onset, 48)
            assert setup.before.settings == setup.settings  # a run keeps its settings
            assert not setup.before.patches and not setup.before.built
