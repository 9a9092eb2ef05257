"""From credited data to new weights. Only this module normalises losses: by the weight of the whole mini-batch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cavesson.algorithms.base import Algorithm
from cavesson.algorithms.settings import OptimizeSettings, UpdateSettings
from cavesson.ops.masked import weighted_mean
from cavesson.processes import Processes
from cavesson.randomness import Purpose, generator
from cavesson.train.finite import check_finite
from cavesson.train.optimizer import Optimizer
from cavesson.types import Batch

Metrics = dict[str, float]


class Place(NamedTuple):
    """The position of an update in the run."""

    seed: int
    step: int
    learning_rate: float


@dataclass(frozen=True)
class Learner:
    """The model that learns, with its optimiser, algorithm and processes.

    Given a batch, `model` computes what the algorithm's `loss` reads; it is changed in place.
    """

    model: nn.Module
    optimizer: Optimizer
    algorithm: Algorithm
    processes: Processes

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def update(
    learner: Learner,
    batch: Batch,
    settings: UpdateSettings,
    place: Place,
    *,
    first: Any = None,
    done: Sequence[Metrics] = (),
    after: Callable[[list[Metrics]], None] = lambda _: None,
) -> list[Metrics]:
    """Train on one step's rollouts.

    Args:
        learner: changed in place.
        batch: the credited rollouts of all processes.
        settings: epochs, mini-batches and guards.
        place: seed, step and learning rate.
        first: scores of this process's share under the current weights, with their graph. Given if the step is a single
            pass over a single micro-batch, for which scoring has already done the forward pass.
        done: metrics of the mini-batches that were done before the run was interrupted.
        after: called after every mini-batch with the metrics so far.

    Returns:
        The metrics of every mini-batch, in order.
    """
    metrics = list(done)
    if done and done[-1]["optim/stopped"]:
        return metrics
    epochs = (mini_batches(len(batch), settings, place, epoch) for epoch in range(settings.epochs))
    for rows in list(chain.from_iterable(epochs))[len(done) :]:
        seen = optimize(learner, batch.take(rows), settings, place, first, lambda seen: _verdict(seen, settings))
        metrics.append(seen)
        after(metrics)
        if seen["optim/stopped"]:
            break
    return metrics


def optimize(
    learner: Learner,
    mini: Batch,
    settings: OptimizeSettings,
    place: Place,
    first: Any = None,
    judge: Callable[[Metrics], str] = lambda _: "step",
) -> Metrics:
    """Do one optimiser step on a mini-batch of all processes, unless `judge` returns "skip" or "stop" for it."""
    optimizer, processes = learner.optimizer, learner.processes
    optimizer.zero_grad()
    seen = _accumulate(learner, mini, settings, place, first)
    # A weight of 0 means that there is nothing to learn, for example if all responses are empty.
    verdict = judge(seen) if seen["optim/weight"] else "skip"
    if verdict == "step":
        processes.sum_gradients(learner.model)
        norm = optimizer.grad_norm(settings.max_grad_norm)
        check_finite(place.step, {"the gradient": norm})
        optimizer.step(place.learning_rate)
        seen["optim/grad_norm"] = float(norm)
    optimizer.zero_grad()
    return {**seen, "optim/skipped": float(verdict == "skip"), "optim/stopped": float(verdict == "stop")}


@torch.no_grad()
def measure(learner: Learner, batch: Batch, micro_batch_size: int) -> tuple[Metrics, float]:
    """Return the weighted sums of an algorithm's metrics over data that is not learned from, and the total weight.

    Both cover only this process; `batch` is its share.
    """
    sums: Metrics = {}
    weight = 0.0
    for micro in batch.split(micro_batch_size or len(batch)):
        micro = micro.to(learner.device)
        weights = learner.algorithm.weights(micro)
        for name, items in learner.algorithm.loss(learner.model(micro), micro).means.items():
            sums[name] = sums.get(name, 0.0) + float(weighted_mean(items, weights, 1.0))
        weight += float(weights.sum())
    return sums, weight


def averaged(metrics: list[Metrics]) -> Metrics:
    """Return one step's metrics: maxima over its mini-batches for names that end in "_max", else means."""
    names = dict.fromkeys(name for seen in metrics for name in seen)
    values = {name: [seen[name] for seen in metrics if name in seen] for name in names}
    return {name: max(v) if name.endswith("_max") else sum(v) / len(v) for name, v in values.items()}


def mini_batches(size: int, settings: UpdateSettings, place: Place, epoch: int) -> list[Tensor]:
    """Return the rows of each optimiser step in one pass over a step's `size` rollouts."""
    if settings.mini_batches == 1:  # the order would only affect rounding
        return [torch.arange(size)]
    order = generator(place.seed, Purpose.MINI_BATCHES, place.step, epoch).permutation(size)
    # An algorithm may learn from fewer rows than there are mini-batches.
    return [part for part in torch.from_numpy(order).tensor_split(settings.mini_batches) if len(part)]


def micro_batches(size: int, settings: OptimizeSettings, processes: Processes) -> Sequence[Tensor]:
    """Return the micro-batches of this process, as rows of a mini-batch of `size` rows."""
    mine = torch.tensor(processes.share(size), dtype=torch.long)
    return mine.split(settings.micro_batch_size or len(mine)) if len(mine) else ()


def _accumulate(learner: Learner, mini: Batch, settings: OptimizeSettings, place: Place, first: Any) -> Metrics:
    algorithm, processes = learner.algorithm, learner.processes
    # Computed before the first micro-batch, over all processes, so that how rows are split cannot affect the gradient.
    total, weight = float(algorithm.total(mini)), float(algorithm.weights(mini).sum())
    means: Metrics = {}
    maxima: Metrics = {}
    for rows in micro_batches(len(mini), settings, processes) if weight else ():
        micro = mini.take(rows).to(learner.device)
        weights = algorithm.weights(micro)
        result = algorithm.loss(learner.model(micro) if first is None else first, micro)
        loss = weighted_mean(result.loss, weights, total)
        check_finite(place.step, {"the loss": loss.detach(), **_detached(result.means)}, weights)
        loss.backward()
        for name, items in _detached(result.means).items():
            means[name] = means.get(name, 0.0) + float(weighted_mean(items, weights, weight))
        for name, items in _detached(result.maxima).items() if bool((weights > 0).any()) else ():
            maxima[name] = max(maxima.get(name, -math.inf), float(items[weights > 0].max()))
    return {**processes.combine(means, sum), **processes.combine(maxima, max), "optim/weight": weight}


def _verdict(seen: Metrics, settings: UpdateSettings) -> str:
    if settings.target_policy_kl is not None and seen.get("policy/kl", 0.0) > 1.5 * settings.target_policy_kl:
        return "stop"
    if settings.max_ratio is not None and seen.get("policy/ratio", 1.0) > settings.max_ratio:
        return "skip"
    return "step"


def _detached(items: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in items.items()}
