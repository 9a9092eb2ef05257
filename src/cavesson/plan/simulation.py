"""Steps of a run on fake tensors: its own models, losses and optimiser, and its largest batch."""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import pad
from transformers import DynamicCache

from cavesson.algorithms.base import Algorithm
from cavesson.models.parts import UNSUPPORTED, causal
from cavesson.models.policy import Policy
from cavesson.models.sharding import gathered, shard
from cavesson.ops.chunks import visiting
from cavesson.ops.masked import weighted_mean
from cavesson.plan.operations import Operations, Work
from cavesson.plan.tracker import parts, tracker_of
from cavesson.rollout.engines.decoder import Decoder, can_replace, new_cache
from cavesson.rollout.engines.distribution import draw, sampling_logprobs
from cavesson.rollout.engines.memory_check import replaced_together, spare_columns
from cavesson.rollout.engines.settings import SamplingSettings
from cavesson.train.optimizer import Optimizer
from cavesson.types import Batch


@dataclass
class Simulation:
    """A role on fake tensors, with its optimiser; every stage adds to what is known of memory and work.

    Attributes:
        role: the model that learns, sharded if there is a mesh.
        optimizer: its optimiser.
        algorithm: gives the loss.
        processes: number of processes, this one included.
        peaks: the parts of the memory at the peak of every stage, by stage.
        work: the operations of every stage, when it was done last.
    """

    role: Any
    optimizer: Optimizer
    algorithm: Algorithm
    processes: int
    peaks: dict[str, dict[str, int]] = field(default_factory=dict)
    work: dict[str, Work] = field(default_factory=dict)

    def stage(self, name: str, do: Callable[[], None]) -> None:
        """Do a stage of a step, and note its memory and its operations."""
        operations = Operations(self.processes)
        with operations, self._tracker, visiting(operations.alike):
            do()
        self._tracker.reset_mod_stats()
        self.work[name] = operations.seen or self.work[name]
        seen = parts(self._tracker)
        if sum(seen.values()) >= sum(self.peaks.get(name, {}).values()):
            self.peaks[name] = seen

    @contextmanager
    def begun(self, vocabulary: int, others: list[nn.Module]) -> Iterator[None]:
        """Track memory inside this block, in which stages are done; `others` are models besides the role."""
        gc.collect()  # what an earlier simulation has left would be in the way
        _begin_optimizer(self.optimizer)
        self._tracker = tracker_of(self.role, self.optimizer, vocabulary)
        frozen = [p for other in others for p in other.parameters()]
        masters = [m for n, m in self.optimizer.masters.items() if m is not self.optimizer.parameters[n]]
        track: Any = getattr(self._tracker, "track_inputs", lambda tensors: self._tracker.track_external(*tensors))
        track((*frozen, *masters))
        yield

    def learn(self, batch: Batch, passes: int, also: Callable[[], None] | None = None) -> None:
        """Do the forward and the backward pass of a micro-batch; `also` happens between the two.

        If there are several passes, the gradients of earlier ones are in memory.
        """

        def learning() -> None:
            weights = self.algorithm.weights(batch)
            result = self.algorithm.loss(self.role(batch), batch)  # with its metrics, until the pass is over
            if also is not None:
                also()
            self.optimizer.backward(weighted_mean(result.loss, weights, 1.0))

        if passes > 1 and isinstance(self.role, FSDPModule):
            self.stage("learning", learning)  # leaves what FSDP has gathered, besides gradients
        elif passes > 1:
            with visiting(Operations(1).alike):
                _add_zeros(learned_from(self.algorithm.loss(self.role(batch), batch).loss))
            self._tracker.track_external(self.role)
        self.stage("learning", learning)

    def optimise(self) -> None:
        """Do an optimiser step."""
        self.optimizer.grad_norm(1.0)
        self.optimizer.step(0.0)
        self.optimizer.zero_grad()


def _begin_optimizer(optimizer: Optimizer) -> None:
    """Do an optimiser step with gradients of zero, after which the optimiser has its state."""
    _add_zeros(optimizer.parameters.values())
    Optimizer.grad_norm(optimizer, 1.0)
    Optimizer.step(optimizer, 0.0)  # this one, whatever the kind: there was no backward pass
    optimizer.zero_grad()


def _add_zeros(parameters: Iterable[Tensor]) -> None:
    """Give parameters a gradient of zeros."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)


def learned_from(loss: Tensor) -> list[Tensor]:
    """Return the parameters to which the backward pass of a loss would add gradients, without doing it."""
    nodes: list[Any] = [loss.grad_fn]
    seen = set(nodes)
    for node in nodes:  # grows
        new = {following for following, _ in node.next_functions} - seen - {None}
        seen |= new
        nodes += new
    leaves = [node.variable for node in nodes if hasattr(node, "variable")]
    return [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]  # compiled layers have inputs that are leaves


def sharded(role: nn.Module, mesh: DeviceMesh | None, dtype: torch.dtype) -> None:
    """Shard a role, as a run does, if there is a mesh."""
    if mesh is not None:
        shard(role, mesh, dtype, getattr(role, "passes", ()))


@torch.no_grad()
def sample(
    run: Simulation, policy: Policy, settings: SamplingSettings, prompts: Tensor, waiting: bool, earlier: int = 0
) -> int:
    """Read prompts `[B, S]`, decode one token and, if others wait, read some of those; return the bytes of caches.

    In an episode of several turns, up to `earlier` tokens are between the prompt and the last turn.
    """
    size = prompts.shape[1] + earlier + settings.longest
    try:
        cache = new_cache(policy.model, "static", size)
        moves = can_replace(policy.model, cache)
        if waiting and moves:
            cache = new_cache(policy.model, "static", size + spare_columns(size))
            return _decode(run, policy, settings, prompts, cache, replaced_together(len(prompts)))
        read = _decode(run, policy, settings, prompts, cache)
        if not (earlier and moves):
            return read
        # What rows have read is kept until their next turn has been loaded with it.
        return read + _decode(run, policy, settings, prompts, new_cache(policy.model, "static", size))
    except UNSUPPORTED:
        # A growing cache is as long as the tokens read, so longer prompts stand in for responses.
        growing = DynamicCache(config=causal(policy.model).config)
        with unset_fake_temporarily():
            longer = pad(prompts, (earlier + settings.longest - 1, 0), value=1)
        return _decode(run, policy, settings, longer, growing)


def _decode(
    run: Simulation, policy: Policy, settings: SamplingSettings, ids: Tensor, cache: Any, replaced: int = 0
) -> int:
    last: list[Tensor] = []

    def token(logits: Tensor) -> None:
        distribution = sampling_logprobs(logits, settings)
        last[:] = [draw(distribution, torch.zeros(len(logits)))]

    with ExitStack() as stack:
        if isinstance(policy, FSDPModule):
            run.stage("gathering weights", lambda: stack.enter_context(gathered(policy)))
        with unset_fake_temporarily():
            mask, rows = torch.ones_like(ids), torch.arange(replaced)
        decoder = Decoder(policy.model, ids, mask, cache)
        run.stage("reading prompts", lambda: token(decoder.read()))
        run.stage("decoding", lambda: token(decoder.append(last[0])))
        if replaced:
            run.stage("reading waiting prompts", lambda: token(decoder.replace(rows, ids[rows], mask[rows])))
        if isinstance(policy, FSDPModule):
            run.stage("gathering weights", stack.close)
    kept = [x for layer in cache.layers for x in (layer.keys, layer.values) if isinstance(x, Tensor)]
    return sum(x.numel() * x.element_size() for x in kept)
