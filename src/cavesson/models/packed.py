"""Sequences of different lengths in one row without padding, with attention that knows where each begins.

No mask of all pairs of tokens is read, and each sequence costs what its own tokens cost. Which models compute the same
numbers in this way is decided by trying, see `passes`.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from cavesson.models.layers import recomputed_in
from cavesson.models.parts import causal, trunk
from cavesson.ops.gpu import is_on_gpu
from cavesson.types import moved

_NAME = "cavesson_packed"
_HARMLESS = ("position_ids", "use_cache", "dropout", "is_causal", "cu_seq_lens_k", "max_length_k")
"""Arguments of attention that are known to change nothing here; others, such as windows and sinks, would."""
_GROUPS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters else {}
)
"""PyTorch 2.11 takes keys and values of grouped heads without being told."""


class Packed(NamedTuple):
    """Sequences one after the other, T tokens together."""

    ids: Tensor
    """`[1, T]`"""
    positions: Tensor
    """`[1, T]`, starting again at every sequence"""
    bounds: Tensor
    """int32 `[n + 1]`: where each of the n sequences begins, and T"""
    longest: int
    """tokens of the longest sequence"""

    def to(self, device: torch.device) -> "Packed":
        ids, positions, bounds = (moved(x, device) for x in (self.ids, self.positions, self.bounds))
        return Packed(ids, positions, bounds, self.longest)


def pack_rows(ids: Tensor, mask: Tensor) -> Packed:
    """Pack rows `[B, L]` of which the tokens in the mask exist; no row is empty. This belongs on the host."""
    inside, lengths = mask > 0, mask.sum(1)
    positions = (mask.cumsum(1) - 1)[inside]
    bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
    return Packed(ids[inside][None], positions[None].long(), bounds, int(lengths.max()))


def packed_states(model: nn.Module, packed: Packed) -> Tensor:
    """Compute the trunk's last hidden states `[1, T, H]`."""
    bounds, longest = packed.bounds, packed.longest
    with recomputed_in(partial(_attention, model)):
        output = trunk(model)(
            input_ids=packed.ids,
            position_ids=packed.positions,
            use_cache=False,
            cu_seq_lens_q=bounds,
            cu_seq_lens_k=bounds,
            max_length_q=longest,
            max_length_k=longest,
        )
    states: Tensor = output.last_hidden_state
    return states


@contextmanager
def _attention(model: nn.Module) -> Iterator[None]:
    """Let the layers of a model use the attention for packed sequences; without a function for masks, there is none."""
    config: Any = causal(model).config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention of `[1, heads, T, D]` within each sequence, as transformers calls it.

    Raise ValueError if the architecture asks for more than that.
    """
    unknown = [name for name, value in others.items() if value is not None and name not in _HARMLESS]
    if attention_mask is not None or cu_seq_lens_q is None or unknown:
        raise ValueError(f"attention with {', '.join(unknown) or 'a mask'}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if is_on_gpu(q):
        mixed: Any = varlen.varlen_attn(
            q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q,
            scale=scale, window_size=(-1, 0), **_GROUPS,
        )  # fmt: skip
    else:
        mixed = one_by_one(q, k, v, cu_seq_lens_q, scale)
    return mixed[None], None


@torch.library.custom_op("cavesson::one_by_one", mutates_args=())
def one_by_one(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float) -> Tensor:
    """Compute causal attention of `[T, heads, D]` for one sequence after the other, on any device."""
    mixed = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(0, 1)
        for q, k, v in _of_each(bounds, query, key, value)
    ]
    return torch.cat(mixed).contiguous()


def _of_each(bounds: Tensor, *tensors: Tensor) -> Iterator[list[Tensor]]:
    """Yield the part `[heads, L, D]` of each of these tensors `[T, heads, D]` for every sequence."""
    ends = bounds.tolist()
    for start, end in pairwise(ends):
        yield [x[start:end].transpose(0, 1) for x in tensors]


@one_by_one.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float) -> Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


@torch.library.custom_op("cavesson::one_by_one_backward", mutates_args=())
def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values (arXiv:2205.14135, appendix B.2)."""
    found: list[list[Tensor]] = []
    for g, q, k, v in _of_each(bounds, gradient, query, key, value):
        groups = len(q) // len(k)
        k, v = (x.repeat_interleave(groups, 0) for x in (k, v))
        future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
        p = (scale * q @ k.mT).masked_fill(future, -torch.inf).softmax(-1)
        to_p = g @ v.mT
        to_scores = scale * p * (to_p - (to_p * p).sum(-1, keepdim=True))
        each = [to_scores @ k, *(x.unflatten(0, (-1, groups)).sum(1) for x in (to_scores.mT @ q, p.mT @ g))]
        found.append([x.transpose(0, 1) for x in each])
    to_query, to_key, to_value = (torch.cat(parts).contiguous() for parts in zip(*found, strict=True))
    return to_query, to_key, to_value


@_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))  # type: ignore[return-value]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.scale = inputs[4]


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return (*torch.ops.cavesson.one_by_one_backward(gradient, *ctx.saved_tensors, ctx.scale), None, None)


one_by_one.register_autograd(_gradients, setup_context=_keep)
AttentionInterface.register(_NAME, _packed_attention)
