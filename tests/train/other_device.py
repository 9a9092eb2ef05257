"""A second device for tests: its tensors are computed with by the CPU, but must not meet those of the CPU.

A machine without a GPU can so find code that works only as long as everything is on the CPU. What differs on a GPU
besides, such as kernels, rounding and streams, it cannot find.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("lazy", 0)
"""One that PyTorch knows, and has nothing for."""
_TRANSFERS = ("aten::_to_copy", "aten::copy_")
_INDEXING = ("aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put")
"""What takes indices on the CPU, on a GPU too."""


class Elsewhere(Tensor):
    """A tensor of the second device; `here` has its numbers."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> "Elsewhere":
        made = Tensor._make_wrapper_subclass(
            cls, here.shape, strides=here.stride(), storage_offset=here.storage_offset(), dtype=here.dtype,
            device=DEVICE,
        )  # fmt: skip
        made.here = here
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.here.tolist()

    def untyped_storage(self) -> torch.UntypedStorage:  # which safetensors asks for its address
        return self.here.untyped_storage()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Elsewhere({self.here})"


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Makes `torch.tensor` a function of tensors: it fills new ones where no mode can see it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.pop("device", None) if func is torch.tensor else None
        made = func(*args, **kwargs)
        return made if device is None else made.to(device)


def _call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do an operation on both devices' behalf.

    Raises:
        RuntimeError: tensors of both devices meet.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    theirs = {id(tensor.here): tensor for tensor in tensors if isinstance(tensor, Elsewhere)}
    name = func.name().split(".")[0]
    ours = [tensor for tensor in tensors if not isinstance(tensor, Elsewhere) and tensor.ndim]
    if theirs and ours and name not in (*_TRANSFERS, *_INDEXING):
        raise RuntimeError(f"{func} of tensors on {DEVICE} and on cpu, of the shape {tuple(ours[0].shape)}")
    device = kwargs.get("device")
    is_named = device is not None and torch.device(device) == DEVICE
    is_there = is_named if device is not None else bool(theirs)
    if name == "aten::copy_":
        is_there = isinstance(args[0], Elsewhere)
    if is_named:
        kwargs = {**kwargs, "device": "cpu"}
    inner = tree_map(lambda leaf: leaf.here if isinstance(leaf, Elsewhere) else leaf, (args, kwargs))
    done = func(*inner[0], **inner[1])

    def outer(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not is_there:
            return leaf
        return theirs.get(id(leaf)) if id(leaf) in theirs else Elsewhere(leaf)

    return tree_map(outer, done)


@contextmanager
def other_device() -> Iterator[torch.device]:
    """Make the second device available inside the block."""
    with pytest.MonkeyPatch.context() as patch, _Mode(), _Functions():
        # Weights that two modules share stay shared when they are moved, as they do on a GPU.
        patch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
        patch.setattr(torch, DEVICE.type, SimpleNamespace(), raising=False)  # the module of the device
        patch.setattr(optimizer, "_get_fused_kernels_supported_devices", lambda: ["cpu", DEVICE.type])
        yield DEVICE
