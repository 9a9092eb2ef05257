"""One training step of the algorithms that learn from sampled responses, in the order of the data flow."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cavesson.algorithms.base import RolloutAlgorithm
from cavesson.algorithms.micro_batches import micro_batches
from cavesson.algorithms.settings import CoefficientSettings, UpdateSettings
from cavesson.data.prompts import PromptSet
from cavesson.errors import print_error
from cavesson.models.fingerprint import digest
from cavesson.models.policy import Policy
from cavesson.models.trained import save_trained
from cavesson.ops.kl import adapted_coefficient
from cavesson.randomness import Purpose, generator
from cavesson.record.splits import GIVEN
from cavesson.rollout.rewards.shaping import RunningMoments, Shaping
from cavesson.train.batches import Batches
from cavesson.train.checkpoint import Checkpoint
from cavesson.train.given import is_given, sampled
from cavesson.train.held_out import HeldOut
from cavesson.train.kept import KeptBatches
from cavesson.train.loop import Trainer
from cavesson.train.metrics import (
    Clock,
    episode_metrics,
    rollout_metrics,
    staleness_metrics,
    unscored_metrics,
    value_metrics,
)
from cavesson.train.optimizer import learning_rate
from cavesson.train.recording import recorded
from cavesson.train.rollouts import EVALUATION_STEP, next_values, normalised_parts, score_rollouts
from cavesson.train.update import Chosen, Metrics, StepInfo, averaged, check_finite, mini_batches, update
from cavesson.types import Rollouts


@dataclass
class Unfinished:
    """A step whose rollouts are credited, and the optimiser steps that are done on them."""

    rollouts: Rollouts
    """those of this process that a reward judges"""
    unscored: Rollouts
    """all others, which are recorded and have no effect"""
    metrics: Metrics
    """of the rollouts of all processes"""
    held_out: Rollouts | None = None
    """responses of this process to held-out prompts, of the weights before the step; None if they were not due"""
    updates: list[Metrics] = field(default_factory=list)
    """of the mini-batches that are done"""


@dataclass(kw_only=True)
class RolloutTrainer(Trainer):
    """Generates, rewards, scores and credits responses, records them, and updates the policy."""

    algorithm: RolloutAlgorithm
    policy: Policy
    batches: Batches
    shaping: Shaping
    kl_estimator: str | None
    """of the KL penalty; None if the algorithm does not read it"""
    kl: CoefficientSettings
    kl_coef: float | None
    """β in force; None if the algorithm has no KL penalty"""
    updates: UpdateSettings
    held_out: HeldOut | None = None
    """the held-out prompts, if there are any"""
    reported: set[str] = field(default_factory=set)
    """rules of the doctor whose findings have been reported"""
    unfinished: Unfinished | None = None
    """the step that is being trained on"""

    def step(self, step: int) -> Metrics:
        """Generate, reward, score, credit, record, update and adapt: from prompts to new weights.

        An evaluation on the held-out prompts comes first if it is due.
        """
        held_out, evaluation = self._evaluate(step) if self.unfinished is None else (None, {})
        clock, processes = self.clock(step), self.learner.processes
        info = StepInfo(self.seed, step, learning_rate(self.learner.optimizer.settings, step, self.steps))
        if self.unfinished is None:
            everything, batches = self._sampled(step, clock)
            if not processes.sum_tensor(everything.is_scored.sum()):
                return self._skipped(step, everything, batches, held_out, info) | evaluation | clock.metrics(0.0)
            rollouts = self.judged(self._shaped(everything.scored()), info, clock)
            with clock("credit"):
                metrics = self._measured(step, rollouts)
                metrics |= unscored_metrics(everything, processes) if everything.has_rewards else {}
            self.batches.used(batches)
            self.unfinished = Unfinished(rollouts, everything.unscored(), metrics | evaluation, held_out)
        now = self.unfinished
        with clock("record"):
            self._record(step, now.rollouts, now.unscored)
            self._record_held_out(step, now.held_out)
        with clock("update"):
            processes.agreed(lambda: check_finite(step, now.rollouts.batch.columns, now.rollouts["learned"]))
            for seen in self.updated(now, info):
                now.updates.append(seen)
                if len(now.updates) < self.updates.total:
                    self.between_updates(len(now.updates), self.updates.total)
        self.unfinished = None
        return self._adapted(now, info) | clock.metrics(float(processes.sum_tensor(now.rollouts["learned"].sum())))

    def _sampled(self, step: int, clock: Clock) -> tuple[Rollouts, int]:
        """Generate and reward responses, mark those to learn from, and return them and the number of their batches."""
        _seed_everything(self.seed, step, self.learner.processes.rank)
        parts: list[Rollouts] = []
        chosen = torch.zeros(0, dtype=torch.bool)
        while len(parts) < self.algorithm.max_batches and self._count(chosen) < self.batch_size:
            parts.append(self.batches.take(step, len(parts), clock))
            chosen = self._chosen_of(parts)
        return Rollouts.joined(parts).with_columns(chosen=chosen), len(parts)

    def judged(self, rollouts: Rollouts, info: StepInfo, clock: Clock) -> Rollouts:
        """Score rollouts by the models, and credit their tokens."""
        with clock("score"):
            parts = list(chain.from_iterable(self.passes(rollouts, info)))
            columns = score_rollouts(self.policy, rollouts.batch, self.kl_estimator, parts)
            rollouts = rollouts.with_columns(**columns)
        with clock("credit"):
            return self.credited(rollouts)

    def updated(self, now: Unfinished, info: StepInfo) -> Iterator[Metrics]:
        """Update the weights, and yield the metrics of every mini-batch that is not done yet."""
        return update(
            self.learner, now.rollouts.batch, self.chosen(now.rollouts), self.updates, info, tuple(now.updates)
        )

    def _measured(self, step: int, rollouts: Rollouts) -> Metrics:
        """Return the metrics of a step's credited rollouts, over all processes, without those that the data give."""
        processes, rollouts = self.learner.processes, sampled(rollouts)
        if not processes.sum_tensor(torch.tensor(len(rollouts))):
            return {}
        metrics = rollout_metrics(rollouts, self.kl_coef, self.kl_estimator, processes)
        metrics |= self.algorithm.metrics(rollouts.batch, processes)
        return metrics | staleness_metrics(rollouts, step, processes) | episode_metrics(rollouts, processes)

    def _count(self, rows: Tensor) -> int:
        """Return how many rows `[b]` bool are set, over all processes."""
        return int(self.learner.processes.sum_tensor(rows.sum()))

    def _chosen_of(self, parts: list[Rollouts]) -> Tensor:
        """Return which responses so far to learn from, over all processes at most one batch: `[b]` bool.

        If the algorithm can learn from none of them, these are the first batch. None of them is unscored. Without
        rewards, all are learned from.
        """
        if not parts[0].has_rewards:
            return torch.cat([part.is_scored for part in parts])

        def chosen(rewards: Tensor, group: Tensor) -> Tensor:
            informative = scored = ~rewards.isnan()
            if bool(scored.any()):
                informative = scored.masked_scatter(scored, self.algorithm.informative(rewards[scored], group[scored]))
            if len(parts) == self.algorithm.max_batches and not bool(informative.any()):
                informative = scored
            return informative & (informative.cumsum(0) <= self.batch_size)

        rewards, group = (torch.cat([part[name] for part in parts]) for name in ("reward", "group_in_step"))
        return self._in_order(chosen, [sample for part in parts for sample in part.sample], rewards, group)

    def chosen(self, rollouts: Rollouts) -> Chosen:
        """Return which rollouts to learn from, with their places among those of all processes."""
        chosen = rollouts["chosen"]
        rows = chosen.nonzero().squeeze(1)
        places = self._in_order(lambda chosen: chosen.cumsum(0) - 1, rollouts.sample, chosen)
        return Chosen(rows, places[rows], self._count(chosen))

    def _in_order(self, function: Callable[..., Tensor], samples: Sequence[int], *columns: Tensor) -> Tensor:
        """Apply a function to columns `[B]` of all processes in order of their samples; return this process's rows."""

        def ordered(sample: Tensor, *columns: Tensor) -> Tensor:
            order = sample.argsort()
            return function(*(column[order] for column in columns))[order.argsort()]

        return self.learner.processes.over_all(ordered, torch.tensor(samples, dtype=torch.long), *columns)

    def passes(self, rollouts: Rollouts, info: StepInfo) -> list[list[list[int]]]:
        """Return the micro-batches to score: of every mini-batch of the update's first epoch, and of all other rows.

        Matrix products of other sizes round differently, in bfloat16 by a hundredth of a nat per token. Ratios would
        then differ from 1 before the first update.
        """
        usual = len(self.learner.processes.share(self.batch_size))
        mini = mini_batches(self.chosen(rollouts), self.updates, info, 0)
        rest = (~rollouts["chosen"]).nonzero().squeeze(1).tolist()
        return [*(self._split(rollouts, rows) for rows in mini), self._split(rollouts, rest, usual)]

    def _split(self, rollouts: Rollouts, rows: Sequence[int], usual: int = 0) -> list[list[int]]:
        return micro_batches(self.policy, self.learner.processes, rollouts.batch, rows, self.updates, usual)

    def credited(self, rollouts: Rollouts) -> Rollouts:
        """Add what the algorithm says that every token earned."""
        processes = self.learner.processes
        if self.algorithm.reads_next_value:
            cut = (rollouts["ended"] == 0).nonzero().flatten().tolist()
            parts = self._split(rollouts, cut, len(processes.share(self.batch_size)))
            rollouts = rollouts.with_columns(next_value=next_values(self.policy, rollouts.batch, parts))
        return replace(rollouts, batch=self.algorithm.credit(rollouts.batch, self.kl_coef or 0.0, processes))

    def _shaped(self, rollouts: Rollouts) -> Rollouts:
        """Add `kl_coef` `[b]`, β in force, and of a reward `shaped_reward` `[b]` float64, which training uses."""
        beta = torch.full((len(rollouts),), self.kl_coef or 0.0)
        if not rollouts.has_rewards:
            return rollouts.with_columns(kl_coef=beta)

        def shaped(rewards: Tensor, ended: Tensor, *query: Tensor) -> Tensor:
            queries = query[0].tolist() if query else None
            return torch.tensor(self.shaping(rewards.tolist(), queries, ended.tolist()), dtype=torch.float64)

        processes = self.learner.processes
        is_sum = self.shaping.settings.parts == "sum"
        columns = [rollouts["reward"] if is_sum else normalised_parts(rollouts, processes), rollouts["ended"]]
        if "query_reward" in rollouts.batch:
            columns.append(rollouts["query_reward"])
        rewards = processes.over_all(shaped, *columns)
        return rollouts.with_columns(shaped_reward=rewards, kl_coef=beta)

    def _evaluate(self, step: int) -> tuple[Rollouts | None, Metrics]:
        """Return this process's scored responses to the held-out prompts, and their metrics, if they are due."""
        held_out, processes = self.held_out, self.learner.processes
        if held_out is None or not held_out.is_due(step, self.end):
            return None, {}
        clock = self.clock(step)
        with clock("evaluate"):
            _seed_everything(self.seed, EVALUATION_STEP, processes.rank)
            rollouts = self.batches.answers(held_out.collector, step)
            parts = self._split(rollouts, range(len(rollouts)), len(processes.share(self.batch_size)))
            rollouts = rollouts.with_columns(**score_rollouts(self.policy, rollouts.batch, None, parts))
            if step == 0:
                held_out.keep(rollouts)
            metrics = held_out.metrics(rollouts, processes)
        return rollouts, metrics | clock.seconds

    def _skipped(
        self, step: int, unscored: Rollouts, batches: int, held_out: Rollouts | None, info: StepInfo
    ) -> Metrics:
        """Record a step in which no reward judges any response, so that there is nothing to learn."""
        self.batches.used(batches)
        self._record_training(step, unscored)
        self._record_held_out(step, held_out)
        if self.learner.processes.is_main:
            print_error(f"cavesson: step {step}: no reward judged any response, so the weights stay as they are")
        return {"reward/unscored": 1.0, "optim/learning_rate": info.learning_rate}

    def _record(self, step: int, rollouts: Rollouts, unscored: Rollouts) -> None:
        self._record_training(step, rollouts)
        self._record_training(step, unscored)
        if self.recorder is not None:
            self.algorithm.write(self.folder, step, rollouts, self.learner.processes)

    def _record_training(self, step: int, rollouts: Rollouts) -> None:
        rows: dict[str, Any] = {"split": [GIVEN if given else "train" for given in is_given(rollouts).tolist()]}
        if self.kl_coef is not None:
            rows["kl_coef"] = [self.kl_coef] * len(rollouts)
        self._record_rows(step, rollouts, self.batches.collector.prompts, rows)

    def _record_held_out(self, step: int, rollouts: Rollouts | None) -> None:
        """Record responses to the held-out prompts, if there are any, and check that their numbers are finite."""
        if rollouts is None or self.held_out is None or self.recorder is None:
            return
        self._record_rows(step, rollouts, self.held_out.collector.prompts, self.held_out.rows(rollouts))
        scored = rollouts.scored()
        self.learner.processes.agreed(lambda: check_finite(step, scored.batch.columns, scored["learned"]))

    def _record_rows(self, step: int, rollouts: Rollouts, prompts: PromptSet, more: dict[str, Any]) -> None:
        """Record rollouts of this process, with further columns of rows; a process may have none."""
        recorder = self.recorder

        def record() -> None:
            if recorder is not None and len(rollouts):
                recorder.rollouts(step, *recorded(rollouts, prompts, more))

        self.learner.processes.agreed(record)

    def _adapted(self, done: Unfinished, info: StepInfo) -> Metrics:
        """Adapt β to the KL of a finished step, and return the step's metrics."""
        metrics = done.metrics | averaged(done.updates)
        metrics["optim/learning_rate"] = info.learning_rate
        metrics["optim/mini_batches"] = float(len(done.updates))
        if "kl/objective" in metrics and self.kl.target is not None and self.kl_coef is not None:
            responses = int(self.learner.processes.sum_tensor(torch.tensor(len(done.rollouts))))
            self.kl_coef = adapted_coefficient(
                self.kl_coef, metrics["kl/objective"], self.kl.target, self.kl.horizon, responses
            )
        return metrics | value_metrics(metrics, done.updates)

    @property
    def model(self) -> Any:
        return self.policy.model

    def finish(self) -> Metrics:
        held_out, metrics = self._evaluate(self.end)
        self._record_held_out(self.end, held_out)
        model = self.whole_model()
        if model is not None:
            save_trained(self.folder / "model", model, self.tokenizer, self.model_settings)
        return metrics

    def state(self) -> tuple[dict[str, Any], KeptBatches]:
        now = self.unfinished
        single = {
            "before": None if self.held_out is None else self.held_out.before,
            "held_out": None if now is None else now.held_out,
            "now": None if now is None else now.rollouts,
            "unscored": None if now is None else now.unscored,
        }
        batches: dict[str, list[Rollouts | None]] = {"ahead": self.batches.finished()}
        batches |= {name: [one] for name, one in single.items() if one is not None}
        state: dict[str, Any] = {
            "kl_coef": self.kl_coef,
            "moments": self.shaping.moments.state(),
            "prompts_used": self.batches.prompts_used,
            "reported": sorted(self.reported),
        }
        return state | ({} if now is None else {"metrics": now.metrics, "updates": now.updates}), batches

    def load_state(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        self.batches.prompts_used = state["prompts_used"]
        if self.kl.target is not None:  # otherwise it is constant, and a fork of the run may have another one
            self.kl_coef = state["kl_coef"]
        self.shaping.moments = RunningMoments(**state["moments"])
        self.reported.update(state["reported"])
        mine = {
            name: [None if one is None else self.batches.own(one, self._size(name, one)) for one in whole]
            for name, whole in checkpoint.batches.items()
        }
        self.batches.restore(mine.get("ahead", []))
        held_out, before, unscored = (
            next(iter(mine.get(name, ())), None) for name in ("held_out", "before", "unscored")
        )
        if self.held_out is not None:
            self.held_out.before = before
        for rollouts in mine.get("now", ()):
            assert rollouts is not None
            # Checkpoints of earlier versions have no unscored responses.
            unscored = rollouts.take([]) if unscored is None else unscored
            self.unfinished = Unfinished(rollouts, unscored, state["metrics"], held_out, state["updates"])

    def _size(self, name: str, whole: Rollouts) -> int:
        """Return the number of rollouts in a batch of a checkpoint; all held-out ones are one batch."""
        return len(whole) if name in ("held_out", "before") else self.batch_size

    def auto_values(self) -> dict[str, Any]:
        return self.batches.collector.sampler.auto_values()

    def describe(self) -> dict[str, Any]:
        collector = self.batches.collector
        prompts, sampler, conversation = collector.prompts, collector.sampler, collector.conversation
        held_out: dict[str, Any] = {}
        if prompts.held_out is not None:
            held_out = {"held_out": len(prompts.held_out), "held_out_fingerprint": digest(prompts.held_out.ids)}
        return {
            "eos_token_ids": sampler.eos.tolist(),
            **({} if conversation is None else {"tools": conversation.environments.tools}),
            "prompts": {
                "count": len(prompts),
                "dropped": list(prompts.dropped),
                "fingerprint": digest(prompts.ids),
                **held_out,
            },
        }

    def close(self) -> None:
        self.batches.close()


def _seed_everything(seed: int, step: int, rank: int) -> None:
    """Seed the global generators, which a user's reward may use, so that a resumed run draws the same numbers."""
    number = int(generator(seed, Purpose.GLOBAL, step, rank).integers(2**32))
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
