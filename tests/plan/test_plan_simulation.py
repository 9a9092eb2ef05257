"""What a simulation leaves out changes nothing: the same predictions from all chunks, passes and PyTorch's tracker."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from check_helpers import run_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedTokenizerBase

from cavesson.data.prompts import load_prompts
from cavesson.models.parts import row_shape
from cavesson.models.tiny import tiny_model
from cavesson.ops import chunks
from cavesson.ops.chunks import CHUNK, visiting
from cavesson.ops.head import Head
from cavesson.ops.logprobs import token_logprobs
from cavesson.ops.masked import weighted_mean
from cavesson.plan import tracker
from cavesson.plan.largest import largest_rollouts, largest_sequences
from cavesson.plan.memory import example_memory, rollout_memory
from cavesson.plan.operations import Operations
from cavesson.plan.prediction import Memory, Place
from cavesson.plan.simulation import Simulation, learned_from
from cavesson.types import Batch

SHAPE = row_shape(tiny_model().config)


def predicted(command: str, folder: Path, tokenizer: PreTrainedTokenizerBase, processes: int, changes: Any) -> Memory:
    run, place = run_of(command, folder, **changes), Place(processes)
    if command == "sft":
        return example_memory(
            run, largest_sequences(run, run.examples(tokenizer), SHAPE, processes), tokenizer, False, place
        )
    return rollout_memory(run, largest_rollouts(run, load_prompts(run.data, tokenizer), processes), tokenizer, 0, place)


class PyTorchTracker(tracker._Tracker):
    """PyTorch's own tracker, without its statistics by module."""

    def _ignore(self, *_: Any) -> None:
        pass

    _pre_fw_hook: Any = _ignore
    _post_fw_hook: Any = _ignore
    _pre_bw_hook: Any = _ignore
    _post_bw_hook: Any = _ignore


def learn_twice(run: Simulation, batch: Batch, passes: int, also: Callable[[], None] | None = None) -> None:
    """`Simulation.learn`, with a stage for a first pass that leaves its gradients."""

    def learning() -> None:
        weights = run.algorithm.weights(batch)
        result = run.algorithm.loss(run.role(batch), batch)
        if also is not None:
            also()
        run.optimizer.backward(weighted_mean(result.loss, weights, 1.0))

    for _ in range(min(2, passes)):
        run.stage("learning", learning)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "processes", "changes"),
    [
        ("sft", 1, {"update__micro_batch_size": 2, "update__layout": "padded"}),
        ("sft", 2, {"update__micro_batch_size": 2, "parallel__shard": "full"}),
        ("sft", 1, {"update__in_backward": True}),
        ("ppo", 1, {"update__micro_batch_size": 3, "model__gradient_checkpointing": True}),
        ("ppo", 1, {"update__micro_batch_size": 2, "value__kind": "separate", "model__dtype": "bfloat16"}),
        # Not compiled: with adapters, PyTorch's tracker counts two inputs of a compiled layer more in a second pass.
        (
            "grpo",
            1,
            {
                "samples_per_prompt": 4,
                "update__micro_batch_size": 4,
                "model__lora": {"rank": 2},
                "model__compile": "none",
            },
        ),
        ("ppo", 1, {"kl__estimator": "full", "update__mini_batches": 2}),
    ],
)
def test_a_simulation_predicts_what_a_complete_one_does(
    command: str,
    processes: int,
    changes: Any,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 7)  # so that there are several, and the last one is smaller
    short = predicted(command, tmp_path, tokenizer, processes, changes)
    monkeypatch.setattr(Operations, "alike", lambda _, slices: iter(slices))
    monkeypatch.setattr(Simulation, "learn", learn_twice)
    monkeypatch.setattr(tracker, "_WholeTracker", PyTorchTracker)
    complete = predicted(command, tmp_path, tokenizer, processes, changes)
    assert replace(complete, phases={}) == replace(short, phases={})
    assert complete.phases.keys() == short.phases.keys()
    for name, phase in complete.phases.items():  # a first pass may leave a few numbers besides its gradients
        assert short.phases[name] == pytest.approx(phase, abs=32)


@pytest.mark.parametrize("rows", [CHUNK - 1, CHUNK, CHUNK + 3, 2 * CHUNK, 6 * CHUNK, 6 * CHUNK + 3])
def test_a_chunk_counts_for_those_like_it(rows: int) -> None:
    def work(recorder: Operations) -> None:
        hidden, weight = (torch.empty(size, 5, requires_grad=True) for size in (rows, 11))
        logprob, entropy = token_logprobs(hidden, Head(weight), torch.zeros(rows, dtype=torch.long), 0.7)
        (logprob.sum() + entropy.sum()).backward()

    every, some = Operations(1), Operations(1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with every:
            work(every)
        with some, visiting(some.alike):
            work(some)
    assert some.seen == every.seen


def test_what_learns_from_a_loss() -> None:
    used, unused = nn.Linear(3, 3), nn.Linear(3, 3)
    used.bias.requires_grad_(False)
    shared = nn.Parameter(torch.ones(3))
    loss: Tensor = used(shared * torch.ones(2, 3)).sum() * shared.sum() + unused(torch.ones(3)).sum().detach()
    found = learned_from(loss)
    loss.backward()  # type: ignore[no-untyped-call]
    with_gradient = [p for p in (*used.parameters(), *unused.parameters(), shared) if p.grad is not None]
    assert len(found) == len(with_gradient) == 2
    assert {id(p) for p in found} == {id(p) for p in with_gradient}
