"""One training step of the algorithms that learn from sampled responses, in the order of the data flow."""

import random
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
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
from cavesson.train.batches import Batches
from cavesson.train.checkpoint import Checkpoint
from cavesson.train.kept import KeptBatches
from cavesson.train.loop import Trainer
from cavesson.train.metrics import rollout_metrics, staleness_metrics, value_metrics
from cavesson.train.optimizer import learning_rate
from cavesson.train.rollouts import score_rollouts
from cavesson.train.update import Learned, Metrics, StepInfo, averaged, check_finite, mini_batches, update
from cavesson.types import Rollouts

TOKEN_COLUMNS = (
    "logprob", "ref_logprob", "sampler_logprob", "value", "token_reward", "advantage", "return", "entropy"
)  # fmt: skip


@dataclass
class Unfinished:
    """A step whose rollouts are credited, and the optimiser steps that are done on them."""

    rollouts: Rollouts
    """those of this process"""
    metrics: Metrics
    """of the rollouts of all processes"""
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
        clock, processes = self.clock(step), self.learner.processes
        info = StepInfo(self.seed, step, learning_rate(self.learner.optimizer.settings, step, self.steps))
        scores = None
        if self.unfinished is None:
            _seed_everything(self.seed, step, processes.rank)
            parts: list[Rollouts] = []
            learned = torch.zeros(0, dtype=torch.bool)
            while len(parts) < self.algorithm.max_batches and processes.sum_tensor(learned.sum()) < self.batch_size:
                parts.append(self.batches.take(step, len(parts), clock))
                learned = self._learned(parts)
            rollouts = Rollouts.joined(parts).with_columns(learned=learned)
            with clock("score"):
                columns, scores = self._score(rollouts, info)
                rollouts = rollouts.with_columns(**columns)
            with clock("credit"):
                rollouts = self._shape(rollouts)
                rollouts = replace(rollouts, batch=self.algorithm.credit(rollouts.batch, self.kl_coef, processes))
                metrics = rollout_metrics(rollouts, self.kl_coef, self.kl_estimator, processes)
                metrics |= self.algorithm.metrics(rollouts.batch, processes)
                metrics |= staleness_metrics(rollouts, step, processes)
            # The graph covers the rows chosen before scoring; `credit` may have reduced them, which makes it unusable.
            scores = None if processes.sum_tensor((rollouts["learned"] != learned).sum()) else scores
            self.batches.used(len(parts))
            self.unfinished = Unfinished(rollouts, metrics)
        now = self.unfinished
        with clock("record"):
            self._record(step, now.rollouts)
            processes.agreed(lambda: check_finite(step, now.rollouts.batch.columns, now.rollouts["mask"]))
        with clock("update"):
            batch, chosen, done = now.rollouts.batch, self._chosen(now.rollouts), tuple(now.updates)
            for seen in update(self.learner, batch, chosen, self.updates, info, scores=scores, done=done):
                now.updates.append(seen)
                if len(now.updates) < self.updates.total:
                    self.between_updates(len(now.updates), self.updates.total)
        self.unfinished = None
        return self._adapted(now, info) | clock.metrics(float(processes.sum_tensor(now.rollouts["mask"].sum())))

    def _learned(self, parts: list[Rollouts]) -> Tensor:
        """Return which responses so far to learn from, over all processes at most one batch: `[b]` bool.

        If the algorithm can learn from none of them, these are the first batch.
        """

        def chosen(rewards: Tensor, group: Tensor, sample: Tensor) -> Tensor:
            order = sample.argsort()
            informative = self.algorithm.informative(rewards[order], group[order])
            if len(parts) == self.algorithm.max_batches and not bool(informative.any()):
                informative = torch.ones_like(informative)
            return (informative & (informative.cumsum(0) <= self.batch_size))[order.argsort()]

        rewards, group = (torch.cat([part[name] for part in parts]) for name in ("reward", "group_in_step"))
        sample = torch.tensor([sample for part in parts for sample in part.sample])
        return self.learner.processes.over_all(chosen, rewards, group, sample)

    def _chosen(self, rollouts: Rollouts) -> Learned:
        """Return which rollouts to learn from, with their places among those of all processes."""

        def place(learned: Tensor, sample: Tensor) -> Tensor:
            order = sample.argsort()
            return (learned[order].cumsum(0) - 1)[order.argsort()]

        processes, learned = self.learner.processes, rollouts["learned"]
        rows = learned.nonzero().squeeze(1)
        places = processes.over_all(place, learned, torch.tensor(rollouts.sample))
        return Learned(rows, places[rows], int(processes.sum_tensor(learned.sum())))

    def _score(self, rollouts: Rollouts, info: StepInfo) -> tuple[dict[str, Tensor], Scores | None]:
        """Score all rollouts, in the same micro-batches as in the first epoch of the update.

        Matrix products of other sizes round differently, in bfloat16 by a hundredth of a nat per token. Ratios would
        then differ from 1 before the first update.
        """
        processes, at_once = self.learner.processes, self.updates.micro_batch_size
        passes = mini_batches(self._chosen(rollouts), self.updates, info, 0)
        parts = [processes.micro_batches(rows, at_once) for rows in passes]
        # If the update needs only this forward pass, keep its graph for the update.
        is_only_pass = self.updates.epochs == len(passes) == len(parts[0]) == 1
        rest = (~rollouts["learned"]).nonzero().squeeze(1).tolist()
        parts.append(processes.micro_batches(rest, at_once or len(processes.share(self.batch_size))))
        return score_rollouts(
            self.policy, rollouts.batch, self.kl_estimator, list(chain.from_iterable(parts)), is_only_pass
        )

    def _shape(self, rollouts: Rollouts) -> Rollouts:
        """Add `shaped_reward` `[b]` float64, the reward that training uses, and `kl_coef` `[b]`, β in force."""

        def shaped(rewards: Tensor, ended: Tensor, *query: Tensor) -> Tensor:
            queries = query[0].tolist() if query else None
            return torch.tensor(self.shaping(rewards.tolist(), queries, ended.tolist()), dtype=torch.float64)

        names = ["reward", "ended", *(["query_reward"] if "query_reward" in rollouts.batch else [])]
        rewards = self.learner.processes.over_all(shaped, *(rollouts[name] for name in names))
        return rollouts.with_columns(shaped_reward=rewards, kl_coef=torch.full((len(rollouts),), self.kl_coef))

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
        self.learner.processes.agreed(partial(self.recorder.rollouts, step, rows, tokens))
        self.algorithm.write(self.folder, step, rollouts, self.learner.processes)

    def _adapted(self, done: Unfinished, info: StepInfo) -> Metrics:
        """Adapt β to the KL of a finished step, and return the step's metrics."""
        metrics = done.metrics | averaged(done.updates)
        metrics["optim/learning_rate"] = info.learning_rate
        metrics["optim/mini_batches"] = float(len(done.updates))
        if "kl/objective" in metrics and self.kl.target is not None:
            responses = int(self.learner.processes.sum_tensor(torch.tensor(len(done.rollouts))))
            self.kl_coef = adapted_coefficient(
                self.kl_coef, metrics["kl/objective"], self.kl.target, self.kl.horizon, responses
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

    def state(self) -> tuple[dict[str, Any], KeptBatches]:
        batches = {"ahead": self.batches.finished()}
        state: dict[str, Any] = {
            "kl_coef": self.kl_coef,
            "moments": self.shaping.moments.state(),
            "prompts_used": self.batches.prompts_used,
            "reported": sorted(self.reported),
        }
        now = self.unfinished
        if now is None:
            return state, batches
        return state | {"metrics": now.metrics, "updates": now.updates}, batches | {"now": [now.rollouts]}

    def load_state(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        self.kl_coef, self.batches.prompts_used = state["kl_coef"], state["prompts_used"]
        self.shaping.moments = RunningMoments(**state["moments"])
        self.reported.update(state["reported"])
        mine = {
            name: [None if one is None else self.batches.own(one) for one in whole]
            for name, whole in checkpoint.batches.items()
        }
        self.batches.restore(mine.get("ahead", []))
        for rollouts in mine.get("now", ()):
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
