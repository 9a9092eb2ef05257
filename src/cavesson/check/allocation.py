"""Which memory a computation takes, found by doing it with tensors that have a shape and no numbers.

PyTorch's `FakeTensorMode` runs a model's real code in a moment and in no memory: every operator says what it would
return, the attention kernel of the device included. What is alive at any time is therefore counted, not estimated, for
any architecture, adapters or not.
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
    """Counts the bytes of all storages that operators make within it, as long as something refers to them."""

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
    """Give a model on the meta device fake tensors on `device`, in place; to be called within a `FakeTensorMode`."""
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
