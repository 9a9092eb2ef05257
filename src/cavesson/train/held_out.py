"""The held-out prompts of a run: when they are answered, and what is measured of the responses."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from cavesson.ops import kl
from cavesson.ops.ratios import response_sum
from cavesson.processes import Processes
from cavesson.train.recording import without_nan
from cavesson.train.rollouts import Collector
from cavesson.types import Batch, Rollouts


@dataclass
class HeldOut:
    """Prompts that are never trained on, each of which gets one response per evaluation.

    Every evaluation uses the same random numbers, so that differences between two of them are due to the weights.
    """

    collector: Collector
    """samples responses to them, and rewards them"""
    every: int
    """training steps between evaluations; 0 = only before the first step and after the last"""
    first_sample: int
    """number of the first response in the record of a step, behind all that may be trained on"""
    first_group: int
    """number of the first prompt in the record, behind those that are trained on"""
    before: Rollouts | None = None
    """this process's responses before training, with `reward` as the only column, NaN if nothing rewards; None until
    there are any"""

    def is_due(self, step: int, steps: int) -> bool:
        """Return whether the prompts are answered before a step, or after the last of `steps`."""
        return step in (0, steps) or (self.every > 0 and step % self.every == 0)

    def keep(self, rollouts: Rollouts) -> None:
        """Keep responses of the policy before training, with which later ones are compared."""
        unknown = torch.full((len(rollouts),), math.nan, dtype=torch.float64)
        self.before = replace(rollouts, batch=Batch({"reward": rollouts.batch.columns.get("reward", unknown)}))

    def rows(self, rollouts: Rollouts) -> dict[str, Any]:
        """Return the columns in which responses differ from trained-on ones in the record."""
        rows: dict[str, Any] = {
            "split": ["eval"] * len(rollouts),
            "sample": [self.first_sample + sample for sample in rollouts.sample],
            "group": [self.first_group + prompt for prompt in rollouts.prompt_index],
        }
        if self.before is not None:
            rows |= {"ref_response": self.before.response, "ref_reward": without_nan(self.before["reward"])}
        return rows

    def metrics(self, rollouts: Rollouts, processes: Processes) -> dict[str, float]:
        """Return the means over all responses, with their standard errors if there are several.

        Responses that no reward judges count in none but the share of them.

        All processes must call this together, with their scored responses.
        """
        batch, mask = rollouts.batch, rollouts["learned"]
        columns = {"length": mask.sum(1)}
        for name, other in (("kl", "ref_logprob"), ("teacher_kl", "teacher_logprob")):
            if other in batch:
                columns[name] = response_sum(kl.k1(batch["logprob"], batch[other]), mask)
        if rollouts.has_rewards:
            columns["reward"] = batch["reward"]
            if self.before is not None:
                columns["gap"] = batch["reward"] - self.before["reward"]
        is_scored = processes.rows(rollouts.is_scored)
        metrics = {"evaluation/unscored": float((~is_scored).float().mean())} if rollouts.has_rewards else {}
        for name, column in columns.items():
            values = processes.rows(column.double())
            values = values[is_scored & ~values.isnan()]
            if not len(values):  # of a gap, one of the two responses may be unscored
                continue
            metrics[f"evaluation/{name}"] = float(values.mean())
            if len(values) > 1:
                metrics[f"evaluation/{name}_se"] = float(values.std(correction=1)) / math.sqrt(len(values))
        return metrics
