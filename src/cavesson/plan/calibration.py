"""What this machine's CPU can do, measured with a few operations of the kind that training is made of."""

import os
from collections.abc import Callable
from multiprocessing import get_context
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time

import torch
import torch.distributed as dist

from cavesson.models.device_memory import total_memory
from cavesson.models.load import use_fast_linear
from cavesson.models.tiny import tiny_model
from cavesson.ops.linear import linear
from cavesson.plan.devices import Device
from cavesson.train.memory import keep_freed_memory

_ROUNDS = 5
_ROWS, _WIDTH = 1024, 768
"""Of a matrix product that is large for a small model and still takes milliseconds."""


def measured(processes: int) -> Device:
    """Return this machine as a device per process, its rates measured now in processor time.

    More processes than cores share them, so each has a part of the rates.
    """
    keep_freed_memory()
    part = min(torch.get_num_threads(), (os.cpu_count() or 1) / processes)  # cores of a process
    with torch.no_grad():
        flops, half = (_product_rate(dtype) for dtype in (torch.float32, torch.bfloat16))
        bandwidth = _bandwidth()
    per_operation = _per_operation()
    link = _link_rate() if processes > 1 else bandwidth
    one_thread = min(1.0, part)  # Python and gloo use no more
    return Device(
        name="cpu",
        memory=total_memory(torch.device("cpu")) / processes,
        half_flops=half * part,
        flops=flops * part,
        bandwidth=bandwidth * part,
        link=link * one_thread,
        network=link * one_thread,
        source="measured on this machine",
        per_host=processes,
        half_share=1.0,
        share=1.0,
        bandwidth_share=1.0,
        link_share=1.0,
        per_operation=per_operation / one_thread,
        is_cpu=True,
    )


def _link_rate() -> float:
    """Return the bytes per second of processor time that a process sends with gloo, as sharded weights are sent."""
    with TemporaryDirectory() as folder, get_context("spawn").Pool(2) as pool:
        rates: list[float] = pool.starmap(_send, [(rank, folder) for rank in range(2)], chunksize=1)
    return min(rates)


def _send(rank: int, folder: str) -> float:
    """Be one of two processes that gather and reduce a tensor; return the bytes per second of its processor time."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    whole = torch.randn(4 * 2**20)
    part = whole.chunk(2)[rank].clone()

    def work() -> None:
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(part, whole)

    # The quickest round: a process polls while the other one is late.
    seconds = _seconds(work, min)
    dist.destroy_process_group()
    return 2 * part.numel() * part.element_size() / seconds


def _seconds(work: Callable[[], object], of: Callable[[list[float]], float] = median) -> float:
    """Return the processor time of some work, by default the median of a few rounds after a first one."""
    times = []
    for _ in range(_ROUNDS + 1):
        start = process_time()
        work()
        times.append(process_time() - start)
    return of(times[1:])


def _product_rate(dtype: torch.dtype) -> float:
    """Return floating-point operations per second of matrix products."""
    x, weight = torch.randn(_ROWS, _WIDTH, dtype=dtype), torch.randn(3 * _WIDTH, _WIDTH, dtype=dtype)
    return 2 * _ROWS * _WIDTH * 3 * _WIDTH / _seconds(lambda: linear(x, weight))


def _bandwidth() -> float:
    """Return bytes per second of an addition of tensors of a few megabytes, with a new result each time."""
    a, b = torch.randn(2, 2**20), torch.randn(2, 2**20)
    return 3 * a.numel() * a.element_size() * 20 / _seconds(lambda: [a + b for _ in range(20)])


def _per_operation() -> float:
    """Return the seconds that starting an operation takes in a pass over next to nothing, forward and back."""
    from cavesson.plan.operations import Operations

    model = tiny_model()
    use_fast_linear(model)
    ids = torch.ones(1, 2, dtype=torch.long)

    def work() -> None:
        model(input_ids=ids).logits.sum().backward()

    operations = Operations(1)
    with operations:
        work()
    return _seconds(work) / sum(operations.seen.values())
