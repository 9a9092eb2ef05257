"""Distributed training: which process takes which rows, and how numbers of all processes come together."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from cavesson.errors import UserError
from cavesson.ops.masked import weighted_mean
from cavesson.text.counting import counted
from cavesson.watchdog import Watchdog

T = TypeVar("T")
Shard = Literal["none", "full", "hybrid"]
_MARGIN = 60.0
"""Seconds that PyTorch waits longer than the watchdog, which says more."""


def is_main() -> bool:
    """Return whether this is the only process, or the first of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def wait_for_all() -> None:
    """Wait until all processes of a run are here; a process on its own does not wait."""
    if dist.is_initialized():
        dist.barrier()


def _current(device: torch.device) -> torch.device:
    """Return a device with its index; a GPU becomes the one that PyTorch and its extensions use by default."""
    if device.type != "cuda":
        return device
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _check_gpus(device: torch.device | None) -> None:
    """Check that there is a GPU for each process of this machine; the device that settings name may be any.

    Raises:
        UserError: the machine has no such GPU or fewer than processes, or several processes would share one.
    """
    count, here = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    index, gpus = None if device is None else device.index, torch.cuda.device_count()
    if index is not None and count > 1:
        raise UserError(
            f'model.device "{device}" is a single GPU, but {count} processes train; set it to "cuda", and '
            "CUDA_VISIBLE_DEVICES to the GPUs to use"
        )
    if index is not None and index >= gpus:
        raise UserError(f'model.device "{device}": this machine has {counted(gpus, "GPU")}, numbered from cuda:0')
    # A launcher may show each process only its own GPU.
    shown = gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ
    if here > gpus and not shown:
        raise UserError(
            f"{here} processes train on this machine, which has {counted(gpus, 'GPU')}: start as many as there are "
            'GPUs, or set model.device to "cpu"'
        )


def _check_exchanges_on_host() -> None:
    """Raise UserError if the process group, perhaps older than the run, cannot exchange tensors in host memory."""
    backends = dist.get_backend_config().split(",")
    if not any(backend.startswith("cpu:") for backend in backends):
        raise UserError(
            f"parallel.offload needs a process group for CPU and GPUs, but there is already one for {backends[0]}: "
            'make it with backend "cuda:nccl,cpu:gloo", or leave it to Cavesson'
        )


class Processes:
    """The processes of this run, started by `torchrun` or `accelerate launch`; otherwise a single process.

    Args:
        device: device of this process; None uses a GPU if there is one.
        shard: how weights are spread over the processes, as in `ParallelSettings`.
        timeout: seconds that the processes wait for one another; None does not watch them.
        offload: whether sharded weights are kept in the memory of the host.

    Raises:
        UserError: the device does not exist, there are fewer GPUs than processes, or only one process to shard over.
    """

    def __init__(
        self,
        device: str | None = None,
        shard: Shard = "none",
        timeout: float | None = None,
        offload: bool = False,
    ) -> None:
        from accelerate import PartialState  # slow to import, and the settings of algorithms import this module

        try:
            chosen = torch.device(device) if device else None
        except RuntimeError:
            raise UserError(f"model.device {device!r} is not a device; use cpu, cuda or cuda:1") from None
        if chosen is not None and chosen.type == "cuda" and not torch.cuda.is_available():
            raise UserError(f"model.device {device!r}: this machine has no usable GPU; use cpu")
        # By default, accelerate would choose an Apple GPU, which lacks the float64 needed to draw tokens.
        cpu = chosen.type == "cpu" if chosen else not torch.cuda.is_available()
        if not cpu and (chosen is None or chosen.type == "cuda"):
            _check_gpus(chosen)
        longest = {} if timeout is None else {"timeout": timedelta(seconds=timeout + _MARGIN)}
        # NCCL has no operations on the memory of the host.
        backend = {"backend": "cuda:nccl,cpu:gloo"} if offload and not cpu else {}
        state = PartialState(cpu=cpu, **longest, **backend)
        self.rank, self.count = state.process_index, state.num_processes
        self.device = _current(chosen if chosen is not None and self.count == 1 else state.device)
        if offload and dist.is_initialized():
            _check_exchanges_on_host()
        self.mesh = None if shard == "none" else self._mesh(shard)
        self.offload = offload
        self.resume_hint: str | None = None
        """the command that continues the run, for the message of the watchdog"""
        self._timeout = None if self.count == 1 else timeout
        self._watchdog: Watchdog | None = None
        for limit in longest.values() if self.count > 1 else ():
            # The group may be older, and those of the mesh have limits of their own.
            for group in [None, *(self.mesh.get_all_groups() if self.mesh else [])]:
                _set_pg_timeout(limit, group)

    @property
    def is_main(self) -> bool:
        return bool(self.rank == 0)

    def _mesh(self, shard: Shard) -> DeviceMesh:
        """Return the mesh over whose last dimension weights are sharded; over the first of two, they are copied."""
        if self.count == 1:
            raise UserError(
                f'parallel.shard "{shard}" has no effect with one process: add --processes N, or set it to "none"'
            )
        if shard == "full":
            return init_device_mesh(self.device.type, (self.count,))
        inside = int(os.environ.get("LOCAL_WORLD_SIZE", self.count))
        if inside == self.count or self.count % inside:
            raise UserError(
                f'parallel.shard "hybrid" shards within a host and copies between hosts, but {inside} of '
                f'{self.count} processes are on this host; use "full"'
            )
        return init_device_mesh(self.device.type, (self.count // inside, inside), mesh_dim_names=("copy", "shard"))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """End the run if a process hangs inside this block, which all processes enter; one process is not watched."""
        if self._timeout is None:
            yield
            return
        self._watchdog = Watchdog(self.rank, self.count, self._timeout, lambda: self.resume_hint)
        try:
            yield
        finally:
            self._watchdog.close()
            self._watchdog = None

    def enter(self, stage: str) -> None:
        """Tell the watchdog that a stage begins; all processes must enter the same stages in the same order."""
        if self._watchdog is not None:
            self._watchdog.enter(stage)

    def beat(self) -> None:
        """Tell the watchdog that this process makes progress inside a long stage."""
        if self._watchdog is not None:
            self._watchdog.beat()

    def _arrive(self) -> None:
        if self._watchdog is not None:
            self._watchdog.arrive()

    def share(self, rows: int) -> range:
        """Return the contiguous rows of a global batch that this process works on."""
        parts = torch.arange(rows).tensor_split(self.count)
        start = sum(len(part) for part in parts[: self.rank])
        return range(start, start + len(parts[self.rank]))

    def micro_batches(self, mine: Sequence[int], at_once: int) -> list[list[int]]:
        """Split this process's rows of a batch into micro-batches of `at_once` rows; 0 = all."""
        size = at_once or max(1, len(mine))
        return self.equally_many([list(mine[start : start + size]) for start in range(0, len(mine), size)])

    def equally_many(self, parts: list[list[int]]) -> list[list[int]]:
        """Return micro-batches with empty ones at the end, as many as the process has that has most; see above."""
        if self.mesh is not None:
            parts += [[]] * (int(self._reduced(torch.tensor(len(parts)), dist.ReduceOp.MAX)) - len(parts))
        return parts

    def of_all(self, value: T) -> list[T]:
        """Gather one small value from every process, in rank order, on every process."""
        if self.count == 1:
            return [value]
        self._arrive()
        everything: list[Any] = [None] * self.count
        dist.all_gather_object(everything, value)
        return everything

    def on_main(self, value: T) -> list[T]:
        """Gather one value from every process, in rank order, on the main process; others get an empty list."""
        if self.count == 1:
            return [value]
        self._arrive()
        everything: list[Any] | None = [None] * self.count if self.is_main else None
        dist.gather_object(value, everything)
        return everything or []

    def rows(self, column: Tensor) -> Tensor:
        """Join a column `[b]` or `[b, T]` of all processes in rank order, on every process (on CPU).

        b and T may differ between processes, and 0 pads shorter rows on the right.
        """
        if self.count == 1:
            return column
        self._arrive()
        sizes = self._gathered(torch.tensor(column.shape))
        dtype = torch.uint8 if column.dtype == torch.bool else column.dtype  # not every backend sends bool
        sent = torch.zeros(torch.stack(sizes).amax(0).tolist(), dtype=dtype)
        sent[tuple(slice(size) for size in column.shape)] = column
        parts = [part[: int(size[0])] for part, size in zip(self._gathered(sent), sizes, strict=True)]
        return torch.cat(parts).to(column.dtype)

    def over_all(self, function: Callable[..., Tensor], *columns: Tensor) -> Tensor:
        """Apply a function of columns `[B]` of all processes, in rank order; return this process's rows `[b]` of the
        result.
        """
        if self.count == 1:
            return function(*columns)
        self._arrive()
        start = int(sum(self._gathered(torch.tensor(len(columns[0])))[: self.rank]))
        return function(*map(self.rows, columns))[start : start + len(columns[0])]

    def mean(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the weighted mean over all processes, as `weighted_mean` computes it over one."""
        if self.count == 1:
            return weighted_mean(x, weight)
        sums = torch.stack([weighted_mean(x, weight, 1.0), weight.sum()])
        weighted, total = self.sum_tensor(sums.double()).unbind()
        return weighted.div(total.clamp_min(1e-8)).to(sums.dtype)

    def sum_gradients(self, module: nn.Module) -> None:
        """Sum the gradients over all processes, in place and in float32; those of sharded weights already are."""
        if self.count == 1 or self.mesh is not None:
            return
        self._arrive()
        for parameter in module.parameters():
            if parameter.requires_grad:
                # A process with an empty share has no gradient but must still take part in the sum.
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
                dist.all_reduce(parameter.grad)

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes, on every process (on CPU)."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def _reduced(self, tensor: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        if self.count == 1:
            return tensor
        self._arrive()
        whole = tensor.to(self.device, copy=True)
        dist.all_reduce(whole, how)
        return whole.cpu()

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        """Return a tensor of every process, all of the same shape, in rank order (on CPU)."""
        sent = tensor.to(self.device)
        parts = [torch.empty_like(sent) for _ in range(self.count)]
        dist.all_gather(parts, sent)
        return [part.cpu() for part in parts]

    def combine(self, values: dict[str, float], how: Any) -> dict[str, float]:
        """Reduce named numbers over all processes with `how` (`sum` or `max`)."""
        if self.count == 1:
            return values
        everything = self.of_all(values)
        names = dict.fromkeys(name for part in everything for name in part)
        return {name: how(part[name] for part in everything if name in part) for name in names}

    def of_main(self, value: T) -> T:
        """Return the main process's value on every process."""
        if self.count == 1:
            return value
        self._arrive()
        held = [value]
        dist.broadcast_object_list(held, src=0)
        return held[0]

    def share_weights(self, weights: Iterable[Tensor]) -> None:
        """Broadcast weights of the first process to all processes, in place."""
        if self.count > 1:
            self._arrive()
            for weight in weights:
                held = weight.data.to(self.device)
                dist.broadcast(held, src=0)
                weight.data.copy_(held)

    def agreed(self, action: Callable[[], T]) -> T:
        """Return what an action returns; if it fails in any process, raise the first process's error in all of them.

        All processes must call this together.

        Raises:
            UserError: the action raised it here or elsewhere.
        """
        if self.count == 1:
            return action()
        answer, error = None, None
        try:
            answer = action()
        except UserError as failed:
            error = failed
        errors = [each for each in self.of_all(error) if each is not None]
        if errors:
            raise errors[0] from error  # what was exchanged has no traceback
        return cast(T, answer)

    def wait(self) -> None:
        self._arrive()
        wait_for_all()
