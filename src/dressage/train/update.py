"""From credited rollouts to new weights. The only place that divides: by the weight of the whole mini-batch."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dressage.algorithms.base import Algorithm
from dressage.models.policy import Policy, Scores
from dressage.ops.masked import weighted_mean
from dressage.sampling.randomness import Purpose, generator
from dressage.train.finite import check_finite
from dressage.train.optimizer import Optimizer
from dressage.train.processes import Processes
from dressage.train.settings import UpdateSettings
from dressage.types import Batch


class Place(NamedTuple):
    """Where in the run an update happens."""

    seed: int
    step: int
    learning_rate: float


def update(
    policy: Policy,
    optimizer: Optimizer,
    algorithm: Algorithm,
    batch: Batch,
    settings: UpdateSettings,
    processes: Processes,
    place: Place,
    first: Scores | None = None,
) -> list[dict[str, float]]:
    """Train on one step's rollouts.

    Args:
        policy: the model, changed in place.
        optimizer: of its parameters.
        algorithm: says what is averaged over and what is minimised.
        batch: the credited rollouts of all processes.
        settings: epochs, mini-batches and guards.
        processes: who else computes.
        place: seed, step and learning rate.
        first: scores of this process' share under the present weights, with their graph. Given where the step is a
            single pass over a single micro-batch: scoring has then done the forward pass already.

    Returns:
        the metrics of every mini-batch, in order.
    """
    metrics = []
    for rows in _mini_batches(len(batch), settings, place):
        optimizer.zero_grad()
        seen = _accumulate(policy, algorithm, batch.take(rows), settings, processes, place, first)
        verdict = _verdict(seen, settings)
        if verdict == "step":
            processes.sum_gradients(policy)
            norm = optimizer.grad_norm(settings.max_grad_norm)
            check_finite(place.step, {"the gradient": norm})
            optimizer.step(place.learning_rate)
            seen["optim/grad_norm"] = float(norm)
        metrics.append({**seen, "optim/skipped": float(verdict == "skip"), "optim/stopped": float(verdict == "stop")})
        if verdict == "stop":
            break
    optimizer.zero_grad()
    return metrics


def averaged(metrics: list[dict[str, float]]) -> dict[str, float]:
    """One step's metrics: maxima over its mini-batches where the name says so, means otherwise."""
    names = dict.fromkeys(name for seen in metrics for name in seen)
    values = {name: [seen[name] for seen in metrics if name in seen] for name in names}
    return {name: max(v) if name.endswith("_max") else sum(v) / len(v) for name, v in values.items()}


def _mini_batches(size: int, settings: UpdateSettings, place: Place) -> Iterator[Tensor]:
    if settings.mini_batches == 1:  # order would change nothing but rounding
        yield from [torch.arange(size)] * settings.epochs
        return
    for epoch in range(settings.epochs):
        order = generator(place.seed, Purpose.MINI_BATCHES, place.step, epoch).permutation(size)
        yield from torch.from_numpy(order).tensor_split(settings.mini_batches)


def _accumulate(
    policy: Policy,
    algorithm: Algorithm,
    mini: Batch,
    settings: UpdateSettings,
    processes: Processes,
    place: Place,
    first: Scores | None,
) -> dict[str, float]:
    # Fixed before the first micro-batch, over all processes: neither can change a gradient by its own count.
    total = float(algorithm.weights(mini).sum())
    means: dict[str, float] = {}
    maxima: dict[str, float] = {}
    share = processes.share(len(mini))
    mine = mini.take(torch.tensor(share)) if len(share) else None
    for micro in mine.split(settings.micro_batch_size or len(mine)) if mine is not None and total else ():
        micro = micro.to(policy.device)
        weights = algorithm.weights(micro)
        result = algorithm.loss(policy(micro) if first is None else first, micro)
        loss = weighted_mean(result.loss, weights, total)
        check_finite(place.step, {"the loss": loss.detach(), **_detached(result.means)}, weights)
        loss.backward()
        for name, items in _detached(result.means).items():
            means[name] = means.get(name, 0.0) + float(weighted_mean(items, weights, total))
        for name, items in _detached(result.maxima).items():
            maxima[name] = max(maxima.get(name, 0.0), float((items * weights).max()))
    return {**processes.combine(means, sum), **processes.combine(maxima, max), "optim/weight": total}


def _verdict(seen: dict[str, float], settings: UpdateSettings) -> str:
    if not seen["optim/weight"]:
        return "skip"  # nothing but empty responses: there is no gradient to follow
    if settings.target_policy_kl is not None and seen.get("policy/kl", 0.0) > 1.5 * settings.target_policy_kl:
        return "stop"
    if settings.max_ratio is not None and seen.get("policy/ratio", 1.0) > settings.max_ratio:
        return "skip"
    return "step"


def _detached(items: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in items.items()}
