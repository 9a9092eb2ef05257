"""The layers of a model: how a run computes them, and what it keeps of them for the backward pass."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from cavesson.errors import UserError

Recomputation = bool | Literal["half"]
"""Which layers are computed again in the backward pass: all, none, or every second one."""

Way = Literal["plain", "learning", "decoding"]

_way: ContextVar[Way] = ContextVar("way", default="plain")
_again: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar("again", default=nullcontext)


@contextmanager
def layers_for(way: Way) -> Iterator[None]:
    """Compute layers inside the block in the way that was chosen for this; elsewhere plainly."""
    token = _way.set(way)
    try:
        yield
    finally:
        _way.reset(token)


def as_in_run() -> AbstractContextManager[None]:
    """Compute layers inside the block in the way that was chosen for learning."""
    return layers_for("learning")


@contextmanager
def recomputed_in(context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Compute layers inside the block in a context, and again in the same one when the backward pass needs them."""
    token = _again.set(context)
    try:
        with context():
            yield
    finally:
        _again.reset(token)


class Forward:
    """The forward method of a layer, in place of that of its class."""

    def __init__(self, layer: nn.Module) -> None:
        # The method of the class, so that a model that is trained twice is not wrapped twice.
        self.plain: Callable[..., Any] = MethodType(type(layer).forward, layer)
        self.compiled: Callable[..., Any] | None = None
        """for learning"""
        self.decoding: Callable[..., Any] | None = None
        """for a step of decoding"""
        self.recomputes = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Decided here, because the backward pass, which may call it again, is in another thread.
        forward = {"learning": self.compiled, "decoding": self.decoding}.get(_way.get()) or self.plain
        if self.recomputes and torch.is_grad_enabled():
            again = _again.get()
            return checkpoint(
                forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), again()), **kwargs
            )
        return forward(*args, **kwargs)


def forwards(model: nn.Module) -> list[Forward]:
    """Return the forward methods of a model's layers, in their order, put in place if they are not."""
    found = []
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            own = vars(layer).get("forward")
            layer.forward = own if isinstance(own, Forward) else Forward(layer)
            found.append(layer.forward)
    return found


def recompute_layers(model: nn.Module, which: Recomputation = True) -> None:
    """Store only the input of a layer, and recompute the layer in the backward pass.

    transformers supports this only in training mode, which also enables dropout and the noise of mixture-of-experts
    routers: training would see other numbers than scoring.

    Raises:
        UserError: the architecture has no layers that support this.
    """
    if not which:
        return
    layers = forwards(model)
    if not layers:
        raise UserError(f"model.gradient_checkpointing: {type(model).__name__} cannot recompute its layers")
    for number, forward in enumerate(layers):
        forward.recomputes = which is True or number % 2 == 0
