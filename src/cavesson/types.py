"""The batches passed between the stages of a training step, and the scores that models give them.

Legend for all shapes: P prompts, G samples per prompt, B sequences (P × G), S prompt tokens, T response tokens,
V vocabulary size, H hidden size, N flattened tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Named tensors that share their first axis: one row per sequence.

    Rollouts: prompts are padded on the left, `[B, S]`; everything about responses is padded on the right, `[B, T]`, and
    position t of every `[B, T]` column refers to token t after the prompt. `attended` is 1 on all tokens that exist;
    `learned` is 1 on those of them that the policy sampled or the data give, which every loss counts.

    Examples: `ids` and `learned`, `[B, L]`, are padded on the right, and `length` `[B]` counts the tokens. Pairs have
    two of each, `chosen_…` and `rejected_…`; a labelled response may have another one to its prompt, `mismatched_…`.
    """

    columns: Mapping[str, Tensor]
    host: "Batch | None" = None
    """the rows as they were before they were moved to a device"""

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self.columns[name]
        except KeyError:
            raise KeyError(f"no column {name!r}; there are {sorted(self.columns)}") from None

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def with_columns(self, **new: Tensor) -> "Batch":
        return Batch({**self.columns, **new}, self.host)

    def take(self, rows: Tensor) -> "Batch":
        """Return the rows at these indices, in this order, with the padding trimmed to the longest of them."""
        return Batch({name: column[rows] for name, column in self.columns.items()})._trimmed()

    def part(self, rows: Sequence[int]) -> "Batch":
        """Return a micro-batch: these rows, or without any, one row whose results must not count."""
        return self.take(torch.tensor(list(rows) or [0])) if len(self) else self._blank()

    def _blank(self) -> "Batch":
        """Return one row of a batch without rows: token 0 as its prompt, and an empty response."""
        rows = {name: column.new_zeros((1, *column.shape[1:])) for name, column in self.columns.items()}
        if "prompt_mask" in rows:
            rows["prompt_mask"][:, -1] = 1
        return Batch(rows)._trimmed()

    def to(self, device: torch.device) -> "Batch":
        return Batch({name: moved(column, device) for name, column in self.columns.items()}, self.on_host)

    @property
    def on_host(self) -> "Batch":
        """The rows where their lengths can be read without waiting for a device to finish what it computes."""
        return self if self.host is None else self.host

    def _trimmed(self) -> "Batch":
        if not any(name == "attended" or name.endswith("length") for name in self.columns):
            return self
        return Batch({name: self._cut(name, column) for name, column in self.columns.items()})

    def _cut(self, name: str, column: Tensor) -> Tensor:
        if column.ndim == 1 or not len(column):
            return column
        # At least one column is kept even if all sequences are empty, so that no tensor has an axis of size zero.
        if name.startswith("prompt_"):
            return column[:, column.shape[1] - max(1, int(self["prompt_mask"].sum(1).max())) :]
        side = next((side for side in ("chosen_", "rejected_", "mismatched_") if name.startswith(side)), "")
        lengths = self[f"{side}length"] if f"{side}length" in self else self["attended"].sum(1)
        # Two columns of a response: with one, a policy that shares prompts makes one pass instead of two, and processes
        # between which weights are sharded must make the same passes.
        return column[:, : max(2, int(lengths.max()))]


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device. A GPU copies it when it gets there, and nobody waits for that."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def places_of(mask: Tensor, device: torch.device) -> Tensor:
    """Return the flat indices `[N]`, on a device, at which a mask on the host is set."""
    return moved(mask.flatten().nonzero().squeeze(1), device)


class Turn(NamedTuple):
    """One turn of an episode, or one call or result in it, as the record keeps it."""

    role: str
    """assistant, tool or user"""
    text: str
    first_token: int
    """place of its first token after the first prompt of the episode"""
    tokens: int
    name: str | None = None
    """of the tool"""
    arguments: str | None = None
    """of the call, as JSON"""
    seconds: float | None = None
    """that the call took"""
    error: str | None = None
    reward: float | None = None
    """that the environment gave for the turn"""


@dataclass(frozen=True)
class Rollouts:
    """Responses to prompts, one row each: texts and names in lists, numbers in `batch`.

    Generation makes the first fields and columns; every later stage of a training step adds its own.
    """

    prompt: list[str]
    prompt_index: list[int]
    """index of the prompt among those kept of the data set"""
    sample: list[int]
    """index in the step's global batch"""
    response: list[str]
    finish_reason: list[str]
    """eos, stop or length"""
    batch: Batch
    """token ids, masks, rewards, log-probabilities, advantages"""
    ground_truth: list[str | None] = field(default_factory=list)
    """the answers of the data set; empty if it has none"""
    reward_parts: list[dict[str, float]] = field(default_factory=list)
    """score of each part of the reward that judges the response, by its name; empty until they are rewarded"""
    reward_weights: list[dict[str, float]] = field(default_factory=list)
    """weight of each of these parts in the reward"""
    reward_reasons: list[dict[str, str]] = field(default_factory=list)
    """reasons that the parts gave"""
    turns: list[list[Turn]] = field(default_factory=list)
    """turns of each episode; empty if nothing answers the policy"""
    messages: list[list[dict[str, Any]]] = field(default_factory=list)
    """conversations of the episodes, if something answers the policy"""
    worlds: list[Any] = field(default_factory=list)
    """their environments, until they are rewarded"""

    def __getitem__(self, name: str) -> Tensor:
        return self.batch[name]

    def __len__(self) -> int:
        return len(self.batch)

    def with_columns(self, **new: Tensor) -> "Rollouts":
        return replace(self, batch=self.batch.with_columns(**new))

    def take(self, rows: Sequence[int]) -> "Rollouts":
        """Return the rows at these indices, in this order."""
        lists = {name: [values[row] for row in rows] if values else [] for name, values in self.lists.items()}
        return Rollouts(batch=self.batch.take(torch.tensor(list(rows), dtype=torch.long)), **lists)

    @property
    def is_scored(self) -> Tensor:
        """Whether a response may be learned from, `[B]` bool: some part of the reward judges it, or nothing rewards.

        The reward of all others is NaN.
        """
        return ~self["reward"].isnan() if self.has_rewards else torch.ones(len(self), dtype=torch.bool)

    @property
    def has_rewards(self) -> bool:
        """Whether anything rewards responses."""
        return "reward" in self.batch

    def scored(self) -> "Rollouts":
        """Return the rollouts that a reward judges."""
        return self if bool(self.is_scored.all()) else self.take(self.is_scored.nonzero().flatten().tolist())

    def unscored(self) -> "Rollouts":
        """Return the rollouts that no reward judges."""
        return self.take((~self.is_scored).nonzero().flatten().tolist())

    @property
    def lists(self) -> dict[str, list[Any]]:
        """The fields other than `batch`, by name."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "batch"}

    @staticmethod
    def joined(parts: Sequence["Rollouts"]) -> "Rollouts":
        """Join parts, row after row; every column is padded to its longest part."""
        if len(parts) == 1:
            return parts[0]
        columns = {name: stacked([part[name] for part in parts], name) for name in parts[0].batch.columns}
        lists = {name: [value for part in parts for value in part.lists[name]] for name in parts[0].lists}
        return Rollouts(batch=Batch(columns), **lists)


class Scores(NamedTuple):
    """A policy's scores of given responses, each `[B, T]` float32 and 0 on tokens that are not learned."""

    logprob: Tensor
    entropy: Tensor
    value: Tensor | None
    divergence: Tensor | None = None
    """from a teacher, over the vocabulary; None unless the policy is asked for it"""
    teacher_logprob: Tensor | None = None
    """of the same tokens under the teacher, without a graph; None without a divergence"""


class PairScores(NamedTuple):
    """Scores of both responses of each pair, `[B]` float32: summed log-probabilities, or rewards."""

    chosen: Tensor
    rejected: Tensor


class ResponseScores(NamedTuple):
    """Scores of a response to each prompt."""

    logprob: Tensor
    """`[B]` float32, summed over its learned tokens"""


def stacked(columns: list[Tensor], name: str) -> Tensor:
    """Concatenate tensors of one column along the rows, padded on the side on which the column is padded."""
    if columns[0].ndim == 1:
        return torch.cat(columns)
    width = max(column.shape[1] for column in columns)
    missing = [width - column.shape[1] for column in columns]
    pads = [(n, 0) if name.startswith("prompt_") else (0, n) for n in missing]
    return torch.cat([torch.nn.functional.pad(column, pad) for column, pad in zip(columns, pads, strict=True)])
