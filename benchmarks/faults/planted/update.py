"""Faults of the optimiser and its settings."""

from benchmarks.faults.fault import fault
from benchmarks.faults.setup import Setup
from dressage.train.run import Training


@fault(causes=["update-kl-large", "ratio-blow-up", "clip-fraction-high", "kl-explosion"], levels=(10, 30, 100))
def learning_rate_high(setup: Setup, level: float) -> None:
    setup.set("optimizer.learning_rate", 3e-4 * level)


@fault(causes=["kl-flat", "zero-gradient"], levels=(1e-9, 1e-10, 1e-12))
def learning_rate_zero(setup: Setup, level: float) -> None:
    setup.set("optimizer.learning_rate", level)


@fault(causes=["kl-flat", "zero-gradient"], levels=("layers", "most", "all"))
def frozen(setup: Setup, level: str) -> None:
    """The optimiser holds no weight that learns."""

    def built(training: Training) -> None:
        for group in training.trainer.learner.optimizer.param_groups:
            group["lr"] = 0.0
        training.trainer.learner.optimizer.step = lambda *args, **kwargs: None

    setup.built.append(built)


@fault(causes=["clip-fraction-high", "update-kl-large", "ratio-blow-up"], levels=(8, 16, 30), algorithms=["ppo"])
def too_many_epochs(setup: Setup, level: int) -> None:
    setup.set("update.epochs", level)
    setup.set("optimizer.learning_rate", 1e-3)


@fault(causes=["penalty-mis-scaled", "kl-flat"], levels=(30, 100, 300), algorithms=["ppo", "rloo"])
def penalty_drowns(setup: Setup, level: float) -> None:
    """β is so many times too large."""
    setup.set("kl.coef", 0.05 * level)


@fault(causes=["kl-explosion"], levels=(6, 10, 15))
def no_penalty(setup: Setup, level: float) -> None:
    """No KL penalty and a learning rate so many times the usual."""
    setup.set("kl.coef", 0.0)
    setup.set("optimizer.learning_rate", 3e-4 * level)


@fault(causes=["entropy-explosion"], levels=(0.1, 0.3, 1.0), algorithms=["ppo"])
def entropy_bonus(setup: Setup, level: float) -> None:
    setup.set("ppo.entropy_coef", level)
    setup.set("optimizer.learning_rate", 1e-3)
