"""What this machine's CPU can do, measured with a few operations of the kind that training is made of."""

from collections.abc import Callable
from mmap import mmap
from multiprocessing import get_context
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Literal

import torch
import torch.distributed as dist
from torch.nn import functional

from cavesson.models.device_memory import total_memory
from cavesson.models.load import use_fast_linear
from cavesson.models.tiny import tiny_model
from cavesson.ops.linear import linear
from cavesson.plan.devices import Device
from cavesson.plan.operations import Operations
from cavesson.processors import usable_processors
from cavesson.train.memory import keep_freed_memory

_ROUNDS = 5
_ROWS, _WIDTH = 1024, 768
"""Of a matrix product that is large for a small model and still takes milliseconds."""


def measured(processes: int) -> Device:
    """Return this machine as a device per process, its rates measured now in processor time.

    More processes than cores share them, so each has a part of the rates.
    """
    keep_freed_memory()
    part = min(torch.get_num_threads(), usable_processors() / processes)  # cores of a process
    flops, half = (_product_rate(dtype) for dtype in (torch.float32, torch.bfloat16))
    bandwidth, new_memory, per_operation = _bandwidth(), _new_memory(), _per_operation()
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
        new_memory=new_memory * part,
        attention_flops=_attention_rate() * part,
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


def _rate(work: Callable[[], object], what: Literal["flops", "moved"]) -> float:
    """Return the floating-point operations or the bytes per second of some work, counted as those of a plan are."""
    operations = Operations(1)
    with operations:
        work()
    count: int = sum(getattr(one, what) * times for one, times in operations.seen.items())
    return count / _seconds(work)


def _product_rate(dtype: torch.dtype) -> float:
    """Return floating-point operations per second of matrix products."""
    x, weight = torch.randn(_ROWS, _WIDTH, dtype=dtype), torch.randn(3 * _WIDTH, _WIDTH, dtype=dtype)
    return _rate(lambda: linear(x, weight), "flops")


def _attention_rate() -> float:
    """Return floating-point operations per second of attention, forward and back."""
    queries, keys, values = torch.randn(3, 4, _WIDTH // 64, _ROWS // 4, 64, requires_grad=True)
    return _rate(
        lambda: functional.scaled_dot_product_attention(queries, keys, values, is_causal=True).sum().backward(),
        "flops",
    )


def _bandwidth() -> float:
    """Return bytes per second of the operations between matrix products: a norm and a gated activation, and back."""
    x, gate = torch.randn(2, _ROWS, 3 * _WIDTH, requires_grad=True)

    def work() -> None:
        norm = x * x.square().mean(-1, keepdim=True).rsqrt()
        (functional.silu(gate) * norm).sum().backward()

    return _rate(work, "moved")


def _new_memory() -> float:
    """Return bytes per second of memory that is got from the system, filled and given back, without the filling."""
    size = 2**22

    def fill(memory: mmap) -> None:
        torch.frombuffer(memory, dtype=torch.uint8).zero_()

    def fill_new() -> None:
        with mmap(-1, size) as memory:
            fill(memory)

    with mmap(-1, size) as memory:
        again = _seconds(lambda: fill(memory))
    return size / max(_seconds(fill_new) - again, 1e-9)


def _per_operation() -> float:
    """Return the seconds that starting an operation takes in a pass over next to nothing, forward and back."""
    model = tiny_model()
    use_fast_linear(model)
    ids = torch.ones(1, 2, dtype=torch.long)

    def work() -> None:
        model(input_ids=ids).logits.sum().backward()

    operations = Operations(1)
    with operations:
        work()
    return _seconds(work) / sum(operations.seen.values())
