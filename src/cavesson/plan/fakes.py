"""Tensors that have a shape but no data, and processes that have a number but do nothing.

PyTorch's `FakeTensorMode` runs a model's real code fast and without memory: every operator only reports what it would
return.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from cavesson.processes import Shard

_aten = torch.ops.aten


class Answers(TorchDispatchMode):
    """Computes for real what depends on real tensors only, and answers what a run reads from fake ones.

    A simulated batch is real, so that a model finds in it which prompts are the same, and how long they are. Of fake
    tensors, conditions are true, masks are full, and numbers are 1.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(issubclass(kind, (FakeTensor, DTensor)) for kind in types) and tensors_in((args, kwargs)):
            with unset_fake_temporarily():
                return function(*args, **kwargs)
        if function is _aten._local_scalar_dense.default:
            return True if args[0].dtype is torch.bool else 1.0 if args[0].dtype.is_floating_point else 1
        if function in (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default):
            indices = [position for index in args[1] for position in _positions(index)]
            return function(args[0], indices, *args[2:], **kwargs)
        return function(*args, **kwargs)


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors among the arguments or results of an operator, which may be in lists and tuples."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return []
    return [tensor for value in values for tensor in tensors_in(value)]


def _positions(index: Tensor | None) -> list[Tensor | None]:
    """Return the indices of the elements that a mask selects; any other index stays."""
    if index is None or index.dtype is not torch.bool:
        return [index]
    if type(index) is Tensor:
        with unset_fake_temporarily():
            return list(index.nonzero(as_tuple=True))
    return [torch.zeros(index.numel(), dtype=torch.long)] * index.ndim


M = TypeVar("M", bound=nn.Module)


def fake(model: M) -> M:
    """Replace a model's meta tensors by fake tensors on CPU, in place; call it inside a `FakeTensorMode`."""
    made: dict[Tensor, Tensor] = {}  # tied weights stay tied
    for module in model.modules():
        for holder in (module._parameters, module._buffers):
            tensors: dict[str, Any] = holder
            for name, old in tensors.items():
                if old is None:
                    continue
                if old not in made:
                    new = torch.empty(old.shape, dtype=old.dtype)
                    made[old] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
                tensors[name] = made[old]
    return model


@contextmanager
def fake_processes(count: int, shard: Shard, per_host: int) -> Iterator[DeviceMesh | None]:
    """Be the first of so many processes for the length of a block; the others are not there.

    Returns:
        The mesh over whose last dimension weights are sharded, as `Processes` makes it, or None without sharding.
    """
    if shard == "none":
        yield None
        return
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        hybrid = shard == "hybrid"
        shape, names = ((count // per_host, per_host), ("copy", "shard")) if hybrid else ((count,), None)
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()
