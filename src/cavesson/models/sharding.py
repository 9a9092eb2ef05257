"""Weights spread over processes with FSDP2: every process keeps a slice of each weight.

A pass gathers the weights of one layer at a time, so all processes must make the same passes in the same order.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from cavesson.models.parts import causal

M = TypeVar("M", bound=nn.Module)


def shard(role: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, methods: tuple[str, ...] = ()) -> None:
    """Shard the weights of a module in place, layer by layer.

    Trained weights are kept in float32 and gathered in the dtype of the forward pass. Gradients are summed over all
    processes in float32.

    Args:
        role: on the device of this process, with the same weights on every process.
        mesh: of the processes; over the last of its dimensions weights are sharded, over the first of two copied.
        dtype: dtype of the forward pass.
        methods: names of the role's methods, besides `forward`, that use its weights.
    """
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True}  # no copy may outlive an optimiser step
    low_precision = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    low = {p for p in role.parameters() if p.requires_grad and p.dtype != torch.float32}
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
        for parameter in (p for module in own for p in module.parameters(recurse=False) if p in low):
            parameter.data = parameter.data.float()
        fully_shard(unit, **options, mp_policy=low_precision if is_low else MixedPrecisionPolicy())
    for part in _parts(role):
        part.set_gradient_divide_factor(1.0)  # the losses are already divided by the size of the whole batch
        part.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
    begin = "begin"  # a method without effect: FSDP takes the module whose pass begins first for the root
    setattr(role, begin, MethodType(lambda _: None, role))
    for name in (*methods, begin):
        register_fsdp_forward_method(role, name)
    getattr(role, begin)()


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


def joined(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Return whole tensors on CPU, joined from the slices of all processes, or nothing unless `keep`.

    All processes must call this together; only one tensor at a time is whole where it is not kept.
    """
    found = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            found[name] = whole.detach().cpu()
    return found


def sliced(whole: Tensor, like: Tensor) -> Tensor:
    """Return this process's slice of a tensor that every process has; `like` says how it is sharded."""
    whole = whole.to(like.device)
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def skeleton(model: M) -> M:
    """Return a copy of a model without its weights."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()}
    memo |= {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


def whole(model: Any, bare: Any, keep: bool, frozen: bool = True) -> Any:
    """Return a model with all its weights, or None unless `keep`.

    All processes must call this together.

    Args:
        model: as it is trained.
        bare: its skeleton, which gets the weights; None if they are not sharded.
        keep: whether this process needs it.
        frozen: whether frozen weights are needed too, such as those below adapters; if not, they may be missing.
    """
    if bare is None:
        return model if keep else None
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    weights = joined({name: tensor for name, tensor in model.state_dict().items() if frozen or name in trained}, keep)
    if not keep:
        return None
    # What is trained in lower precision is kept in float32 while it is sharded.
    dtypes = {name: like.dtype for name, like in bare.state_dict().items() if name in weights}
    bare.load_state_dict({name: weights[name].to(dtype) for name, dtype in dtypes.items()}, assign=True, strict=frozen)
    causal(bare).config = causal(model).config
    causal(bare).tie_weights()
    return bare


def _parts(module: nn.Module) -> Iterator[FSDPModule]:
    return (part for part in module.modules() if isinstance(part, FSDPModule))
