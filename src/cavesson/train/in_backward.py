"""AdamW inside the backward pass: each gradient is applied and freed as soon as it is complete."""

import math

import torch
from torch import Tensor, nn

from cavesson.algorithms.runs import ExampleRun, RolloutRun
from cavesson.algorithms.settings import OptimizerSettings
from cavesson.train.optimizer import Optimizer, compiling


class InBackward(Optimizer):
    """The same steps as `Optimizer`, bit for bit, without ever holding all gradients of the module.

    Clipping needs the norm of all gradients before any is applied, so the backward pass runs twice: `backward` measures
    each gradient and frees it, and `step` computes each again, applies and frees it. In between, the graph is kept.
    """

    def __init__(self, module: nn.Module, settings: OptimizerSettings) -> None:
        super().__init__(module, settings)
        self._loss: Tensor | None = None
        self._norms: dict[str, Tensor] = {}
        self._scale = torch.ones(())
        self._is_measuring = False
        for name in self.parameters:
            self._add_hook(name)

    def _add_hook(self, name: str) -> None:
        def use(parameter: Tensor) -> None:
            if self._is_measuring:
                self._norms[name] = torch.linalg.vector_norm(parameter.grad)
            else:
                assert parameter.grad is not None
                parameter.grad.mul_(self._scale)
                self._apply()
            parameter.grad = self.masters[name].grad = None

        self.parameters[name].register_post_accumulate_grad_hook(use)

    def zero_grad(self) -> None:
        super().zero_grad()
        self._loss = None
        self._norms.clear()

    def backward(self, loss: Tensor) -> None:
        """Measure the gradients of a loss, which has to be that of the whole mini-batch."""
        assert self._loss is None, "a gradient is complete only after the last micro-batch"
        self._loss, self._is_measuring = loss, True
        with compiling():
            loss.backward(retain_graph=True)
        self._is_measuring = False

    def grad_norm(self, limit: float | None) -> Tensor:
        norms = [self._norms[name] for name in self.parameters if name in self._norms]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        # As in torch.nn.utils.clip_grad_norm_.
        self._scale = torch.clamp((math.inf if limit is None else limit) / (norm + 1e-6), max=1.0)
        return norm

    def step(self, learning_rate: float) -> None:
        self._set(learning_rate)
        assert self._loss is not None
        with compiling():
            self._loss.backward()


def optimizer_of(module: nn.Module, settings: RolloutRun | ExampleRun) -> Optimizer:
    """Return the optimiser of a run."""
    kind = InBackward if settings.update.in_backward else Optimizer
    return kind(module, settings.optimizer)
