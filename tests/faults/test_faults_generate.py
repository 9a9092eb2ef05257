"""Which runs the benchmark of planted faults is made of."""

import itertools

from benchmarks.faults import generate, world
from benchmarks.faults.fault import ONLINE
from benchmarks.faults.healthy import HEALTHY
from benchmarks.faults.planted import FAULTS


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
