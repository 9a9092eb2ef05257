"""One training step of the algorithms that learn from sampled responses, in the order of the data flow."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cavesson.algorithms.base import RolloutAlgorithm
from cavesson.algorithms.settings import CoefficientSettings, UpdateSettings
from cavesson.models.policy import Policy, Scores
from cavesson.models.trained import save_trained
from cavesson.ops.kl import adapted_coefficient
from cavesson.randomness import Purpose, generator
from cavesson.rewards.shaping import RunningMoments, Shaping
from cavesson.train.batches import Batches, kept, restored
from cavesson.train.checkpoint import Checkpoint
from cavesson.train.loop import Trainer
from cavesson.train.metrics import rollout_metrics, staleness_metrics, value_metrics
from cavesson.train.optimizer import learning_rate
from cavesson.train.rollouts import score_rollouts
from cavesson.train.update import Metrics, StepInfo, averaged, check_finite, micro_batches, mini_batches, update
from cavesson.types import Rollouts

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
    batches: Batches
    shaping: Shaping
    kl_estimator: str | None
    """of the KL penalty; None if the algorithm computes its own"""
    kl: CoefficientSettings
    kl_coef: float
    """β in force"""
    updates: UpdateSettings
    remarks: list[str]
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
                parts.append(self.batches.take(step, len(parts), clock))
                learned = self._learned(parts)
            rollouts = Rollouts.joined(parts)
            with clock("score"):
                columns, scores = self._score(rollouts, learned, info)
                rollouts = rollouts.with_columns(**columns)
            with clock("credit"):
                rollouts = self._shape(rollouts.with_columns(learned=learned))
                rollouts = replace(rollouts, batch=self.algorithm.credit(rollouts.batch, self.kl_coef))
                metrics = rollout_metrics(rollouts, self.kl_coef, self.kl_estimator)
                metrics |= self.algorithm.metrics(rollouts.batch) | staleness_metrics(rollouts, step)
            # The graph covers the rows chosen before scoring; `credit` may have reduced them, which makes it unusable.
            scores = scores if torch.equal(rollouts["learned"], learned) else None
            self.batches.used(len(parts))
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
        constant = {"split": "train", "kl_coef": self.kl_coef}
        rows: dict[str, Any] = {name: [value] * len(rollouts) for name, value in constant.items()}
        rows |= {name: values for name, values in rollouts.lists.items() if values}
        rows["group"] = rows.pop("prompt_index")
        rows |= {name: rollouts[name].tolist() for name in ("reward", "shaped_reward")}
        versions = rollouts["sampler_version"]
        rows["policy_version"] = versions[:, 0].tolist()  # of the first token, which has the oldest weights
        prompts = zip(rollouts["prompt_ids"], rollouts["prompt_mask"].bool(), strict=True)
        rows["prompt_ids"] = [ids[mask].tolist() for ids, mask in prompts]
        tokens = {name: rollouts[name].numpy() for name in TOKEN_COLUMNS if name in rollouts.batch}
        tokens |= {"token_id": rollouts["response_ids"].numpy(), "mask": rollouts["mask"].bool().numpy()}
        if bool(((versions != versions[:, :1]) & (rollouts["mask"] > 0)).any()):
            tokens["sampler_version"] = versions.numpy()
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

    def state(self) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
        ahead, tensors = kept(self.batches.finished(), "ahead")
        state = {
            "kl_coef": self.kl_coef,
            "moments": self.shaping.moments.state(),
            "prompts_used": self.batches.prompts_used,
            "reported": sorted(self.reported),
            "ahead": ahead,
        }
        now = self.unfinished
        if now is None:
            return state, tensors
        rollouts, columns = kept([now.rollouts], "now")
        return state | {"rollouts": rollouts, "metrics": now.metrics, "updates": now.updates}, tensors | columns

    def load_state(self, checkpoint: Checkpoint) -> None:
        state, tensors = checkpoint.state, checkpoint.tensors
        self.kl_coef, self.batches.prompts_used = state["kl_coef"], state["prompts_used"]
        self.shaping.moments = RunningMoments(**state["moments"])
        self.reported.update(state["reported"])
        self.batches.restore(restored(state["ahead"], tensors, "ahead"))
        if "rollouts" in state:
            (rollouts,) = restored(state["rollouts"], tensors, "now")
            assert rollouts is not None
            self.unfinished = Unfinished(rollouts, state["metrics"], state["updates"])

    def describe(self) -> dict[str, Any]:
        prompts, sampler = self.batches.collector.prompts, self.batches.collector.sampler
        return {
            "eos_token_ids": sampler.eos.tolist(),
            "prompts": {"count": len(prompts), "dropped": list(prompts.dropped)},
        }

    def notes(self) -> list[str]:
        return self.remarks

    def close(self) -> None:
        self.batches.close()


def _seed_everything(seed: int, step: int, rank: int) -> None:
    """Seed the global generators, which a user's reward may use, so that a resumed run draws the same numbers."""
    number = int(generator(seed, Purpose.GLOBAL, step, rank).integers(2**32))
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
