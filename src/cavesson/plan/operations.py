"""The operations of a computation: how much each computes, moves in memory, and sends to other processes."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.attention.varlen  # registers its operators
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from cavesson.plan.fakes import tensors_in

_aten, _c10d = torch.ops.aten, torch.ops.c10d
_WRITE_ONLY = {_aten.copy_, _aten.zero_, _aten.fill_, _aten.zeros_like, _aten.ones_like, _aten.full_like,
               _aten.new_zeros, _aten.new_ones, _aten.new_full}  # fmt: skip
"""Operations that do not read their first tensor."""
_LOOK_UP = {_aten.index, _aten.gather, _aten.embedding, _aten.index_select}
"""Operations that read only those numbers of their first tensor that they return."""
_ALLOCATE = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided,
             _aten._unsafe_view}  # fmt: skip
"""Operations that neither read nor write."""
_TO_WEIGHTS = "fsdp::split_with_sizes_copy"
"""Name of the operation that copies what FSDP2 has gathered into weights, for which it has just got memory."""
_ATTENTION: dict[Any, tuple[int, int, int, int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: (0, 1, 1, 4),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (1, 3, 2, 7),
}
"""The place of the queries, which keys and values follow, among the arguments of attention; how many products sum over
the numbers of a key, and how many over those of a value; and the argument that says whether it is causal.

Forward, those are queries · keys, and scores · values. Backward computes the scores again and the gradients of queries,
keys, scores and values (arXiv:2205.14135, algorithm 4)."""
_VARLEN: dict[Any, tuple[int, int, int, int]] = {
    torch.ops.torch_attn._varlen_attn: (0, 3, 7, 2),
    torch.ops.torch_attn._varlen_attn_backward: (1, 6, 10, 5),
}
"""The place of the queries among the arguments of attention in packed sequences, of the bounds between these, and of
whether it is causal; and the number of products, as above."""
Precision = Literal["half", "tf32", "full"]
"""Of matrix products: of factors in 16 bits; of float32 ones that are rounded to TF32 on a GPU; or not rounded."""


class Operation(NamedTuple):
    """One operation of a process."""

    flops: int
    """floating-point operations of a matrix product or of attention"""
    moved: int
    """bytes that are read and written"""
    sent: int
    """bytes that a process sends to each neighbour in a ring of all processes"""
    precision: Precision


Work = Mapping[Operation, float]
"""How often each operation occurs."""


class Operations(TorchDispatchMode):
    """Records the operations inside this mode.

    Args:
        processes: number of processes.
    """

    def __init__(self, processes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.processes = processes
        self.seen: Counter[Operation] = Counter()
        """how often each operation has occurred"""
        self._times = 1

    def alike(self, chunks: Sequence[slice]) -> Iterator[slice]:
        """Yield the first chunk, the second for all between the first and the last, and the last.

        Those between do the same on as many rows, and results of the one before are in memory. The last has fewer rows.
        """
        yield from chunks[:1]
        if len(chunks) > 2:
            self._times = len(chunks) - 2
            yield chunks[1]
            self._times = 1
        yield from chunks[1:][-1:]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented  # it comes again as an operation on the tensors of this process
        result = function(*args, **(kwargs or {}))
        if not function.is_view and function.namespace != "prim":  # which asks for properties of tensors
            given, made = tensors_in((args, kwargs)), tensors_in(result)
            if function.name() == _TO_WEIGHTS:
                given, made = given[:1], given[1:]
            flops = _flops(function, args, kwargs or {}, result)
            sent = _sent(function, args, self.processes)
            moved = 0 if sent else _moved(function, given, made)
            if flops or moved or sent:
                self.seen[Operation(flops, moved, sent, _precision(given))] += self._times
        return result


def _moved(function: Any, given: list[Tensor], made: list[Tensor]) -> int:
    """Return the bytes that an operation reads and writes."""
    packet = function._overloadpacket
    if packet in _ALLOCATE:
        return 0
    if packet is _aten.index_put_:  # reads and writes as many numbers as it is given in the last tensor
        return sum(map(_bytes, given[1:])) + 2 * _bytes(given[-1])
    read = given[1:] if packet in _WRITE_ONLY else [*made, *given[1:]] if packet in _LOOK_UP else given
    return sum(map(_bytes, read)) + sum(map(_bytes, made))


def _precision(given: list[Tensor]) -> Precision:
    if any(x.dtype in (torch.bfloat16, torch.float16) for x in given):
        return "half"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "full"


def _flops(function: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the floating-point operations of matrix products and attention, which PyTorch's counter knows."""
    packet = function._overloadpacket
    if packet is torch.ops.mkldnn._linear_pointwise:
        return 2 * int(prod(args[0].shape)) * len(args[1])
    if packet in _ATTENTION:
        first, of_keys, of_values, causal = _ATTENTION[packet]
        (rows, heads, queries, key), (*_, keys, _), (*_, value) = (x.shape for x in args[first : first + 3])
        flops = 2 * int(rows * heads * queries * keys * (of_keys * key + of_values * value))
        return flops // 2 if len(args) > causal and args[causal] else flops  # half of the pairs of tokens are masked
    if packet in _VARLEN:
        first, bounds, causal, products = _VARLEN[packet]
        _, heads, size = args[first].shape
        with unset_fake_temporarily():
            pairs = int(args[bounds].diff().long().square().sum())
        return int(2 * heads * size * products * pairs) // (2 if args[causal] else 1)
    return int(flop_registry[packet](*args, **kwargs, out_val=result)) if packet in flop_registry else 0


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
    """Return the bytes of a tensor in memory, where an expanded one is as small as the original."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
