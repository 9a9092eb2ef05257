"""The memory of a run, and the work of its stages, predicted from its settings, its data and its model's config.

A step of the run is simulated with fake tensors on its largest batch, and PyTorch's memory trackers count what is
alive: nothing is estimated or fitted, whatever the architecture.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from cavesson.algorithms.runs import ExampleRun, RolloutRun, RunSettings
from cavesson.models.parts import causal
from cavesson.models.policy import Policy
from cavesson.models.settings import ModelSettings
from cavesson.ops.gpu import pretended_gpu
from cavesson.plan.fakes import Answers, fake_processes
from cavesson.plan.largest import LargestRollouts, LargestSequences, scored_rows
from cavesson.plan.prediction import Memory, Place, of_all_layers
from cavesson.plan.roles import as_on_gpu, fake_policy, prompts_of, rollouts_of, sequence_role
from cavesson.plan.simulation import Simulation, sample, sharded
from cavesson.plan.skeleton import bytes_of, loading_bytes, weight_bytes
from cavesson.rollout.engines.merged import fits, merged_bytes
from cavesson.rollout.engines.settings import MergesAdapters
from cavesson.train.in_backward import optimizer_of
from cavesson.types import Batch

_SAMPLING = {"reading prompts", "decoding", "reading waiting prompts"}
_MERGED = "merged adapters"


def rollout_memory(
    settings: RolloutRun, largest: LargestRollouts, tokenizer: PreTrainedTokenizerBase, rewards: int, place: Place
) -> Memory:
    """Predict the memory of a run that learns from its own responses.

    Args:
        settings: settings of the run.
        largest: the largest batch of a process.
        tokenizer: tokenizer of the model.
        rewards: size of the reward models in bytes.
        place: where the run trains.
    """
    learned, scored = (
        rollouts_of(settings, largest, n) for n in (largest.rows, scored_rows(settings, largest, place.processes))
    )
    prompts = prompts_of(largest.sampled, largest.sampled_prompts, largest.prompt)

    def simulated(layers: int | None) -> Memory:
        with _fake_place(settings, place) as mesh:
            policy = fake_policy(settings, tokenizer, layers)
            ways = as_on_gpu(policy, settings.model) if mesh is None else []
            weights = weight_bytes(policy.model, settings.model)
            for role in (policy, *policy.frozen.values()):
                sharded(role, mesh, causal(role.model).dtype)
            run = Simulation(policy, optimizer_of(policy, settings), settings.algorithm, place.processes)
            with run.begun(_vocabulary(policy), [*policy.frozen.values()]):
                cache = 0
                if settings.sampling.declared.local:  # servers have their weights and their cache elsewhere
                    earlier = settings.longest_episode if settings.environment.is_named else 0
                    cache = sample(run, policy, settings.sampling, prompts, largest.waiting, earlier)
                _score_and_learn(run, policy, settings, largest, learned, scored)
            found = _memory(run, settings.model, weights, rewards, cache, mesh is not None)
            found = replace(found, ways=tuple(ways))
            return _with_merged(found, policy, settings, mesh is not None)

    return _as_merged(of_all_layers(simulated, settings.model), settings.sampling.merge_adapters, place)


def _with_merged(memory: Memory, policy: Policy, settings: RolloutRun, is_sharded: bool) -> Memory:
    """Return the memory of a run with a copy of the weights that adapters are merged into, if they can be."""
    size = merged_bytes(policy.model)
    if size and settings.sampling.declared.local and settings.model.quantization is None and not is_sharded:
        for name in memory.phases.keys() & _SAMPLING:
            memory.phases[name][_MERGED] = size
    return memory


def _as_merged(memory: Memory, when: MergesAdapters, place: Place) -> Memory:
    """Return the memory of a run that can merge adapters, without the copy if it does not."""
    decoding = memory.phases.get("decoding", {})
    loaded = sum(size for name, size in memory.stays.items() if name != "optimiser")  # it begins after the choice
    free = place.memory - loaded - decoding.get("decoding cache", 0)
    if when == "always" or (when == "auto" and fits(decoding.get(_MERGED, 0), free)):
        return memory
    without = {name: {part: n for part, n in phase.items() if part != _MERGED} for name, phase in memory.phases.items()}
    return replace(memory, phases=without)


def example_memory(
    settings: ExampleRun, largest: LargestSequences, tokenizer: PreTrainedTokenizerBase, classifier: bool, place: Place
) -> Memory:
    """Predict the memory of a run that learns from examples; `classifier` means that it trains a reward model."""

    def simulated(layers: int | None) -> Memory:
        with _fake_place(settings, place) as mesh:
            role = sequence_role(settings, tokenizer, classifier, layers)
            ways = as_on_gpu(role, settings.model) if mesh is None else []
            weights = weight_bytes(role.model, settings.model)
            sharded(role, mesh, causal(role.model).dtype)
            run = Simulation(role, optimizer_of(role, settings), settings.algorithm, place.processes)
            with run.begun(_vocabulary(role), []):
                run.learn(largest.batch, largest.passes)
                run.stage("optimiser step", run.optimise)
            found = _memory(run, settings.model, weights, 0, 0, mesh is not None)
            return replace(found, ways=tuple(ways))

    return of_all_layers(simulated, settings.model)


@contextmanager
def _fake_place(settings: RunSettings, place: Place) -> Iterator[DeviceMesh | None]:
    """Compute with fake tensors inside this block, as one of the processes."""
    processes = fake_processes(place.processes, settings.parallel.shard, place.per_host)
    with processes as mesh, FakeTensorMode(allow_non_fake_inputs=True), Answers(), pretended_gpu():
        yield mesh


def _score_and_learn(
    run: Simulation, policy: Policy, settings: RolloutRun, largest: LargestRollouts, learned: Batch, scored: Batch
) -> None:
    """Simulate a step from its responses on."""

    def score_others() -> None:
        if policy.teacher is not None and policy.divergence is None:
            policy.teacher_logprob(scored)
        if policy.has_reference:
            policy.reference_logprob(scored)
            if settings.kl_estimator == "full":
                policy.reference_kl(scored)

    @torch.no_grad()
    def score() -> None:
        policy(scored)
        score_others()

    if not largest.single_pass:
        run.stage("scoring", score)
    # If scoring is the forward pass of the only update, the others score while its graph is in memory.
    run.learn(learned, largest.passes, score_others if largest.single_pass else None)
    run.stage("optimiser step", run.optimise)


def _memory(
    run: Simulation, settings: ModelSettings, weights: int, rewards: int, cache: int, is_sharded: bool
) -> Memory:
    """Return the memory of a simulation; `weights` is the size of the trained model before it is sharded."""
    role, optimizer = run.role, run.optimizer
    frozen = role.frozen if isinstance(role, Policy) else {}
    inside, all_of_role = set(role.model.parameters()), list(role.parameters())
    stays = {
        "weights": _local(inside) if is_sharded else weights,
        "critic": _local(p for p in all_of_role if p not in inside),
        "reference": 0,
        **{name: _local(one.parameters()) for name, one in frozen.items()},
        "optimiser": _local(optimizer.state().values())
        + _local(m for name, m in optimizer.masters.items() if m is not optimizer.parameters[name]),
        "reward models": rewards,
    }
    phases = {name: {part: size for part, size in seen.items() if part != "kept"} for name, seen in run.peaks.items()}
    whole = sum(p.numel() * causal(role.model).dtype.itemsize for p in inside) if is_sharded else 0
    for name in _SAMPLING:
        _rename(phases.get(name, {}), "decoding cache", cache)
        # FSDP's tracker takes what is gathered outside of its own passes for activations.
        _rename(phases.get(name, {}), "gathered weights", whole)
    loading = (stays["weights"] if is_sharded else weights) + rewards + loading_bytes(settings)
    numbers, trained = sum(p.numel() for p in inside), sum(p.numel() for p in all_of_role if p.requires_grad)
    return Memory(stays, phases, loading, numbers, trained, run.work)


def _rename(phase: dict[str, int], name: str, size: int) -> None:
    """Let a phase have so many bytes under this name, taken from its activations as far as there are so many."""
    moved = min(size - phase.get(name, 0), phase.get("activations", 0))
    if moved > 0:
        phase["activations"] -= moved
        phase[name] = phase.get(name, 0) + moved


def _local(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of distinct tensors in this process."""
    return bytes_of(t.to_local() if isinstance(t, DTensor) else t for t in tensors)


def _vocabulary(role: Any) -> int:
    embeddings: Any = causal(role.model).get_input_embeddings()
    return int(embeddings.weight.shape[0])
