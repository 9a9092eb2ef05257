"""The largest batch of a run, determined from its data and settings."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from cavesson.algorithms.runs import ExampleRun, RolloutRun
from cavesson.algorithms.settings import OptimizeSettings
from cavesson.data.examples import AnyTokens, Examples, Tokens, sequences
from cavesson.data.prompts import PromptSet
from cavesson.ops.packing import RowShape, fill, pack, width_of
from cavesson.types import Batch

_MAX_STEPS = 1000
"""A longer run has met its longest batches by then, or nearly."""


class LargestRollouts(NamedTuple):
    """The largest batch of algorithms that sample."""

    sampled: int
    """sequences sampled at the same time"""
    sampled_prompts: int
    """different prompts among them"""
    rows: int
    """sequences scored and learned from at the same time"""
    prompts: int
    """different prompts among these"""
    shared: bool
    """whether a prompt is read once for all its responses"""
    prompt: int
    """tokens of the longest prompt"""
    response: int
    """tokens of the longest response"""
    passes: int
    """micro-batches whose gradients are added up before an optimiser step"""
    single_pass: bool
    """whether scoring is the forward pass of the only update"""
    waiting: bool = False
    """whether other prompts, held-out ones included, wait for the places of those that are sampled"""


class LargestSequences(NamedTuple):
    """The largest batch of algorithms that learn from examples."""

    batch: Batch
    """the micro-batch, as it is learned from"""
    rows: int
    width: int
    """tokens of a row"""
    longest: int
    """tokens of the longest sequence of the run"""
    packed: bool
    """whether a row holds several examples, each with its own positions and attention"""
    learned: int
    """tokens that are learned"""
    passes: int
    """micro-batches whose gradients are added up before an optimiser step"""


def largest_rollouts(settings: RolloutRun, prompts: PromptSet, processes: int = 1) -> LargestRollouts:
    """Return the largest batch of a process: the longest prompt of the run, every response at the length limit.

    A micro-batch whose rows are drawn at random from the step may hold as many different prompts as it has rows; one of
    consecutive rows may begin and end inside the `samples_per_prompt` rows of a prompt.
    """
    update, batch, samples = settings.update, settings.batch_size, settings.samples_per_prompt
    share, mini = math.ceil(batch / processes), learned_rows(settings, processes)
    prompt = _longest_prompt(settings, prompts)
    rows = at_once(update, mini, prompt + settings.longest_episode)
    held_out = math.ceil(len(prompts.held_out.ids) / processes) if prompts.held_out is not None else 0
    sampled = min(settings.sampling.batch_size or share, max(share, held_out))
    in_order = update.mini_batches == 1 and not settings.algorithm.selects
    return LargestRollouts(
        sampled=sampled,
        sampled_prompts=max(_prompts_in(batch, sampled, samples), min(sampled, held_out)),
        rows=rows,
        prompts=_prompts_in(batch, rows, samples) if in_order else min(rows, batch // samples),
        shared=settings.shares_prompts,
        prompt=prompt,
        response=settings.longest_episode,
        passes=math.ceil(mini / rows),
        single_pass=_learns_from_scoring(settings, rows == share),
        waiting=sampled < max(share, held_out),
    )


def at_once(settings: OptimizeSettings, most: int, width: int) -> int:
    """Return the largest number of rows of this width, of so many, that are in memory at the same time."""
    if settings.most_tokens is not None:
        return max(1, min(settings.most_tokens // width, most))
    return min(settings.micro_batch_size or most, most)


def learned_rows(settings: RolloutRun, processes: int = 1) -> int:
    """Return the largest number of rollouts of a process in a mini-batch, which a micro-batch is at most."""
    share = math.ceil(settings.batch_size / processes)
    return math.ceil(settings.most_learned(share) / settings.update.mini_batches)


def _learns_from_scoring(settings: RolloutRun, at_once: bool) -> bool:
    """Return whether a step's single update uses the forward pass that scores the responses, perhaps all at once."""
    return settings.has_single_pass and (at_once or not settings.algorithm.credits_scores)


def _prompts_in(batch: int, rows: int, samples: int) -> int:
    """Return the largest number of prompts in `rows` consecutive responses, if a batch is split into such parts."""
    starts = range(0, batch, rows)
    return max((min(start + rows, batch) - 1) // samples - start // samples + 1 for start in starts)


def scored_rows(settings: RolloutRun, largest: LargestRollouts, processes: int = 1) -> int:
    """Return the number of rollouts that a process scores at the same time, without gradients."""
    # A mini-batch at most, unless a step can sample several batches: the others are scored as whole batches.
    resamples = settings.algorithm.max_batches > 1
    most = settings.batch_size if resamples else math.ceil(settings.batch_size / settings.update.mini_batches)
    most = math.ceil(most / processes)
    return at_once(settings.update, most, largest.prompt + largest.response)


def _longest_prompt(settings: RolloutRun, prompts: PromptSet) -> int:
    steps = min(settings.steps, _MAX_STEPS) * settings.algorithm.max_batches
    used = prompts.order(settings.seed, settings.data.shuffle).take(
        0, steps * settings.batch_size // settings.samples_per_prompt
    )
    return max(len(prompts.ids[index]) for index in set(used))


def largest_sequences(
    settings: ExampleRun, examples: Examples[Any], shape: RowShape, processes: int = 1
) -> LargestSequences:
    """Return the micro-batch of the run, over all processes, with the most tokens, padding included.

    Args:
        settings: the run.
        examples: what it learns from.
        shape: of packed rows.
        processes: number of processes.
    """
    batch, packed = settings.batch_size, shape if settings.update.layout == "packed" else None
    steps = min(settings.steps_over(examples.train.size) or _MAX_STEPS, _MAX_STEPS)
    found = [
        (_sequences(part, packed, len(parts)), part)
        for step in range(steps)
        for parts in _split(settings, examples.train.take(step * batch, batch), processes)
        for part in parts
    ]
    largest, part = max(found, key=lambda one: (one[0].rows * one[0].width, one[0].learned))
    rows, unknown = torch.arange(len(part)), torch.zeros(len(part))
    known = {"row": rows, "step": torch.zeros_like(rows), **dict.fromkeys(settings.added, unknown)}
    longest = max(one.longest for one, _ in found)
    return largest._replace(batch=examples.collate(part).with_columns(**known), longest=longest)


def sequences_of(examples: Iterable[AnyTokens]) -> list[Tokens]:
    """Return the sequences of examples: two per pair, else one."""
    return [part for example in examples for part in sequences(example)]


def _split(settings: ExampleRun, batch: Sequence[Any], processes: int) -> Iterator[list[Sequence[Any]]]:
    """Yield the micro-batches of every process."""
    rows, update = [batch[row] for row in settings.arranged(batch)], settings.update
    size = update.micro_batch_size or math.ceil(settings.batch_size / processes)
    for part in torch.arange(len(rows)).tensor_split(processes):
        mine = [rows[row] for row in part.tolist()]
        if update.most_tokens is None:
            yield [mine[start : start + size] for start in range(0, len(mine), size)]
        else:
            pads = update.layout != "packed"
            lengths = [[len(one.ids) for one in sequences_of([each])] for each in mine]
            parts = [[max(each)] * len(each) for each in lengths] if pads else lengths
            yield [[mine[row] for row in rows] for rows in fill(parts, update.most_tokens, pads)]


def _sequences(examples: Sequence[AnyTokens], packed: RowShape | None, passes: int) -> LargestSequences:
    parts = sequences_of(examples)
    lengths = [len(part.ids) for part in parts]
    rows = [[index] for index in range(len(lengths))] if packed is None else pack(lengths, packed)
    learned = sum(sum(part.learn) for part in parts)
    width, packed_any = width_of(lengths, rows), len(rows) < len(lengths)
    return LargestSequences(Batch({}), len(rows), width, max(lengths), packed_any, learned, passes)
