"""The operations of a computation: how much each computes, moves in memory, and sends to other processes."""

from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_c10d = torch.ops.c10d


class Operation(NamedTuple):
    """One operation of a process."""

    flops: int
    """floating-point operations of a matrix product or of attention"""
    moved: int
    """bytes that are read and written"""
    sent: int
    """bytes that a process sends to each neighbour in a ring of all processes"""
    is_half: bool
    """whether it is computed in 16 bits"""


Work = Mapping[Operation, float]
"""How often each operation occurs."""


class Operations(TorchDispatchMode):
    """Records the operations inside this mode."""

    def __init__(self, processes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.processes = processes
        self.seen: Counter[Operation] = Counter()
        """how often each operation has occurred"""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented  # it comes again as an operation on the tensors of this process
        result = function(*args, **(kwargs or {}))
        if not function.is_view:
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            flops = _flops(function, args, kwargs or {}, result)
            is_half = any(x.dtype in (torch.bfloat16, torch.float16) for x in given)
            sent = _sent(function, args, self.processes)
            moved = 0 if sent else sum(map(_bytes, given)) + sum(map(_bytes, made))
            if flops or moved or sent:
                self.seen[Operation(flops, moved, sent, is_half)] += 1
        return result


def _flops(function: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the floating-point operations of matrix products and attention, which PyTorch's counter knows."""
    packet = function._overloadpacket
    if packet is torch.ops.mkldnn._linear_pointwise:
        return 2 * int(prod(args[0].shape)) * len(args[1])
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return _attention(sdpa_flop_count(*(x.shape for x in args[:3])), args, 4)
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return _attention(sdpa_backward_flop_count(*(x.shape for x in args[:4])), args, 7)
    return int(flop_registry[packet](*args, **kwargs, out_val=result)) if packet in flop_registry else 0


def _attention(flops: int, args: Any, place: int) -> int:
    """Return the operations of attention; a causal one, as the argument at this place says, skips half of them."""
    return flops // 2 if len(args) > place and args[place] else int(flops)


def _sent(function: Any, args: Any, processes: int) -> int:
    """Return the bytes that a process sends in a collective operation, in a ring (arXiv:1909.09756, section 2)."""
    share = (processes - 1) / processes
    if function is _c10d._allgather_base_.default:
        return int(share * _bytes(args[0]))
    if function is _c10d._reduce_scatter_base_.default:
        return int(share * _bytes(args[1]))
    if function is _c10d.allreduce_.default:
        return int(2 * share * sum(map(_bytes, args[0])))
    return 0


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
