"""Gradient checkpointing: recompute activations in the backward pass instead of storing them."""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from cavesson.errors import UserError


def recompute_layers(model: nn.Module) -> None:
    """Store only the input of every layer, and recompute the layer in the backward pass.

    transformers supports this only in training mode, which also enables dropout and the noise of mixture-of-experts
    routers: training would see other numbers than scoring.

    Raises:
        UserError: the architecture has no layers that support this.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(f"model.gradient_checkpointing: {type(model).__name__} cannot compute its layers again")
    for layer in layers:
        # The forward method of the class, so that a model that is trained twice is not wrapped twice.
        layer.forward = partial(_again, MethodType(type(layer).forward, layer))


def _again(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
