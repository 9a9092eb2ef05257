"""From credited data to new weights. Only this module normalises losses: by the weight of the whole mini-batch."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cavesson.algorithms.base import Algorithm, Loss
from cavesson.algorithms.micro_batches import micro_batches
from cavesson.algorithms.settings import OptimizeSettings, UpdateSettings
from cavesson.errors import NonFiniteError
from cavesson.ops.masked import weighted_mean
from cavesson.processes import Processes
from cavesson.randomness import Purpose, generator
from cavesson.train.optimizer import Optimizer
from cavesson.types import Batch

Metrics = dict[str, float]
_LOSS = "the loss"


class StepInfo(NamedTuple):
    """The position of an update in the run."""

    seed: int
    step: int
    learning_rate: float


class Chosen(NamedTuple):
    """Which of a step's rollouts to learn from."""

    rows: Tensor
    """`[n]` those of this process, as rows of its part"""
    place: Tensor
    """`[n]` their places among all rollouts to learn from, which are in order of their samples"""
    total: int
    """number of rollouts to learn from, over all processes"""


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
        return self.processes.device


class Gradient:
    """The gradient of a mini-batch, which grows with the loss of every micro-batch of it, and the metrics of the loss.

    All processes make it together, each for its own rows of the mini-batch in its own batch, and compute the losses of
    equally many micro-batches, each of which goes to `Optimizer.backward`. The batch has all columns that the
    algorithm's `weights` and `total` read.
    """

    def __init__(self, learner: Learner, batch: Batch, rows: Sequence[int]) -> None:
        self._learner, self._batch, self._rows = learner, batch, rows
        learner.optimizer.zero_grad()
        # Computed before the first micro-batch, over all processes, so that how rows are split cannot affect the
        # gradient.
        totals = _totals(learner.algorithm, batch, rows)
        self._total, self.weight, responses = learner.processes.sum_tensor(totals).tolist()
        self._sums = _Sums(self.weight, responses)

    def loss(self, rows: Sequence[int], micro: Batch, scores: Any) -> Tensor:
        """Return the loss of a micro-batch with these rows; without any, its only row does not count."""
        weights = self._learner.algorithm.weights(micro) * bool(rows)
        result = self._learner.algorithm.loss(scores, micro)
        loss = weighted_mean(result.loss, weights, self._total)
        self._sums.add(result, weights)
        self._sums.plus(_LOSS, loss)
        return loss

    def losses(self, settings: OptimizeSettings, scores: Any = None) -> Iterator[Tensor]:
        """Yield the loss of each micro-batch after its forward pass, or of the only one, which has these scores."""
        learner = self._learner
        if not self.weight:
            return
        if scores is not None:
            yield self.loss(self._rows, self._batch.part(self._rows).to(learner.device), scores)
            return
        for part in micro_batches(learner.model, learner.processes, self._batch, self._rows, settings):
            micro = self._batch.part(part).to(learner.device)
            yield self.loss(part, micro, learner.model(micro))

    def metrics(self, step: int) -> Metrics:
        """Return the metrics over all processes.

        Raises:
            NonFiniteError: one of them, or the loss, is not finite; in all processes, so that they end alike.
        """
        combine = self._learner.processes.combine
        means = combine({_LOSS: 0.0, **self._sums.means()}, sum)
        check_finite(step, {name: torch.tensor(value, dtype=torch.float64) for name, value in means.items()})
        del means[_LOSS]
        return {**means, **combine(self._sums.maxima(), max), "optim/weight": self.weight}


def update(
    learner: Learner,
    batch: Batch,
    chosen: Chosen,
    settings: UpdateSettings,
    info: StepInfo,
    done: Sequence[Metrics] = (),
    gradient: Gradient | None = None,
    scores: Any = None,
) -> Iterator[Metrics]:
    """Train on one step's credited rollouts, and yield the metrics of every mini-batch; the learner is changed in
    place.

    `done` are the metrics of the mini-batches that were done before the run was interrupted. `gradient` is that of the
    only mini-batch, and `scores` those of the only micro-batch with their graph, if they are known.
    """
    epochs = (mini_batches(chosen, settings, info, epoch) for epoch in range(settings.epochs))
    stopped = bool(done and done[-1]["optim/stopped"])
    for rows in islice(chain.from_iterable(epochs), len(done), None):
        if stopped:
            return
        found = gradient or Gradient(learner, batch, rows)
        for loss in found.losses(settings, scores) if gradient is None else ():
            learner.optimizer.backward(loss)
        seen = optimize(learner, found, settings, info, lambda seen: _verdict(seen, settings))
        stopped = bool(seen["optim/stopped"])
        yield seen


def optimize(
    learner: Learner,
    gradient: Gradient,
    settings: OptimizeSettings,
    info: StepInfo,
    judge: Callable[[Metrics], str] = lambda _: "step",
) -> Metrics:
    """Do one optimiser step with the gradient of a mini-batch, unless `judge` returns "skip" or "stop" for it.

    All processes call this together.
    """
    optimizer, processes = learner.optimizer, learner.processes
    seen = gradient.metrics(info.step)
    # A weight of 0 means that there is nothing to learn, for example if all responses are empty.
    verdict = judge(seen) if gradient.weight else "skip"
    if verdict == "step":
        processes.sum_gradients(learner.model)
        norm = optimizer.grad_norm(settings.max_grad_norm)
        check_finite(info.step, {"the gradient": norm})
        optimizer.step(info.learning_rate)
        seen["optim/grad_norm"] = float(norm)
    optimizer.zero_grad()
    return {**seen, "optim/skipped": float(verdict == "skip"), "optim/stopped": float(verdict == "stop")}


def _totals(algorithm: Algorithm, batch: Batch, rows: Sequence[int]) -> Tensor:
    """Return what losses and metrics are divided by, `[3]` float64, as far as these rows contribute to it."""
    if not rows:
        return torch.zeros(3, dtype=torch.float64)
    mini = batch.part(rows)
    weights = algorithm.weights(mini)
    return torch.stack([algorithm.total(mini).double(), weights.sum().double(), _counting(weights).sum().double()])


def _counting(weights: Tensor) -> Tensor:
    """Return which rows have an item that counts, `[B]` bool, given weights `[B]` or `[B, T]`."""
    return (weights[:, None].flatten(1) > 0).any(1)


class _Sums:
    """The metrics of a mini-batch, summed up over its micro-batches in this process.

    They stay on the device until they are read: it would have to be waited for after every micro-batch. Weighted sums
    are divided by `weight`, and sums over responses by `responses`.
    """

    def __init__(self, weight: float, responses: float) -> None:
        self.weight, self.responses = weight, responses
        self._means: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, result: Loss, weights: Tensor) -> None:
        counts, counting = weights > 0, _counting(weights)
        for name, items in _detached(result.means).items():
            self.plus(name, weighted_mean(items, weights, self.weight))
        for name, items in _detached(result.response_means).items():
            self.plus(name, torch.where(counting, items, 0.0).double().sum() / self.responses)
        for name, items in _detached(result.maxima).items():
            largest = torch.where(counts, items, -math.inf).max()
            self._maxima[name] = largest.maximum(self._maxima.get(name, largest))

    def plus(self, name: str, value: Tensor) -> None:
        """Add a number to one of the means."""
        value = value.detach().double()
        self._means[name] = self._means[name] + value if name in self._means else value

    def means(self) -> Metrics:
        return _read(self._means)

    def maxima(self) -> Metrics:
        """Return the maxima of the items that count, if there are any."""
        return {name: value for name, value in _read(self._maxima).items() if value > -math.inf}


def _read(values: Mapping[str, Tensor]) -> Metrics:
    """Return numbers of a device, for which this waits once."""
    return dict(zip(values, torch.stack([*values.values()]).tolist(), strict=True)) if values else {}


@torch.no_grad()
def measure(learner: Learner, batch: Batch, parts: Sequence[Sequence[int]]) -> tuple[Metrics, float]:
    """Return the weighted sums of an algorithm's metrics over data that is not learned from, and the total weight.

    Both cover only this process, whose micro-batches of `batch` are `parts`.
    """
    sums, weight = _Sums(1.0, 1.0), torch.zeros((), dtype=torch.float64, device=learner.device)
    for rows in parts:
        learner.processes.beat()
        micro = batch.part(rows).to(learner.device)
        weights = learner.algorithm.weights(micro) * bool(rows)
        sums.add(learner.algorithm.loss(learner.model(micro), micro), weights)
        weight += weights.sum()
    return sums.means(), float(weight)


def averaged(metrics: list[Metrics]) -> Metrics:
    """Return one step's metrics: maxima over its mini-batches for names that end in "_max", else means."""
    names = dict.fromkeys(name for seen in metrics for name in seen)
    values = {name: [seen[name] for seen in metrics if name in seen] for name in names}
    return {name: max(v) if name.endswith("_max") else sum(v) / len(v) for name, v in values.items()}


def mini_batches(chosen: Chosen, settings: UpdateSettings, info: StepInfo, epoch: int) -> list[list[int]]:
    """Return this process's rows in each optimiser step of one pass over a step's rollouts.

    Of k mini-batches, each block of k consecutive rollouts puts one into each, at random. So every process has about as
    many rows in each as the others, without exchanging any.
    """
    count = settings.mini_batches
    order = generator(info.seed, Purpose.MINI_BATCHES, info.step, epoch)
    blocks = np.tile(np.arange(count), (-(-chosen.total // count), 1))
    numbers = order.permuted(blocks, axis=1).ravel()[: chosen.total]
    mine = numbers[chosen.place.numpy()]
    # An algorithm may learn from fewer rows than there are mini-batches.
    return [chosen.rows[torch.from_numpy(mine == number)].tolist() for number in np.unique(numbers)]


def _verdict(seen: Metrics, settings: UpdateSettings) -> str:
    if settings.target_policy_kl is not None and seen.get("policy/kl", 0.0) > 1.5 * settings.target_policy_kl:
        return "stop"
    if settings.max_ratio is not None and seen.get("policy/ratio", 1.0) > settings.max_ratio:
        return "skip"
    return "step"


def _detached(items: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in items.items()}


def check_finite(step: int, tensors: Mapping[str, Tensor], mask: Tensor | None = None) -> None:
    """Raise an error if a tensor has a NaN or infinite value where `mask` is set.

    Without a mask, or if a tensor has a different shape, all its values are checked.

    Raises:
        NonFiniteError: there is such a value; the message names the first tensor with one.
    """
    padding = None if mask is None else mask == 0
    for name, tensor in tensors.items():
        unused = padding if padding is not None and tensor.shape == padding.shape else torch.tensor(False)
        if not bool((tensor.isfinite() | unused).all()):
            kind = "NaN" if bool((tensor.isnan() & ~unused).any()) else "infinite"
            raise NonFiniteError(
                f"step {step}: {name} is {kind}; the run stopped before using it, and the record up to here is complete"
            )
