"""Weights spread over processes with FSDP2: every process keeps a slice of each weight.

A pass gathers the weights of one layer at a time, so all processes must make the same passes in the same order.
"""

import copy
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MethodType
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers.modeling_layers import GradientCheckpointingLayer

from cavesson.models.mapped import dtype_of, forward_dtype
from cavesson.models.parts import causal
from cavesson.models.quantized import prepare_to_shard
from cavesson.processes import Processes

M = TypeVar("M", bound=nn.Module)
_STAGING = ".weights-"
"""How the names of temporary folders with weights begin."""


class _Source(NamedTuple):
    """What a weight starts from."""

    data: Tensor
    dtype: torch.dtype
    """dtype of the forward pass"""


class Slices(NamedTuple):
    """A whole tensor as consecutive slices of its rows."""

    parts: tuple[Tensor, ...]


def shard(
    role: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, methods: tuple[str, ...] = (), offload: bool = False
) -> None:
    """Shard the weights of a module, the same on every process, in place, layer by layer.

    Trained weights are kept in float32 and gathered in the dtype of the forward pass. Gradients are summed over all
    processes in float32. Of mapped weights, only the slices of this process are read.

    The last dimension of the mesh is the one over which weights are sharded; over the first of two they are copied.
    `methods` are those of the role, besides `forward`, that use its weights. With `offload`, slices are kept in the
    memory of the host, and so gradients and the optimiser's state.
    """
    # What a role returns may be a view, because nothing changes it in place.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor", UserWarning)
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True}  # no copy may outlive an optimiser step
    options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    low_precision = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    prepare_to_shard(role)
    sources = _emptied(role)
    low = {p for name, p in role.named_parameters() if p.requires_grad and sources[name].dtype != torch.float32}
    layers = [module for module in role.modules() if isinstance(module, GradientCheckpointingLayer)]
    seen: set[nn.Module] = set()
    for unit in (*reversed(layers), role):
        own = [module for module in unit.modules() if module not in seen]
        is_low = any(p in low for module in own for p in module.parameters(recurse=False))
        for module in own if is_low else ():
            # What is trained in float32 beside lower precision, such as a value head, is also gathered in float32.
            if module is not unit and any(p.requires_grad and p not in low for p in module.parameters(recurse=False)):
                fully_shard(module, **options)
        seen.update(own)
        fully_shard(unit, **options, mp_policy=low_precision if is_low else MixedPrecisionPolicy())
    for part in _parts(role):
        part.set_gradient_divide_factor(1.0)  # the losses are already divided by the size of the whole batch
        part.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
    device = "cpu" if offload else mesh.device_type
    role._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    for name, parameter in role.named_parameters():
        fill(parameter, *sources.pop(name))
    begin = "begin"  # a method without effect: FSDP takes the module whose pass begins first for the root
    setattr(role, begin, MethodType(lambda _: None, role))
    for name in (*methods, begin):
        register_fsdp_forward_method(role, name)
    getattr(role, begin)()


def place(role: Any, processes: Processes) -> None:
    """Put the weights of a role on the device of its process, or shard them and then check the role."""
    if processes.mesh is None:
        role.to(processes.device)
        return
    shard(role, processes.mesh, forward_dtype(role.model), role.passes, processes.offload)
    role.check()


def _emptied(role: nn.Module) -> dict[str, _Source]:
    """Take the data from all parameters of a module, and return it.

    The module gets parameters on the meta device, in the dtype in which they will be kept.
    """
    sources = {
        name: _Source(parameter.data.as_subclass(Tensor), dtype_of(parameter))
        for name, parameter in role.named_parameters()
    }
    twins: dict[Tensor, nn.Parameter] = {}
    for module in role.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in twins:
                kept = torch.float32 if parameter.requires_grad else dtype_of(parameter)
                twins[parameter] = _empty(parameter, kept)
            module.register_parameter(name, twins[parameter])
    return sources


def _empty(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """Return a parameter like another on the meta device."""
    return nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device="meta"), parameter.requires_grad)


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Keep all weights of a module on every process, for passes that the processes do not make together.

    Has no effect on a module whose weights are not sharded.
    """
    parts = list(_parts(module))
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()
            part.set_reshard_after_forward(True, recurse=False)


def _joined(tensors: Mapping[str, Tensor], keep: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors on CPU, joined one by one from the slices of all processes, or nothing unless `keep`."""
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            yield name, whole.detach().cpu()


def _in_file(name: str, tensor: Tensor, folder: Path) -> Tensor:
    """Return a tensor that is mapped from a file in a folder, so that it need not stay in memory."""
    file = folder / f"{len(list(folder.iterdir()))}.safetensors"
    save_file({name: tensor.contiguous()}, file)
    return load_file(file)[name]


@torch.no_grad()
def fill(target: Tensor, whole: Tensor | Slices, dtype: torch.dtype | None = None) -> None:
    """Copy a whole tensor in place, or the part of it that this process has of the target; nothing else is read.

    Every process has or can read the whole; `dtype` rounds the numbers, None does not.
    """
    local = target.to_local() if isinstance(target, DTensor) else target
    if not local.ndim:
        assert isinstance(whole, Tensor)
        local.copy_(whole)
        return
    first = offset(target)[0]
    start = 0
    for part in whole.parts if isinstance(whole, Slices) else (whole,):
        low, high = max(first, start), min(first + len(local), start + len(part))
        if low < high:
            rows = part[low - start : high - start]
            local[low - first : high - first] = rows if dtype is None else rows.to(dtype)
        start += len(part)


def offset(tensor: Tensor) -> tuple[int, ...]:
    """Return where the slice that this process has of a tensor begins in the whole, in every dimension."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    return tuple(compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1])


def is_first_copy(tensor: DTensor) -> bool:
    """Return whether this process has the first of all equal copies of its slice."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return not any(at for at, kind in zip(coordinate, tensor.placements, strict=True) if kind.is_replicate())


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the forward pass."""
    parameter = next(module.parameters())
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device


def skeleton(model: M) -> M:
    """Return a copy of a model without its weights."""
    memo: dict[int, Any] = {id(p): _empty(p, dtype_of(p)) for p in model.parameters()}
    memo |= {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


def whole(model: Any, bare: Any, keep: bool, frozen: bool = True, folder: Path | None = None) -> Any:
    """Return a model with all its weights, or None unless `keep`.

    All processes must call this together.

    Args:
        model: as it is trained.
        bare: its skeleton, which gets the weights; None if they are not sharded.
        keep: whether this process needs it.
        frozen: whether frozen weights are needed too, such as those below adapters; if not, they may be missing.
        folder: on a disk with room for the weights, which are mapped from files there; None keeps them in memory. The
            files have no name, and exist for as long as the model does.
    """
    if bare is None:
        return model if keep else None
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    needed = {name: tensor for name, tensor in model.state_dict().items() if frozen or name in trained}
    # What is trained in lower precision is kept in float32 while it is sharded.
    dtypes = {name: like.dtype for name, like in bare.state_dict().items() if name in needed}
    weights = {}
    with _staging(folder) if folder and keep else nullcontext() as place:
        for name, tensor in _joined(needed, keep):
            weight = tensor.to(dtypes[name])
            weights[name] = weight if place is None else _in_file(name, weight, place)
    if not keep:
        return None
    bare.load_state_dict(weights, assign=True, strict=frozen)
    causal(bare).config = causal(model).config
    causal(bare).tie_weights()
    return bare


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """Make a temporary folder for weights, in place of what a killed process has left."""
    for left_over in folder.glob(f"{_STAGING}*"):
        shutil.rmtree(left_over, ignore_errors=True)
    # Network file systems and Windows remove a mapped file later, and its folder cannot be removed before.
    with TemporaryDirectory(dir=folder, prefix=_STAGING, ignore_cleanup_errors=True) as place:
        yield Path(place)


def _parts(module: nn.Module) -> Iterator[FSDPModule]:
    return (part for part in module.modules() if isinstance(part, FSDPModule))
