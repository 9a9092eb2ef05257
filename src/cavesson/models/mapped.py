"""Weights that stay in their files until each process takes its slices of them.

safetensors maps files into memory, and only the parts that are read take any. A model whose weights keep the dtype of
its files can therefore be built on every process without reading it. Each weight knows the dtype of the forward pass,
in which it is to be used.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.utils.hub import cached_file

M = TypeVar("M", bound=nn.Module)
_DTYPE = "forward_dtype"
"""Attribute of a mapped parameter."""
_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


def can_be_mapped(model: nn.Module, source: str, dtype: torch.dtype) -> bool:
    """Return whether a model has the weights of its files, unchanged, and is the same when loaded in another dtype.

    It was loaded from `source` in the dtype that its config names.
    """
    folder = Path(str(cached_file(source, "config.json"))).parent
    kinds = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            kinds |= {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118  # not a dict
    own = forward_dtype(model)
    keeps_float32 = bool(getattr(model, "_keep_in_fp32_modules_strict", None)) and dtype != torch.float32
    return [_FLOATS.get(kind) for kind in kinds] == [own] and (own == dtype or not keeps_float32)


def mark(model: nn.Module, dtype: torch.dtype) -> None:
    """Note the dtype of the forward pass on all weights of a model that is in the dtype of its files."""
    is_same = forward_dtype(model) == dtype
    for parameter in model.parameters():
        setattr(parameter, _DTYPE, parameter.dtype if is_same else dtype)


def is_mapped(module: nn.Module) -> bool:
    """Return whether a module has weights that have not been read yet, so that it cannot make a pass."""
    return any(hasattr(parameter, _DTYPE) for parameter in module.parameters())


def in_memory(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the weights of a module that are not mapped."""
    return (parameter for parameter in module.parameters() if not hasattr(parameter, _DTYPE))


def dtype_of(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which a parameter is used."""
    dtype: torch.dtype = getattr(parameter, _DTYPE, parameter.dtype)
    return dtype


def forward_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype of the forward pass, that of the first weight."""
    return next(dtype_of(parameter) for parameter in module.parameters() if parameter.is_floating_point())


def aliased(module: M) -> M:
    """Return a copy of a module whose parameters are new objects with the same data.

    The copy must be sharded before any of the two changes.
    """
    memo = {}
    for parameter in module.parameters():
        twin = nn.Parameter(parameter.data, parameter.requires_grad)
        if hasattr(parameter, _DTYPE):
            setattr(twin, _DTYPE, dtype_of(parameter))
        memo[id(parameter)] = twin
    return copy.deepcopy(module, memo)


def read(module: nn.Module) -> None:
    """Read the mapped weights of a module, in the dtype of the forward pass."""
    for parameter in module.parameters():
        if hasattr(parameter, _DTYPE):
            parameter.data = parameter.data.to(dtype_of(parameter), copy=True)
            delattr(parameter, _DTYPE)


@contextmanager
def hidden(module: nn.Module) -> Iterator[None]:
    """Show mapped weights as zeros in the dtype of the forward pass, which take no memory, inside the block."""
    held = {p: p.data for p in module.parameters() if hasattr(p, _DTYPE)}
    for parameter in held:
        parameter.data = torch.zeros((), dtype=dtype_of(parameter)).expand(parameter.shape)
    try:
        yield
    finally:
        for parameter, data in held.items():
            parameter.data = data
