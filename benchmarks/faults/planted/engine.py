"""Faults of an inference engine beside the trainer: weights that are old, wrong or computed otherwise."""

from typing import Any

import torch

from benchmarks.faults.fault import fault
from benchmarks.faults.setup import Setup, separate_sampler, synchronise
from cavesson.rollout.engines import distribution
from cavesson.train.run import Training


def _engine(setup: Setup, every: int, spoil: Any = None) -> None:
    """Samples from a copy of the weights that is synchronised every so many steps, and spoilt after that."""
    engines: dict[int, Any] = {}

    def built(training: Training) -> None:
        engines[0] = separate_sampler(training)

    def before(training: Training, step: int) -> None:
        if step % every == 0:
            synchronise(training, engines[0])
            if spoil is not None:
                spoil(engines[0].model, step)

    setup.built.append(built)
    setup.before_step.append(before)


@fault(causes=["sampler-stale"], levels=(4, 10, 1000))
def engine_stale(setup: Setup, level: int) -> None:
    """New weights reach the engine every so many steps only."""
    _engine(setup, level)


@fault(causes=["sampler-mismatch", "precision-noise", "mismatch-rare-tokens"], levels=(0.04, 0.08, 0.16))
def engine_noise(setup: Setup, level: float) -> None:
    """The engine computes in other kernels and precision: noise of this relative size on its weights."""

    @torch.no_grad()
    def spoil(model: Any, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for weight in model.parameters():
            weight.mul_(1 + level * torch.randn(weight.shape, generator=generator))

    _engine(setup, 1, spoil)


@fault(causes=["precision-noise", "sampler-mismatch", "mismatch-rare-tokens"], levels=(4, 3, 2))
def engine_quantised(setup: Setup, level: int) -> None:
    """The engine holds its weights in so many bits."""

    @torch.no_grad()
    def spoil(model: Any, step: int) -> None:
        for weight in model.parameters():
            if weight.dim() == 2:
                scale = weight.abs().amax(1, keepdim=True) / (2 ** (level - 1) - 1)
                weight.copy_((weight / scale).round() * scale)

    _engine(setup, 1, spoil)


@fault(causes=["garbled", "sampler-stale"], levels=(0.5, 0.8, 1.0), onset=15)
def engine_garbled(setup: Setup, level: float) -> None:
    """From step 15 on, a share of one layer's weights does not arrive and holds something else."""

    @torch.no_grad()
    def spoil(model: Any, step: int) -> None:
        if step < 15:
            return
        generator = torch.Generator().manual_seed(1)
        for name, weight in model.named_parameters():
            if "layers.0." in name and weight.dim() == 2:
                gone = torch.rand(weight.shape, generator=generator) < level
                weight.copy_(torch.where(gone, weight.std() * torch.randn(weight.shape, generator=generator), weight))

    _engine(setup, 1, spoil)


@fault(causes=["mismatch-tail"], levels=(0.004, 0.01, 0.03))
def engine_routing(setup: Setup, level: float) -> None:
    """On a share of the tokens the engine takes another path (another expert) and finds quite other logits."""
    generator = torch.Generator().manual_seed(setup.seed)

    def elsewhere(original: Any, logits: Any, settings: Any) -> Any:
        other = torch.rand(len(logits), 1, generator=generator) < level
        noise = 2.5 * torch.randn(logits.shape, generator=generator)
        return original(torch.where(other, logits + noise, logits), settings)

    setup.wrap(distribution, "sampling_logprobs", elsewhere)


@fault(causes=["too-off-policy", "sampler-stale"], levels=(10, 14, 20))
def queue_long(setup: Setup, level: int) -> None:
    """Rollouts wait for so many steps before they are learned from."""
    history: list[dict[str, torch.Tensor]] = []
    engines: dict[int, Any] = {}

    def built(training: Training) -> None:
        engines[0] = separate_sampler(training)

    def before(training: Training, step: int) -> None:
        synchronise(training, engines[0])
        now = {name: weight.clone() for name, weight in engines[0].model.state_dict().items()}
        history.append(now)
        engines[0].model.load_state_dict(history[max(0, step - level)])

    def rollouts(original: Any, self: Any, step: int, rows: Any, *rest: Any) -> Any:
        rows = {**rows, "policy_version": [max(0, step - level)] * len(rows["sample"])}
        return original(self, step, rows, *rest)

    from cavesson.record import Recorder

    setup.built.append(built)
    setup.before_step.append(before)
    setup.wrap(Recorder, "rollouts", rollouts)
