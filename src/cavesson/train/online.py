"""One training step of the algorithms that learn from sampled responses, in the order of the data flow."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cavesson.algorithms.base import RolloutAlgorithm
from cavesson.algorithms.settings import CoefficientSettings, UpdateSettings
from cavesson.data.order import Stream
from cavesson.models.policy import Policy, Scores
from cavesson.models.trained import save_trained
from cavesson.ops.kl import adapted_coefficient
from cavesson.randomness import Purpose, generator
from cavesson.rewards.shaping import RunningMoments, Shaping
from cavesson.train.checkpoint import Checkpoint
from cavesson.train.loop import Trainer
from cavesson.train.metrics import rollout_metrics, value_metrics
from cavesson.train.optimizer import learning_rate
from cavesson.train.rollouts import Collector, score_rollouts
from cavesson.train.update import Metrics, StepInfo, averaged, check_finite, micro_batches, mini_batches, update
from cavesson.types import Batch, Rollouts

TOKEN_COLUMNS = (
    "logprob", "ref_logprob", "sampler_logprob", "value", "token_reward", "advantage", "return", "entropy"
)  # fmt: skip


@dataclass
class Unfinished:
    """A step whose rollouts are credited, and the optimiser steps that are done on them."""

    rollouts: Rollouts
    metrics: Metrics
    """of the rollouts"""
    updates: list[Metrics] = field(default_factory=list)
    """of the mini-batches that are done"""


@dataclass(kw_only=True)
class RolloutTrainer(Trainer):
    """Generates, rewards, scores and credits responses, records them, and updates the policy."""

    algorithm: RolloutAlgorithm
    policy: Policy
    collector: Collector
    order: Stream[int]
    """of the prompts, by their indices"""
    samples_per_prompt: int
    temperature: Callable[[int], float]
    """of sampling, by training step"""
    shaping: Shaping
    kl_estimator: str | None
    """of the KL penalty; None if the algorithm computes its own"""
    kl: CoefficientSettings
    kl_coef: float
    """β in force"""
    updates: UpdateSettings
    remarks: list[str]
    prompts_used: int = 0
    """so far in their order"""
    reported: set[str] = field(default_factory=set)
    """rules of the doctor whose findings have been reported"""
    unfinished: Unfinished | None = None
    """the step that is being trained on"""

    def step(self, step: int) -> Metrics:  # noqa: PLR0915  # the whole data flow on one page
        """Generate, reward, score, credit, record, update and adapt: from prompts to new weights."""
        clock = self.clock(step)
        info = StepInfo(self.seed, step, learning_rate(self.learner.optimizer.settings, step, self.steps))
        scores = None
        if self.unfinished is None:
            _seed_everything(self.seed, step, self.learner.processes.rank)
            parts: list[Rollouts] = []
            learned = torch.zeros(0, dtype=torch.bool)
            while len(parts) < self.algorithm.max_batches and int(learned.sum()) < self.batch_size:
                with clock("generate"):
                    part = self._generate(step, len(parts))
                with clock("reward"):
                    part = self.collector.reward(part)
                parts.append(self.learner.processes.gather(part))
                learned = self._learned(parts)
            rollouts = Rollouts.joined(parts)
            with clock("score"):
                columns, scores = self._score(rollouts, learned, info)
                rollouts = rollouts.with_columns(**columns)
            with clock("credit"):
                rollouts = self._shape(rollouts.with_columns(learned=learned))
                rollouts = replace(rollouts, batch=self.algorithm.credit(rollouts.batch, self.kl_coef))
                metrics = rollout_metrics(rollouts, self.kl_coef, self.kl_estimator)
                metrics |= self.algorithm.metrics(rollouts.batch)
            # The graph covers the rows chosen before scoring; `credit` may have reduced them, which makes it unusable.
            scores = scores if torch.equal(rollouts["learned"], learned) else None
            self.prompts_used += len(parts) * self._prompts_per_batch
            self.unfinished = Unfinished(rollouts, metrics)
        now = self.unfinished
        with clock("record"):
            self._record(step, now.rollouts)
            check_finite(step, now.rollouts.batch.columns, now.rollouts["mask"])
        with clock("update"):
            batch = now.rollouts.batch.take(now.rollouts["learned"].nonzero().squeeze(1))
            for seen in update(self.learner, batch, self.updates, info, scores=scores, done=tuple(now.updates)):
                now.updates.append(seen)
                if len(now.updates) < self.updates.total:
                    self.between_updates(len(now.updates), self.updates.total)
        self.unfinished = None
        return self._adapted(now, info) | clock.metrics(tokens=float(now.rollouts["mask"].sum()))

    def _generate(self, step: int, batches: int) -> Rollouts:
        """Sample this process's share of a step's next batch, after `batches` of them."""
        share = self.learner.processes.share(self.batch_size)
        start = batches * self.batch_size
        prompts = self.order.take(self.prompts_used + batches * self._prompts_per_batch, self._prompts_per_batch)
        sample = range(start + share.start, start + share.stop)
        rollouts = self.collector.generate(
            [prompts[row // self.samples_per_prompt] for row in share], step, sample, self.temperature(step)
        )
        return rollouts.with_columns(
            group_in_step=torch.tensor([number // self.samples_per_prompt for number in sample])
        )

    @property
    def _prompts_per_batch(self) -> int:
        return self.batch_size // self.samples_per_prompt

    def _learned(self, parts: list[Rollouts]) -> Tensor:
        """Return which responses so far to learn from, at most one batch: `[B]` bool.

        If the algorithm can learn from none of them, these are the first batch.
        """
        rewards, group = (torch.cat([part[name] for part in parts]) for name in ("reward", "group_in_step"))
        informative = self.algorithm.informative(rewards, group)
        if len(parts) == self.algorithm.max_batches and not bool(informative.any()):
            informative = torch.ones_like(informative)
        return informative & (informative.cumsum(0) <= self.batch_size)

    def _score(self, rollouts: Rollouts, learned: Tensor, info: StepInfo) -> tuple[dict[str, Tensor], Scores | None]:
        """Score all rollouts, in the same micro-batches as in the first epoch of the update.

        Matrix products of other sizes round differently, in bfloat16 by a hundredth of a nat per token. Ratios would
        then differ from 1 before the first update.
        """
        processes = self.learner.processes
        rows, rest = learned.nonzero().squeeze(1), (~learned).nonzero().squeeze(1)
        passes = [rows[mini] for mini in mini_batches(len(rows), self.updates, info, 0)]
        batches = [*passes, *rest.split(self.batch_size)]
        parts = [some[part].tolist() for some in batches for part in micro_batches(len(some), self.updates, processes)]
        # If the update needs only this forward pass, keep its graph for the update.
        per_pass = len(micro_batches(len(rows), self.updates, processes))
        is_only_pass = self.updates.epochs == len(passes) == per_pass == 1 and len(rows) >= processes.count
        return score_rollouts(self.policy, rollouts.batch, self.kl_estimator, parts, processes, is_only_pass)

    def _shape(self, rollouts: Rollouts) -> Rollouts:
        """Add `shaped_reward` `[B]` float64, the reward that training uses, and `kl_coef` `[B]`, β in force."""
        query = rollouts["query_reward"].tolist() if "query_reward" in rollouts.batch else None
        shaped = self.shaping(rollouts["reward"].tolist(), query, rollouts["ended"].bool().tolist())
        return rollouts.with_columns(
            shaped_reward=torch.tensor(shaped, dtype=torch.float64), kl_coef=torch.full((len(rollouts),), self.kl_coef)
        )

    def _record(self, step: int, rollouts: Rollouts) -> None:
        if self.recorder is None:
            return
        constant = {"split": "train", "policy_version": step, "kl_coef": self.kl_coef}
        rows: dict[str, Any] = {name: [value] * len(rollouts) for name, value in constant.items()}
        rows |= {name: values for name, values in rollouts.lists.items() if values}
        rows["group"] = rows.pop("prompt_index")
        rows |= {name: rollouts[name].tolist() for name in ("reward", "shaped_reward")}
        prompts = zip(rollouts["prompt_ids"], rollouts["prompt_mask"].bool(), strict=True)
        rows["prompt_ids"] = [ids[mask].tolist() for ids, mask in prompts]
        tokens = {name: rollouts[name].numpy() for name in TOKEN_COLUMNS if name in rollouts.batch}
        tokens |= {"token_id": rollouts["response_ids"].numpy(), "mask": rollouts["mask"].bool().numpy()}
        self.recorder.rollouts(step, rows, tokens)
        self.algorithm.write(self.folder, step, rollouts)

    def _adapted(self, done: Unfinished, info: StepInfo) -> Metrics:
        """Adapt β to the KL of a finished step, and return the step's metrics."""
        metrics = done.metrics | averaged(done.updates)
        metrics["optim/learning_rate"] = info.learning_rate
        metrics["optim/mini_batches"] = float(len(done.updates))
        if "kl/objective" in metrics and self.kl.target is not None:
            self.kl_coef = adapted_coefficient(
                self.kl_coef, metrics["kl/objective"], self.kl.target, self.kl.horizon, len(done.rollouts)
            )
        return metrics | value_metrics(metrics, done.updates)

    @property
    def model(self) -> Any:
        return self.policy.model

    def finish(self) -> Metrics:
        model = self.whole_model()
        if model is not None:
            save_trained(self.folder / "model", model, self.tokenizer, self.model_settings)
        return {}

    def state(self) -> dict[str, Any]:
        state = {
            "kl_coef": self.kl_coef,
            "moments": self.shaping.moments.state(),
            "prompts_used": self.prompts_used,
            "reported": sorted(self.reported),
        }
        if self.unfinished is None:
            return state
        now = self.unfinished
        return state | {"rollouts": now.rollouts.lists, "metrics": now.metrics, "updates": now.updates}

    def tensors(self) -> dict[str, Tensor]:
        """Return the columns of the rollouts that are being trained on."""
        if self.unfinished is None:
            return {}
        # An algorithm may use one tensor under two names, which safetensors does not allow.
        return {name: column.clone() for name, column in self.unfinished.rollouts.batch.columns.items()}

    def load_state(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        self.kl_coef, self.prompts_used = state["kl_coef"], state["prompts_used"]
        self.shaping.moments = RunningMoments(**state["moments"])
        self.reported.update(state["reported"])
        if checkpoint.tensors:
            rollouts = Rollouts(batch=Batch(checkpoint.tensors), **state["rollouts"])
            self.unfinished = Unfinished(rollouts, state["metrics"], state["updates"])

    def describe(self) -> dict[str, Any]:
        prompts, sampler = self.collector.prompts, self.collector.sampler
        return {
            "eos_token_ids": sampler.eos.tolist(),
            "prompts": {"count": len(prompts), "dropped": list(prompts.dropped)},
        }

    def notes(self) -> list[str]:
        return self.remarks

    def close(self) -> None:
        self.collector.sampler.close()


def _seed_everything(seed: int, step: int, rank: int) -> None:
    """Seed the global generators, which a user's reward may use, so that a resumed run draws the same numbers."""
    number = int(generator(seed, Purpose.GLOBAL, step, rank).integers(2**32))
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
