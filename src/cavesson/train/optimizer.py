"""AdamW in float32 for weights of any dtype, with a state that can be saved as safetensors."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.trainer_pt_utils import get_parameter_names

from cavesson.algorithms.settings import OptimizerSettings
from cavesson.errors import UserError
from cavesson.models.compiled import NOT_COMPILED, cause
from cavesson.models.policy import ValueHead
from cavesson.models.sharding import Slices, fill

_NOT_DECAYED = ("bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
"""Patterns of parameters' names in `Trainer.get_decay_parameter_names` of transformers."""


class Optimizer:
    """AdamW over the trainable parameters of a module.

    Parameters in bfloat16 are updated through a float32 copy: updates with a learning rate of 1e-5 are far below the
    spacing of bfloat16 numbers and would be lost to rounding. For the same reason, their gradients are kept in float32:
    in bfloat16, the sum over many micro-batches would lose a percent.
    """

    def __init__(self, module: nn.Module, settings: OptimizerSettings) -> None:
        self.settings = settings
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.masters = {
            name: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float())
            for name, p in self.parameters.items()
        }
        for parameter in self.parameters.values():
            parameter.grad_dtype = torch.float32  # autograd casts the gradients that it adds
        names, groups = decayed(module), dict[bool, list[Tensor]]()
        for name, master in self.masters.items():
            groups.setdefault(name in names, []).append(master)
        self._adam = torch.optim.AdamW(
            [
                {"params": group, "weight_decay": settings.weight_decay if decays else 0.0}
                for decays, group in groups.items()
            ],
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )

    def zero_grad(self) -> None:
        for parameter in (*self.parameters.values(), *self.masters.values()):
            parameter.grad = None

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of the loss of a micro-batch."""
        with compiling():
            loss.backward()

    def grad_norm(self, limit: float | None) -> Tensor:
        """Return the norm of all gradients together, and scale them down to `limit` if it is larger."""
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), math.inf if limit is None else limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step(self, learning_rate: float) -> None:
        self._set(learning_rate)
        self._apply()

    def _set(self, learning_rate: float) -> None:
        for group in self._adam.param_groups:
            group["lr"] = learning_rate

    @torch.no_grad()
    def _apply(self) -> None:
        """Update the parameters that have gradients."""
        copied = [
            (parameter, master)
            for parameter, master in zip(self.parameters.values(), self.masters.values(), strict=True)
            if master is not parameter and parameter.grad is not None
        ]
        for parameter, master in copied:
            master.grad = parameter.grad
        self._adam.step()
        if copied:
            parameters, masters = zip(*copied, strict=True)
            torch._foreach_copy_(parameters, masters)  # in a few launches

    def state(self) -> dict[str, Tensor]:
        """Return averages and step counts, by parameter name."""
        return {
            f"{key}.{name}": value
            for name, master in self.masters.items()
            for key, value in self._adam.state[master].items()
        }

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor | Slices], tensors: Mapping[str, Tensor | Slices]) -> None:
        """Restore the weights, given in float32, and what `state` returned; sharded weights get their slices."""
        for name, master in self.masters.items():
            fill(master, weights[name])
            if master is not self.parameters[name]:
                self.parameters[name].copy_(master)
            state = self._adam.state[master] = {}
            for key in ("exp_avg", "exp_avg_sq", "step"):
                saved = tensors.get(f"{key}.{name}")
                if saved is not None:
                    like = master if key != "step" else torch.zeros((), device=master.device)
                    state[key] = torch.empty_like(like)
                    fill(state[key], saved)


@contextmanager
def compiling() -> Iterator[None]:
    """Raise a UserError if the backward pass in this block needs code that cannot be compiled.

    Inside a backward pass, plain layers cannot take over.
    """
    try:
        yield
    except NOT_COMPILED as error:
        raise UserError(
            f"the backward pass cannot be compiled: {cause(error)}; set model.compile to none, and resume the run with "
            "--model.compile none"
        ) from error


def decayed(module: nn.Module) -> set[str]:
    """Return the names of the parameters that weight decay pulls towards zero.

    These are all but biases, and the weights of norms and value heads. Hugging Face's Trainer, which finds norms by
    their names, decays the same ones, but also norms with other names and value heads.
    """
    norms = {type(part) for part in module.modules() if type(part).__name__.lower().endswith("norm")}
    return set(get_parameter_names(module, [*norms, ValueHead], _NOT_DECAYED))


def learning_rate(settings: OptimizerSettings, step: int, steps: int) -> float:
    """Return the learning rate of training step `step` of `steps`.

    It depends only on the step, so a checkpoint need not save it.
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
    factor = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    return settings.learning_rate * factor[settings.schedule]
