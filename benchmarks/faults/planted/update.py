"""Faults of the optimiser and its settings."""

import torch

from benchmarks.faults.fault import fault
from benchmarks.faults.setup import LEARNING_RATE, Setup
from cavesson.train.run import Training


@fault(causes=["update-kl-large", "ratio-blow-up", "clip-fraction-high", "kl-explosion"], levels=(10, 30, 100))
def learning_rate_high(setup: Setup, level: float) -> None:
    setup.set("optimizer.learning_rate", LEARNING_RATE * level)


@fault(causes=["kl-flat", "zero-gradient"], levels=(1e-9, 1e-10, 1e-12))
def learning_rate_zero(setup: Setup, level: float) -> None:
    setup.set("optimizer.learning_rate", level)


@fault(causes=["kl-flat", "zero-gradient"], levels=("hook", "copy", "step"))
def frozen(setup: Setup, level: str) -> None:
    """Nothing is learned: a hook clears the gradients, the optimiser holds copies of the weights, or never steps."""

    def built(training: Training) -> None:
        optimizer = training.trainer.learner.optimizer
        if level == "step":
            optimizer.step = lambda learning_rate: None  # type: ignore[method-assign]
        for parameter in optimizer.parameters.values() if level == "hook" else ():
            parameter.register_hook(torch.zeros_like)
        for group in optimizer._adam.param_groups if level == "copy" else ():
            group["params"] = [parameter.detach().clone() for parameter in group["params"]]

    setup.built.append(built)


@fault(causes=["clip-fraction-high", "update-kl-large", "ratio-blow-up"], levels=(5, 8, 12), algorithms=["ppo"])
def too_many_epochs(setup: Setup, level: int) -> None:
    setup.set("update.epochs", level)
    setup.set("optimizer.learning_rate", 4 * LEARNING_RATE)


@fault(causes=["penalty-mis-scaled", "kl-flat"], levels=(30, 100, 300), algorithms=["ppo", "rloo"])
def penalty_drowns(setup: Setup, level: float) -> None:
    """β is so many times too large."""
    setup.set("kl.coef", 0.05 * level)


@fault(causes=["kl-explosion", "update-kl-large", "ratio-blow-up", "clip-fraction-high"], levels=(6, 10, 15))
def penalty_missing(setup: Setup, level: float) -> None:
    """No KL penalty and a learning rate so many times the usual."""
    setup.set("kl.coef", 0.0)
    setup.set("optimizer.learning_rate", LEARNING_RATE * level)


@fault(causes=["entropy-explosion"], levels=(0.3, 0.5, 1.0), algorithms=["ppo"])
def entropy_bonus(setup: Setup, level: float) -> None:
    setup.set("ppo.entropy_coef", level)
    setup.set("optimizer.learning_rate", 1e-3)
