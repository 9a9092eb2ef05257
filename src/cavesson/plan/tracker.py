"""PyTorch's memory trackers, with the parts of memory that a plan names."""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType, _ModState, _RefType
from torch.distributed.fsdp import FSDPModule

from cavesson.plan.fakes import tensors_in
from cavesson.train.optimizer import Optimizer

_PARTS = {
    "Gradient": "gradients", "Sharded Grad": "gradients", "Unsharded Grad": "gradients", "Reduce Scatter": "gradients",
    "Unsharded Param": "gathered weights", "All Gather": "gathered weights",
    "Activation": "activations", "Temp": "activations", "Logits and head": "logits and head",
}  # fmt: skip
"""What a tracker calls memory that comes and goes, and what a plan calls it."""


class _Kind(_RefType):
    """A category of memory besides those of PyTorch's trackers."""

    HEAD = "Logits and head"


class _Tracker(MemTracker):
    """Gives tensors over the vocabulary a category of their own."""

    vocabulary = 0
    _ref_class: Any

    def prepare(self, vocabulary: int) -> None:
        self._ref_class = (*self._ref_class, _Kind.HEAD)
        self.vocabulary = vocabulary

    def _track(self, reftype: _RefType, t: Tensor) -> None:
        super()._track(_Kind.HEAD if self.vocabulary in t.shape else reftype, t)


class _NoModules:
    """Follows no modules, instead of PyTorch's `ModTracker`."""

    is_bw = False
    parents = frozenset[str]()

    def _ignore(self, *_: object) -> None:
        pass

    __enter__ = __exit__ = register_user_hooks = clear_user_hooks = _ignore


class _WholeTracker(_Tracker):
    """Of weights that are not sharded: it counts the same as PyTorch's in less time."""

    def __init__(self) -> None:
        super().__init__()
        self._mod_tracker: Any = _NoModules()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        kind = _MemRefType.OPT if self._in_opt else _MemRefType.ACT
        for tensor in tensors_in(result):
            if tensor.untyped_storage() not in self._WINFO:
                self._track(kind, tensor)
        self._update_peak_stats(_ModState.PEAK_FW)
        return result


class _ShardedTracker(_Tracker, FSDPMemTracker):
    """Of weights that are sharded with FSDP2."""


def tracker_of(role: nn.Module, optimizer: Optimizer, vocabulary: int) -> _Tracker:
    """Return the tracker of a role and its optimiser; a context manager in which everything is tracked.

    Args:
        role: the model that learns, as `Learner` has it.
        optimizer: its optimiser.
        vocabulary: size of the vocabulary.
    """
    if isinstance(role, FSDPModule):
        sharded = _ShardedTracker(role, optimizer._adam)
        sharded.prepare(vocabulary)
        return sharded
    whole = _WholeTracker()
    whole.prepare(vocabulary)
    whole.track_external(role, optimizer._adam)
    for parameter in optimizer.parameters.values():
        parameter.register_post_accumulate_grad_hook(_marks(whole))
    return whole


def _marks(tracker: MemTracker) -> Callable[[Tensor], None]:
    def mark(parameter: Tensor) -> None:
        if parameter.grad is not None:  # with update.in_backward, it has been freed already
            tracker._update_and_maybe_create_winfos(parameter.grad, _MemRefType.GRAD)

    return mark


def parts(tracker: MemTracker, when: str = "peak") -> dict[str, int]:
    """Return the bytes of each part of the memory that comes and goes, and of the rest as "kept"."""
    found = dict.fromkeys([*dict.fromkeys(_PARTS.values()), "kept"], 0)
    snapshot: Mapping[Any, int] = tracker.get_tracker_snapshot(when).get(torch.device("cpu"), {})
    for category, size in snapshot.items():
        if isinstance(category, Enum):
            found[_PARTS.get(category.value, "kept")] += size
    return found
