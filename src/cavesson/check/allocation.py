"""The memory that a computation takes, measured by running it with fake tensors, which have a shape but no data.

PyTorch's `FakeTensorMode` runs a model's real code fast and without memory: every operator, including the attention
kernel of the device, only reports what it would return. Live memory is therefore counted, not estimated, for any
architecture, with or without adapters.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from cavesson.check.heap import Heap

__all__ = ["Allocations", "FakeTensorMode", "without_numbers"]


class Allocations(TorchDispatchMode):
    """Counts the bytes of all storages that operators create inside this mode, for as long as they are referenced."""

    def __init__(self, heap: Heap | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self.heap = heap
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and made.untyped_storage()._cdata not in given:
                self._count(made.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known[storage] = size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        piece = self.heap.take(size) if self.heap is not None else None
        weakref.finalize(storage, self._free, size, piece)

    def _free(self, size: int, piece: Any) -> None:
        self.live -= size
        if self.heap is not None:
            self.heap.give(piece)


def without_numbers(model: nn.Module, device: str) -> nn.Module:
    """Replace a model's meta tensors by fake tensors on `device`, in place; call it inside a `FakeTensorMode`."""
    made: dict[Tensor, Tensor] = {}  # tied weights stay tied
    for module in model.modules():
        for holder in (module._parameters, module._buffers):
            tensors: dict[str, Any] = holder
            for name, old in tensors.items():
                if old is None:
                    continue
                if old not in made:
                    new = torch.empty(old.shape, dtype=old.dtype, device=device)
                    made[old] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
                tensors[name] = made[old]
    return model
