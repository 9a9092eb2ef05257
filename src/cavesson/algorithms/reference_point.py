"""KTO's reference point: an estimate of KL(π ‖ π_ref) from prompts with responses to other prompts (arXiv:2402.01306).

The policy and the reference score these mismatched responses beside the labelled ones. Which response stands in for
which is decided once, before the reference scores them: it depends on the order of the first pass alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from cavesson.algorithms.micro_batches import micro_batches
from cavesson.algorithms.runs import ExampleRun
from cavesson.data.examples import Examples, LabelledTokens, Tokens, mismatched
from cavesson.data.order import InMemory, Mixed
from cavesson.errors import UserError
from cavesson.processes import Processes
from cavesson.types import Batch


def with_mismatched(examples: Examples[LabelledTokens], batch_size: int, max_length: int) -> Examples[LabelledTokens]:
    """Add to every example its prompt with a response to another prompt, cut to `max_length` tokens.

    It is the response of the example before it in its batch of the first pass; the first of a batch gets that of the
    last. Examples with the same prompt are skipped. Held-out examples are a batch.

    Raises:
        UserError: all examples have the same prompt.
    """
    train = examples.train
    assert isinstance(train, InMemory | Mixed), "a run with a reference refuses streams"
    size, everything = len(train.items), [*train.items, *examples.held_out]
    # A mix may repeat some examples in its first pass, and leave out others.
    order = [*dict.fromkeys([*train.with_items(range(size)).take(0, size), *range(size)])]
    batches = [order[start : start + batch_size] for start in range(0, size, batch_size)]
    others = _others([_prompt(one.tokens) for one in everything], [*batches, [*range(size, len(everything))]])
    found = [
        replace(one, mismatched=_joined(one.tokens, everything[other].tokens, max_length))
        for one, other in zip(everything, others, strict=True)
    ]
    return replace(examples, train=train.with_items(found[:size]), held_out=found[size:])


def _others(prompts: Sequence[tuple[int, ...]], batches: Sequence[Sequence[int]]) -> list[int]:
    """Return for every example another one with a different prompt: of its batch, or if there is none, of any."""
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    if len(numbers) == 1:
        raise UserError(
            f"all {len(prompts)} responses answer the same prompt, and KTO compares them with responses to other "
            'prompts; set kto.loss_type = "apo_zero_unpaired"'
        )
    of = [numbers[prompt] for prompt in prompts]
    order, others, start = [*chain(*batches)], [0] * len(prompts), 0
    for batch in batches:
        for place, row in enumerate(batch):
            before = chain(reversed(batch[:place]), reversed(batch[place:]), reversed(order[:start]), reversed(order))
            others[row] = next(other for other in before if of[other] != of[row])
        start += len(batch)
    return others


def _prompt(tokens: Tokens) -> tuple[int, ...]:
    return tokens.ids[: tokens.learn.index(True)]


def _joined(asked: Tokens, said: Tokens, max_length: int) -> Tokens:
    """Return the prompt of one example with the response of another."""
    end, start = asked.learn.index(True), said.learn.index(True)
    ids, learn = asked.ids[:end] + said.ids[start:], asked.learn[:end] + said.learn[start:]
    return Tokens(ids[:max_length], learn[:max_length])


@torch.no_grad()
def log_ratios(batch: Batch, rows: Sequence[int], role: Any, processes: Processes, settings: ExampleRun) -> Tensor:
    """Return the sum of log π − log π_ref of the mismatched responses in these rows of a batch, a number in float64.

    All processes call this together, each with its rows.
    """
    batch = mismatched(batch)
    total = torch.zeros((), dtype=torch.float64, device=processes.device)
    for part in micro_batches(role, processes, batch, rows, settings.update, settings.evaluation_size):
        processes.beat()
        micro = batch.part(part).to(processes.device)
        total += (role(micro).logprob - micro["reference"]).double().sum() * bool(part)
    return total
