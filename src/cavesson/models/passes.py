"""How the models of a run compute what they learn from: on a GPU packed and compiled, where that is exact.

Both ways are tried when a run starts, on a few tokens: the hidden states and a gradient must be those of the plain way.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from cavesson.errors import first_line
from cavesson.models.compiled import Compile, compile_layers, plain_layers, uncompiled
from cavesson.models.layers import as_in_run, forwards
from cavesson.models.packed import pack_rows, packed_states, unpack_rows
from cavesson.models.parts import UNSUPPORTED, causal, probe_ids, tolerance
from cavesson.models.policy import Policy, last_states
from cavesson.models.sequences import RewardModel, SequencePolicy
from cavesson.ops import piece_logprobs

Role = Policy | SequencePolicy | RewardModel
_LENGTHS = (5, 9, 2)
"""Tokens of the rows on which ways are compared."""


class Ways(NamedTuple):
    """The ways to try."""

    packed: bool
    compile: Compile | None
    """what compiles, if anything does"""


def use(role: Role, ways: Ways) -> Iterator[str]:
    """Let a role, and its frozen reference, use those of these ways that are exact; yield why others are not."""
    reference = role.frozen_reference if isinstance(role, Policy) else None
    models = [role.model, getattr(role, "critic", None), None if reference is None else reference.model]
    given = [model for model in models if model is not None]
    packed, compile = ways.packed, ways.compile
    expected = [_tried(model, _padded) for model in given]
    if packed:
        why = _first(_not_packed(model, each) for model, each in zip(given, expected, strict=True))
        packed = why is None
        if why is not None:
            yield f"sequences are padded, because {why}"
    if compile is not None:
        way = _packed if packed else _padded
        why = _first(_not_compiled(model, compile, way, each) for model, each in zip(given, expected, strict=True))
        if why is not None:
            for model in given:
                plain_layers(model)
            compile = None
            yield f"the layers are not compiled, because {why}"
    for one in (role, reference):
        if one is not None:
            _set(one, packed, compile)


def _set(role: Role, packed: bool, compile: Compile | None) -> None:
    role.packed = packed
    if isinstance(role, Policy) and (packed or compile is not None):
        role.shares_prompts = False  # that takes a cache, which is another way
    if not isinstance(role, RewardModel):
        kernels = None if compile is None else piece_logprobs.compiled(compile)
        role.logprobs = partial(piece_logprobs.piece_logprobs, kernels=kernels)


def _first(reasons: Iterator[str | None]) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)


def _not_packed(model: nn.Module, expected: list[Tensor]) -> str | None:
    """Return why packed sequences are not exact for a model, or None."""
    inner = causal(model)
    config = inner.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds or getattr(config, "attention_chunk_size", None):
        return f"{inner.config.model_type} has layers of another kind ({', '.join(sorted(kinds)) or 'in chunks'})"
    return _differs(model, _packed, expected)


def _not_compiled(model: nn.Module, compile: Compile, way: Callable[..., Tensor], expected: list[Tensor]) -> str | None:
    """Compile the layers of a model; return why that does not work, or None."""
    if not forwards(model):
        return f"{causal(model).config.model_type} has no layers that are known here"
    compile_layers(model, compile)
    return _differs(model, way, expected) or uncompiled(model)


def _differs(model: nn.Module, way: Callable[..., Tensor], expected: list[Tensor]) -> str | None:
    inner = causal(model)
    try:
        seen = _tried(model, way)
    except (*UNSUPPORTED, NotImplementedError, FailOnRecompileLimitHit, TorchDynamoException) as error:
        return f"{inner.config.model_type} raises {type(error).__name__} ({first_line(error)})"
    for one, other in zip(seen, expected, strict=True):
        if not float((one - other).abs().max()) <= tolerance(inner.dtype) * float(other.abs().max()):
            return f"{inner.config.model_type} computes other numbers in this way"
    return None


def _tried(model: nn.Module, way: Callable[..., Tensor]) -> list[Tensor]:
    """Return the hidden states of a few rows, and their gradient with respect to a trained weight, if any is."""
    lengths = torch.tensor(_LENGTHS)
    mask = (torch.arange(max(_LENGTHS)) < lengths[:, None]).long()
    mask[0] = mask[0].flip(0)  # padded on the left, as prompts are
    inner = causal(model)
    ids, mask = probe_ids(model, mask.numel()).view(mask.shape), mask.to(inner.device)
    trained = [p for p in model.parameters() if p.requires_grad]
    with as_in_run(), torch.set_grad_enabled(bool(trained)):
        states = way(model, ids, mask)[mask.bool()].float()
    if not trained:
        return [states]
    # A small one, in the lowest layers, so that the gradient passes through all others.
    smallest = min(trained[: len(trained) // 2 + 1], key=lambda p: p.numel())
    # Of a sum with different weights: norms keep the sum of squares constant.
    weights = torch.linspace(-1, 1, states.numel(), device=states.device).view_as(states)
    (gradient,) = torch.autograd.grad((states * weights).sum(), smallest, allow_unused=True)
    found: list[Any] = [states.detach(), gradient]
    return [x.float() for x in found if x is not None]


def _padded(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    return last_states(model, ids, mask)


def _packed(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    return unpack_rows(packed_states(model, pack_rows(ids, mask)), mask)
