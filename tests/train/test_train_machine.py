"""Figures of the machine agree with clocks and the kernel, and without a GPU there are none of it."""

import re
import time
from itertools import count, pairwise
from pathlib import Path

import psutil
import pytest
import torch
from train_helpers import finish, quiet, tiny_run

import cavesson
from cavesson.importers.machine import of_machine
from cavesson.train.machine import GIB, GPU_FIGURES, Machine, Sampled, gpu_reader

HOST = {"machine/cpu", "machine/memory", "machine/process/cpu", "machine/process/memory"}
PAGE = (Path(__file__).parents[2] / "docs" / "machine.md").read_text(encoding="utf-8")
DOCUMENTED = set(re.findall(r"^\| `(machine/[^`]+)` \|", PAGE, re.MULTILINE))


def test_the_page_lists_what_is_recorded_and_imported() -> None:
    figures = [*GPU_FIGURES, "memory_peak"]
    assert HOST | {f"machine/gpu/N/{figure}" for figure in figures} == DOCUMENTED
    rows = [line for line in PAGE.split("## From other tools")[1].splitlines() if line.startswith("|") and "`" in line]
    theirs = [name.replace("N", "0") for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[2])]
    renamed = [of_machine(name, 1.0) for name in theirs if "…" not in name and not name.startswith("machine/")]
    assert len(renamed) > 15 and None not in renamed
    assert {re.sub(r"gpu/[0-9.]+", "gpu/N", one[0]) for one in renamed if one} <= DOCUMENTED


def test_processor_time_is_that_of_the_clocks() -> None:
    with Machine(torch.device("cpu")) as machine:
        begun, used = time.perf_counter(), time.process_time()
        while time.process_time() - used < 1.5:
            sum(range(10_000))
        metrics = machine.metrics()
        share = (time.process_time() - used) / (time.perf_counter() - begun) / (psutil.cpu_count() or 1)
    assert metrics["machine/process/cpu"] == pytest.approx(100 * share, rel=0.1)
    assert 0.9 * metrics["machine/process/cpu"] <= metrics["machine/cpu"] + 1 <= 101


def test_memory_is_that_of_the_kernel() -> None:
    with Machine(torch.device("cpu")) as machine:
        before = machine.metrics()
        kept = bytearray(b"x" * 2**28)
        after = machine.metrics()
        status = Path("/proc/self/status").read_text()
        assert len(kept) == 2**28
    resident = int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) / 2**20
    assert after["machine/process/memory"] == pytest.approx(resident, abs=0.02)
    assert after["machine/process/memory"] - before["machine/process/memory"] == pytest.approx(0.25, abs=0.02)
    assert after["machine/process/memory"] <= after["machine/memory"] < psutil.virtual_memory().total / GIB


def test_samples_are_averaged_from_call_to_call() -> None:
    """Each number is read once, in one step or the next, so the sums of means times counts are those of all numbers."""
    numbers, read = count(), list[float]()

    def figures() -> dict[str, float]:
        read.append(float(next(numbers)))
        return {"gpu/memory": read[-1], "gpu/power": -read[-1]}

    sampled = Sampled(figures, seconds=0.01)
    sampled.start()
    ends, seen = [0], []
    for _ in range(3):
        time.sleep(0.2)
        seen.append(sampled.metrics())
        ends.append(int(seen[-1]["gpu/memory_peak"]) + 1)
    sampled.stop()
    assert all(later - earlier > 3 for earlier, later in pairwise(ends))  # the thread reads, too
    for metrics, (first, end) in zip(seen, pairwise(ends), strict=True):
        assert metrics["gpu/memory"] == pytest.approx((first + end - 1) / 2)
        assert metrics["gpu/power"] == -metrics["gpu/memory"]
        assert set(metrics) == {"gpu/memory", "gpu/memory_peak", "gpu/power"}
    stopped = len(read)
    time.sleep(0.1)
    assert len(read) == stopped


def test_a_run_records_the_machine_at_each_step(tmp_path: Path) -> None:
    result = finish(tmp_path / "run", batch_size=8, samples_per_prompt=2, steps=2)
    for metrics in (*result.metrics, *cavesson.open(tmp_path / "run").steps().to_pylist()):
        assert {name for name in metrics if name.startswith("machine/")} == HOST
        assert metrics["machine/process/memory"] > 0.1  # PyTorch alone needs more


def test_measuring_costs_nothing_noticeable() -> None:
    with Machine(torch.device("cpu")) as machine:
        begun = time.process_time()
        for _ in range(100):
            machine.metrics()
        seconds = (time.process_time() - begun) / 100
    print(f"{1e6 * seconds:.0f} µs per step")
    assert seconds < 5e-3


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_driver_no_gpu_is_read() -> None:
    reader = gpu_reader()
    assert reader is None or reader() == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; on a machine that has one: make gpu")
def test_a_busy_gpu_is_seen(tmp_path: Path) -> None:
    kept = torch.ones(2**28, device="cuda")  # 1 GiB
    matrix = torch.randn(4096, 4096, device="cuda")
    with Machine(torch.device("cuda")) as machine:
        end = time.monotonic() + 5
        while time.monotonic() < end:
            (matrix @ matrix).sum().item()
        metrics = machine.metrics()
    (number,) = {name.split("/")[2] for name in metrics if name.startswith("machine/gpu/")}
    gpu = {name.removeprefix(f"machine/gpu/{number}/"): value for name, value in metrics.items() if "/gpu/" in name}
    used = torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]
    assert 50 < gpu["utilization"] <= 100
    assert 1 < gpu["memory"] <= gpu["memory_peak"] and gpu["memory"] == pytest.approx(used / GIB, abs=1.0)
    assert 10 < gpu["temperature"] < 110 and gpu["power"] > 20 and len(kept) == 2**28
    run = tiny_run("grpo", tmp_path / "run", **{"model.device": "cuda"})
    assert f"machine/gpu/{number}/utilization" in run.run(quiet).metrics[-1]
