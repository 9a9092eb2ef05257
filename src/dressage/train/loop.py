"""The training loop, in the order in which the data flows."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dressage.algorithms.base import Algorithm
from dressage.models.policy import Policy
from dressage.ops.kl import adapted_coefficient
from dressage.record.recorder import Recorder
from dressage.rewards.shaping import RunningMoments, Shaping
from dressage.sampling.randomness import Purpose, generator
from dressage.train.checkpoint import Checkpoint, save
from dressage.train.finite import check_finite
from dressage.train.metrics import Clock, rollout_metrics
from dressage.train.optimizer import Optimizer, learning_rate
from dressage.train.processes import Processes
from dressage.train.rollouts import Collector, Rows, score_rollouts
from dressage.train.settings import KLSettings, RunSettings
from dressage.train.update import Place, averaged, update
from dressage.types import Batch

TOKEN_COLUMNS = (
    "logprob", "ref_logprob", "sampler_logprob", "value", "token_reward", "advantage", "return", "entropy"
)  # fmt: skip

Report = Callable[[int, dict[str, float]], None]
"""Called after every step with its number and its metrics."""


@dataclass
class Trainer:
    """Everything one run consists of, and its state between two steps."""

    settings: RunSettings
    kl: KLSettings
    algorithm: Algorithm
    policy: Policy
    optimizer: Optimizer
    collector: Collector
    shaping: Shaping
    processes: Processes
    recorder: Recorder | None
    """None on all processes but the main one"""
    kl_coef: float
    next_step: int = 0

    def run(self, folder: Path, report: Report) -> None:
        """Do the remaining steps, with a checkpoint every now and then and at the end."""
        settings = self.settings
        while self.next_step < settings.steps:
            metrics = self.step(self.next_step)
            report(self.next_step, metrics)
            self.next_step += 1
            due = settings.checkpoint.every and self.next_step % settings.checkpoint.every == 0
            if due or self.next_step == settings.steps:
                self.save(folder)

    def step(self, step: int) -> dict[str, float]:
        """Sample, reward, score, credit, record, update."""
        clock = Clock()
        settings, processes = self.settings, self.processes
        _seed_everything(settings.seed, step, processes.rank)
        share = processes.share(settings.batch_size)
        with clock("generate"):
            batch, rows = self.collector.sample(self._prompts(step, share), step, share)
        with clock("reward"):
            rows = self.collector.reward(rows, settings.shaping.subtract_query)
        with clock("score"):
            batch, first = score_rollouts(
                self.policy, batch, self.kl.estimator, settings.update.micro_batch_size, self._is_single_pass(share)
            )
        with clock("credit"):
            batch, rows = processes.gather(batch, rows)
            batch, rows = self._shape(batch, rows)
            batch = self.algorithm.credit(batch, self.kl_coef)
        with clock("record"):
            self._record(step, batch, rows)
            check_finite(step, batch.columns, batch["mask"])
        with clock("update"):
            place = Place(settings.seed, step, learning_rate(settings.optimizer, step, settings.steps))
            updates = update(
                self.policy, self.optimizer, self.algorithm, batch, settings.update, processes, place, first
            )
        metrics = rollout_metrics(batch, rows, self.kl_coef) | averaged(updates)
        self._adapt(metrics["kl/objective"], len(batch))
        return self._finish(step, metrics, updates, place, clock, float(batch["mask"].sum()))

    def save(self, folder: Path) -> None:
        """Write a checkpoint of the state between two steps."""
        if self.recorder is not None:
            self.recorder.flush()  # a checkpoint never knows of a step that the record does not have
        if self.processes.is_main:
            state = {"kl_coef": self.kl_coef, "moments": self.shaping.moments.state()}
            weights: dict[str, Tensor] = dict(self.optimizer.parameters)
            save(
                folder,
                Checkpoint(self.next_step, state, weights, self.optimizer.state()),
                self.settings.checkpoint.keep,
            )
        self.processes.wait()

    @torch.no_grad()
    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint."""
        for name, parameter in self.optimizer.parameters.items():
            parameter.copy_(checkpoint.weights[name])
        self.optimizer.load({name: tensor.to(self.policy.device) for name, tensor in checkpoint.optimizer.items()})
        self.kl_coef = checkpoint.state["kl_coef"]
        self.shaping.moments = RunningMoments(**checkpoint.state["moments"])
        self.next_step = checkpoint.step

    def _prompts(self, step: int, share: range) -> list[int]:
        per_prompt = self.settings.samples_per_prompt
        count = self.settings.batch_size // per_prompt
        data = self.settings.data
        order = self.collector.prompts.order(self.settings.seed, data.shuffle, step * count, count)
        return [order[row // per_prompt] for row in share]

    def _is_single_pass(self, share: range) -> bool:
        """Whether the update's only forward pass is the one that scoring does: then its graph is kept for it."""
        update = self.settings.update
        return update.epochs == update.mini_batches == 1 and 0 < len(share) <= (update.micro_batch_size or len(share))

    def _shape(self, batch: Batch, rows: Rows) -> tuple[Batch, Rows]:
        ended = [reason != "length" for reason in rows["finish_reason"]]
        kept = {name: values for name, values in rows.items() if name != "query_reward"}
        shaped = self.shaping(rows["reward"], rows.get("query_reward"), ended)
        return batch.with_columns(shaped_reward=torch.tensor(shaped)), kept | {"shaped_reward": shaped}

    def _record(self, step: int, batch: Batch, rows: Rows) -> None:
        if self.recorder is None:
            return
        constant = {"split": "train", "policy_version": step, "kl_coef": self.kl_coef}
        columns = rows | {name: [value] * len(batch) for name, value in constant.items()}
        tokens = {name: batch[name].numpy() for name in TOKEN_COLUMNS if name in batch}
        tokens |= {"token_id": batch["response_ids"].numpy(), "mask": batch["mask"].bool().numpy()}
        self.recorder.rollouts(step, columns, tokens)

    def _adapt(self, kl: float, samples: int) -> None:
        if self.kl.target is not None:
            self.kl_coef = adapted_coefficient(self.kl_coef, kl, self.kl.target, self.kl.horizon, samples)

    def _finish(
        self,
        step: int,
        metrics: dict[str, float],
        updates: list[dict[str, float]],
        place: Place,
        clock: Clock,
        tokens: float,
    ) -> dict[str, float]:
        if "value/error" in metrics and metrics["return/rollout_var"]:
            metrics["value/explained_variance"] = 1 - metrics["value/error"] / metrics["return/rollout_var"]
        if "policy/ratio_error_max" in updates[0]:
            metrics["policy/first_ratio_error"] = updates[0]["policy/ratio_error_max"]
        total = clock.total()
        metrics |= clock.seconds | {
            "optim/learning_rate": place.learning_rate,
            "optim/mini_batches": float(len(updates)),
            "time/total": total,
            "tokens_per_second": tokens / total,
        }
        if self.recorder is not None:
            self.recorder.metrics(step, metrics)
        return metrics


def _seed_everything(seed: int, step: int, rank: int) -> None:
    """Seed the global generators that a user's reward may draw from, so that a resumed run draws the same."""
    number = int(generator(seed, Purpose.GLOBAL, step, rank).integers(2**32))
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
