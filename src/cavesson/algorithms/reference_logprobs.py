"""Log-probabilities of given responses under a frozen reference: computed once before training, and kept on disk."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cavesson.algorithms.micro_batches import micro_batches
from cavesson.algorithms.runs import ExampleRun
from cavesson.data.examples import Examples, LabelledTokens, PairTokens, sequences
from cavesson.data.order import InMemory, Mixed
from cavesson.errors import UserError
from cavesson.models.settings import FrozenSettings
from cavesson.models.sharding import place
from cavesson.models.trained import load_start
from cavesson.models.vocabulary import check_vocabulary
from cavesson.processes import Processes
from cavesson.types import Batch

E = TypeVar("E", bound=PairTokens | LabelledTokens)
View = Callable[[Batch], Batch]
"""What a model scores of a batch in one pass"""
_FILE = "reference.safetensors"


def with_reference(
    examples: Examples[E],
    role: Any,
    processes: Processes,
    folder: Path,
    step: int,
    settings: ExampleRun,
    reference: FrozenSettings,
    views: Sequence[View] = (lambda batch: batch,),
) -> Examples[E]:
    """Add to every example in memory the log-probabilities of its responses under the reference.

    They are kept in the run's folder, for a resumed run. The `role` of the model that is trained is its own reference
    if the settings name no other, but only before the first step. The settings of the run determine the batches, of
    which each process scores its share, one view of them after the other.

    Raises:
        UserError: the reference has a different vocabulary, or its saved log-probabilities are missing or belong to
            different data.
    """
    start = reference.start(settings.model.dtype)
    if start is not None:
        model = load_start(start, mapped=processes.mesh is not None).requires_grad_(False)
        check_vocabulary(model, "reference", start, role.model, settings.model)
        role = settings.role(model)
        place(role, processes)
    train, held_out = examples.train, examples.held_out
    assert isinstance(train, InMemory | Mixed), "a run with a reference refuses streams"
    everything = [*train.items, *held_out]
    path = folder / _FILE
    if path.exists():
        scores = _kept(path, len(everything))
    elif step:
        raise UserError(f"{path} is missing: the reference's log-probabilities cannot be computed after the first step")
    else:
        scores = torch.cat([_score(everything, examples, role, processes, settings, view) for view in views], 1)
        if processes.is_main:
            temporary = path.with_suffix(".tmp")
            save_file({"scores": scores}, temporary)
            temporary.rename(path)
        processes.wait()
    known = [replace(example, reference=tuple(row)) for example, row in zip(everything, scores.tolist(), strict=True)]
    return replace(examples, train=train.with_items(known[: train.size]), held_out=known[train.size :])


def _kept(path: Path, count: int) -> Tensor:
    """Return the log-probabilities `[N, k]` saved by an earlier attempt; raise UserError if they are not of so many
    examples.
    """
    scores = load_file(path)["scores"]
    if len(scores) != count:
        raise UserError(
            f"{path} has {len(scores)} examples and the data has {count}: the data has changed since the run started"
        )
    return scores


@torch.no_grad()
def _score(
    everything: Sequence[E],
    examples: Examples[E],
    model: nn.Module,
    processes: Processes,
    settings: ExampleRun,
    view: View,
) -> Tensor:
    """Return what the model says of every example, `[N, k]`: the summed log-probability of each response.

    Every example is scored in the same micro-batch in which the policy first sees it. Matrix products of other sizes
    round differently, so the policy would otherwise differ from its reference before the first update.
    """
    numbers, scored, seen_of = [], [], [torch.zeros(0, len(sequences(everything[0])))]
    for number, rows in enumerate(_batches(everything, examples, processes, settings)):
        whole, places = view(examples.collate([everything[row] for row in rows or [0]])), range(len(rows))
        split = micro_batches(model, processes, whole, places, settings.update, settings.evaluation_size)
        parts = [[rows[place] for place in part] for part in split]
        batches = [view(examples.collate([everything[row] for row in part or [0]])) for part in parts]
        for part, batch in zip(parts, batches, strict=True):
            processes.beat()
            seen_of.append(torch.stack([*model(batch.to(processes.device))], dim=1).cpu()[: len(part)])
            scored += part
            numbers += [number] * len(part)
    number_of, example, score = map(
        processes.rows, (*torch.tensor([numbers, scored], dtype=torch.long), torch.cat(seen_of))
    )
    # An example that is in several batches gets its scores from the first of them.
    order = number_of.argsort(stable=True)
    first = order[np.unique(example[order].numpy(), return_index=True)[1]]
    scores = torch.zeros(len(everything), score.shape[1])
    scores[example[first]] = score[first]
    return scores


def _batches(
    everything: Sequence[E], examples: Examples[E], processes: Processes, settings: ExampleRun
) -> Iterator[list[int]]:
    """Yield this process's share of every batch, as indices of examples.

    First come the batches of the first pass, as in `ExampleTrainer`, then the examples that are not among them, and
    then the held-out ones.
    """
    train = examples.train
    assert isinstance(train, InMemory | Mixed)
    size = len(train.items)
    learned, missing = train.with_items(range(size)), set(range(size))
    for start in range(0, size, settings.batch_size):
        rows = learned.take(start, max(0, settings.batch_size_at(start, size)))
        order = [rows[row] for row in settings.arranged([everything[row] for row in rows])]
        missing -= set(order)
        yield [order[row] for row in processes.share(len(order))]
    for rest in (sorted(missing), list(range(size, len(everything)))):
        mine = [rest[row] for row in processes.share(len(rest))]
        yield sorted(mine, key=lambda row: everything[row].size)
