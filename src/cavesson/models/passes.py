"""How the models of a run compute what they learn from: on a GPU packed and compiled, where that is exact.

Both ways are tried when a run starts, on a few tokens: the hidden states and a gradient must be those of the plain way.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cavesson.models.compiled import NOT_COMPILED, Compile, Compiled, Failure, cause, compile_layers, plain_layers
from cavesson.models.layers import as_in_run, forwards
from cavesson.models.packed import pack_rows, packed_states
from cavesson.models.parts import UNSUPPORTED, causal, output_head, probe_ids, tolerance
from cavesson.models.policy import Policy, last_states
from cavesson.models.sequences import RewardModel, SequencePolicy
from cavesson.ops import piece_logprobs
from cavesson.ops.head import Head

Role = Policy | SequencePolicy | RewardModel
_FAILURES = (*UNSUPPORTED, *NOT_COMPILED)
"""What models and compilers raise that cannot do what they are asked for."""
_BATCHES = ((5, 9, 2), (7,))
"""Lengths of the rows in the batches that ways are compared on. A batch of one row is compiled separately."""


class Ways(NamedTuple):
    """The ways to try."""

    packed: bool
    compile: Compile | None
    """what compiles, if anything does"""


def use(role: Role, ways: Ways) -> Iterator[str]:
    """Let a role, and its frozen models, use those of these ways that are exact; yield why others are not."""
    used, reasons = exact_ways(role, ways)
    take(role, used)
    yield from reasons
    yield from _use_pieces([one for one in roles_of(role) if not isinstance(one, RewardModel)], used.compile)


def roles_of(role: Role) -> list[Role]:
    """Return a role and its frozen models, such as a reference."""
    return [role, *(role.frozen.values() if isinstance(role, Policy) else ())]


def models_of(role: Role) -> list[nn.Module]:
    """Return the models of a role: its own, a separate critic, and frozen ones."""
    found = [role.model, getattr(role, "critic", None), *(one.model for one in roles_of(role)[1:])]
    return [model for model in found if model is not None]


def take(role: Role, ways: Ways) -> None:
    """Let a role whose layers are compiled, if they are to be, read its batches in these ways."""
    for one in roles_of(role):
        one.packed = ways.packed
        if isinstance(one, Policy) and (ways.packed or ways.compile is not None):
            one.shares_prompts = False  # that takes a cache, which is another way


def exact_ways(role: Role, ways: Ways) -> tuple[Ways, list[str]]:
    """Return those of these ways that are exact for all models of a role, and why others are not.

    The layers are compiled then, if that is exact.
    """
    reasons, given = [], models_of(role)
    # A layout of examples that the user has chosen stays.
    packed = ways.packed and (isinstance(role, Policy) or role.shape is not None)
    compile = ways.compile
    expected = [_tried(model, _padded) for model in given]
    if packed:
        why = _first(_not_packed(model, each) for model, each in zip(given, expected, strict=True))
        packed = why is None
        if why is not None:
            reasons.append(f"sequences are padded, because {why}")
    if compile is not None:
        way = _packed if packed else _padded
        why = _first(_not_compiled(model, compile, way, each) for model, each in zip(given, expected, strict=True))
        if why is not None:
            for model in given:
                plain_layers(model)
            compile = None
            reasons.append(f"the layers are not compiled, because {why}")
    return Ways(packed, compile), reasons


def _use_pieces(roles: list[Policy | SequencePolicy], compile: Compile | None) -> Iterator[str]:
    """Let roles compute log-probabilities in large pieces, compiled where that is exact; yield why it is not."""
    kernels = piece_logprobs.PLAIN
    if compile is not None and roles:
        temperature = getattr(roles[0], "temperature", 1.0)
        failure = Failure("the output head is")
        compiled = piece_logprobs.compiled(lambda function: Compiled(function, compile(function), failure))
        why = _head_differs(output_head(roles[0].model), compiled, temperature)
        failure.has_worked = why is None
        if why is None:
            kernels = compiled
        else:
            yield f"the output head is not compiled, because {why}"
    for one in roles:
        one.logprobs = partial(piece_logprobs.piece_logprobs, kernels=kernels)


def _head_differs(head: Head, kernels: piece_logprobs.Kernels, temperature: float) -> str | None:
    """Return what is wrong with these kernels, beside the plain ones, or None."""
    hidden = torch.linspace(-1, 1, 4 * head.weight.shape[1], device=head.weight.device).view(4, -1)
    expected = _scored(head, hidden, piece_logprobs.PLAIN, temperature)
    try:
        seen = _scored(head, hidden, kernels, temperature)
    except _FAILURES as error:
        return f"it raises {cause(error)}"
    return None if _are_close(seen, expected, head.weight.dtype) else "it computes other numbers then"


def _scored(head: Head, hidden: Tensor, kernels: piece_logprobs.Kernels, temperature: float) -> list[Tensor]:
    """Return log-probabilities and entropies of a few states, and the gradient of the states."""
    given = hidden.to(head.weight.dtype).requires_grad_()
    targets = torch.arange(len(hidden), device=hidden.device)
    with torch.enable_grad():
        logprob, entropy = piece_logprobs.piece_logprobs(given, head, targets, temperature, kernels)
        weights = torch.linspace(-1, 1, len(hidden), device=hidden.device)
        (gradient,) = torch.autograd.grad((weights * (logprob + entropy)).sum(), given)
    return [logprob.detach(), entropy.detach(), gradient.float()]


def _are_close(seen: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> bool:
    """Return whether each tensor is the expected one, within the rounding of its largest number."""
    pairs = zip(seen, expected, strict=True)
    return all(bool((one - other).abs().max() <= tolerance(dtype) * other.abs().max()) for one, other in pairs)


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
    failure = compile_layers(model, compile)
    why = _differs(model, way, expected)
    failure.has_worked = why is None
    return why


def _differs(model: nn.Module, way: Callable[..., Tensor], expected: list[Tensor]) -> str | None:
    inner = causal(model)
    try:
        seen = _tried(model, way)
    except _FAILURES as error:
        return f"{inner.config.model_type} raises {cause(error)}"
    if not _are_close(seen, expected, inner.dtype):
        return f"{inner.config.model_type} computes other numbers in this way"
    return None


def _tried(model: nn.Module, way: Callable[..., Tensor]) -> list[Tensor]:
    """Return the hidden states of a few batches, and their gradients for a trained weight, if any is trained.

    Both passes are made, with the recomputation of the run: code that is compiled when the backward pass begins, or
    when it computes a layer again, could not be replaced there by the plain layer.
    """
    return [found for lengths in _BATCHES for found in _tried_batch(model, way, lengths)]


def _tried_batch(model: nn.Module, way: Callable[..., Tensor], lengths: tuple[int, ...]) -> list[Tensor]:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    mask[0] = mask[0].flip(0)  # padded on the left, as prompts are
    inner = causal(model)
    ids, mask = probe_ids(model, mask.numel()).view(mask.shape), mask.to(inner.device)
    trained = [p for p in model.parameters() if p.requires_grad]
    with as_in_run(), torch.set_grad_enabled(bool(trained)):
        states = way(model, ids, mask).float()
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
    return last_states(model, ids, mask)[mask > 0]


def _packed(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    return packed_states(model, pack_rows(ids, mask)).squeeze(0)
