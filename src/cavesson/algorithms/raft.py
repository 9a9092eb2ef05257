"""RAFT (arXiv:2304.06767): sample responses, keep those with the highest rewards, and train on them as in SFT."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cavesson.algorithms.base import Loss, RolloutAlgorithm
from cavesson.algorithms.runs import RolloutRun
from cavesson.algorithms.settings import CoefficientSettings
from cavesson.models.settings import ReferenceSettings
from cavesson.ops import kl
from cavesson.ops.token_rewards import penalised
from cavesson.processes import Processes
from cavesson.traits import Traits
from cavesson.types import Batch, Rollouts, Scores


class RAFT(RolloutAlgorithm):
    """Reward ranked fine-tuning."""

    selection: Literal["top", "local"] = "top"
    """which responses of a step are kept: "top" = the best of all of them; "local" = the best response to each prompt,
    if rewards of different prompts cannot be compared"""
    k: int = Field(8, ge=1)
    """one of k responses is kept; with "local" also the number of responses per prompt"""
    final_temperature: float | None = Field(None, gt=0)
    """the sampling temperature changes linearly from sampling.temperature in the first step to this in the last; none =
    it is constant"""

    @property
    def traits(self) -> Traits:
        return Traits(kl_place="reward")

    @property
    def selects(self) -> bool:
        return self.k > 1

    def credit(self, rollouts: Batch, kl_coef: float, processes: Processes) -> Batch:
        """Add `score` `[B]`, `selected` `[B]`, `advantage` `[B, T]` and `chosen` `[B]`, the rows to train on.

        The score is the reward minus β · KL, if β is not 0: the optional penalty of arXiv:2304.06767. A discarded
        response is never selected.
        """
        mask, score = rollouts["learned"], rollouts["shaped_reward"]
        if kl_coef:
            score = penalised(score, kl.k1(rollouts["logprob"], rollouts["ref_logprob"]), mask, kl_coef)
        eligible = ~rollouts["discarded"]
        ranked = score.masked_fill(~eligible, -torch.inf)
        selected = processes.over_all(self._best, ranked, rollouts["group_in_step"]) & eligible
        # A batch needs at least one row; if nothing was selected, all weights are 0 and the update is skipped.
        chosen = selected if bool(processes.sum_tensor(selected.sum())) else torch.ones_like(selected)
        columns = {"score": score, "selected": selected.float(), "chosen": chosen}
        return rollouts.with_columns(**columns, advantage=selected[:, None] * mask)

    def _best(self, score: Tensor, group: Tensor) -> Tensor:
        """Return which rows to select: `[B]`, `[B]` -> `[B]` bool; among equal scores, the first row wins."""
        order = score.argsort(descending=True, stable=True)
        best = torch.zeros_like(score, dtype=torch.bool)
        if self.selection == "top":
            best[order[: len(score) // self.k]] = True
            return best
        for member in group.unique():
            best[order[group[order] == member][0]] = True
        return best

    def weights(self, batch: Batch) -> Tensor:
        """Return the weights `[B, T]`: every token of a selected response counts once."""
        return batch["advantage"]

    def loss(self, scores: Scores, batch: Batch) -> Loss:
        """Return −log π per learned token, `[B, T]`; prompts are not learned."""
        return Loss(-scores.logprob, {"loss/total": -scores.logprob, "policy/entropy": scores.entropy})

    def metrics(self, rollouts: Batch, processes: Processes) -> dict[str, float]:
        """Return the number of selected responses and, if there are any, their mean reward and length."""
        selected = rollouts["selected"]
        found = {"raft/selected": float(processes.sum_tensor(selected.sum()))}
        if found["raft/selected"]:
            found["raft/selected_reward"] = float(processes.mean(rollouts["reward"], selected))
            found["raft/selected_length"] = float(processes.mean(rollouts["learned"].sum(1), selected))
        return found

    def write(self, folder: Path, step: int, rollouts: Rollouts, processes: Processes) -> None:
        """Write the step's training set atomically to `training_sets/`, in LMFlow's text2text format."""
        examples = list(chain.from_iterable(processes.on_main(selected_examples(rollouts))))
        if processes.is_main:
            from cavesson.record.files import write_json

            path = folder / "training_sets" / f"step-{step:08d}.json"
            write_json(path, {"type": "text2text", "instances": examples})


class RAFTRun(RolloutRun):
    """Train a model with RAFT: sample responses and fine-tune on the best of them."""

    raft: RAFT = RAFT()
    """the algorithm"""
    kl: CoefficientSettings = CoefficientSettings(coef=0.0)
    """the KL penalty, which is subtracted from the reward for the ranking"""
    reference: ReferenceSettings = ReferenceSettings(kind="none")
    """the reference model"""

    @property
    def smallest_batch(self) -> int:
        return math.lcm(self.samples_per_prompt, self.raft.k)

    def learned_from(self, responses: int) -> int:
        return responses // self.raft.k

    def most_learned(self, share: int) -> int:
        k = self.raft.k
        # The best of all responses may be those of one process; a prompt's responses may be those of two.
        own = share if self.raft.selection == "top" else share // k + 2 * (share % k > 0)
        return min(own, self.learned_from(self.batch_size))

    def show(self, folder: Path, console: Console) -> None:
        """Print the gain of every step, and the gain from selecting among responses of the untrained model."""
        from cavesson.record import open as open_run

        # The last is an evaluation; before, there may be steps in which no reward judged any response.
        steps = open_run(folder, allow_remote=True).steps().to_pylist()
        rounds = [step for step in steps if step.get("reward/mean") is not None]
        if rounds:
            print_rounds(console, rounds)

    @property
    def scoring_temperature(self) -> float:
        """1, because supervised training learns the model's own distribution, whatever the sampling temperature."""
        return 1.0

    def sampling_temperature(self, step: int) -> float:
        """Return the temperature of a step, which changes linearly from the first step to the last."""
        start, final = self.sampling.temperature, self.raft.final_temperature
        if final is None or self.steps == 1:
            return start
        return start + (final - start) * step / (self.steps - 1)

    @model_validator(mode="after")
    def _check_rounds(self) -> Self:
        if self.batch_size % self.raft.k:
            raise ValueError(f"batch_size {self.batch_size} is not a multiple of raft.k {self.raft.k}")
        if self.raft.selection == "local" and self.samples_per_prompt != self.raft.k:
            raise ValueError(
                f"raft.selection local keeps the best of the {self.samples_per_prompt} responses to a prompt, "
                f"and raft.k is {self.raft.k}; set samples_per_prompt and raft.k to the same number"
            )
        if self.update.mini_batches > self.batch_size // self.raft.k:
            raise ValueError(
                f"update.mini_batches {self.update.mini_batches} is more than the "
                f"{self.batch_size // self.raft.k} responses that are kept (batch_size / raft.k)"
            )
        if self.update.target_policy_kl is not None:
            raise ValueError("update.target_policy_kl has no effect in RAFT, which trains on selected responses only")
        self.refuse("update.max_ratio", "in RAFT, which trains on selected responses only")
        return self


def selected_examples(rollouts: Rollouts) -> list[dict[str, str]]:
    """Return the selected prompts and responses as examples of LMFlow's text2text format."""
    chosen = zip(rollouts.prompt, rollouts.response, rollouts["selected"].tolist(), strict=True)
    return [{"input": prompt, "output": response} for prompt, response, keep in chosen if keep]


def print_rounds(console: Console, steps: Sequence[Mapping[str, Any]]) -> None:
    """Print the gain of every step, and the gain from selecting among responses of the untrained model.

    `steps` are their recorded metrics, as in `cavesson.open(folder).steps().to_pylist()`.
    """
    table = Table("step", "reward", "gain", "of the selected", "distinct-2", "KL", title="RAFT")
    for step in steps:
        reward = step["reward/mean"]
        rest = (step.get(name) for name in ("raft/selected_reward", "text/distinct_2", "kl/objective"))
        shown = ("–" if value is None else f"{value:.3f}" for value in rest)
        table.add_row(str(step["step"]), f"{reward:+.3f}", f"{reward - steps[0]['reward/mean']:+.3f}", *shown)
    console.print(table)
    untouched = steps[0].get("raft/selected_reward")
    if untouched is not None:
        gain = untouched - steps[0]["reward/mean"]
        console.print(f"Selecting among the starting model's responses gives {untouched:+.3f}, a gain of {gain:+.3f}.")
