"""The training loop of algorithms that learn from sampled responses, in the order of the data flow."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cavesson.algorithms.base import RolloutAlgorithm
from cavesson.algorithms.runs import RolloutRun
from cavesson.data.order import Stream
from cavesson.errors import SignalledError, UserCodeError
from cavesson.models.policy import Policy, Scores
from cavesson.models.trained import save_trained
from cavesson.ops.kl import adapted_coefficient
from cavesson.randomness import Purpose, generator
from cavesson.rewards.shaping import RunningMoments, Shaping
from cavesson.train.checkpoint import Checkpoint
from cavesson.train.doctor import Attendance
from cavesson.train.finite import check_finite
from cavesson.train.loop import Trainer
from cavesson.train.metrics import Clock, rollout_metrics, value_metrics
from cavesson.train.optimizer import learning_rate
from cavesson.train.rollouts import Collector, Rows, joined, score_rollouts
from cavesson.train.update import Metrics, Place, averaged, micro_batches, mini_batches, update
from cavesson.types import Batch

TOKEN_COLUMNS = (
    "logprob", "ref_logprob", "sampler_logprob", "value", "token_reward", "advantage", "return", "entropy"
)  # fmt: skip


@dataclass
class Round:
    """The credited rollouts of one step, and the progress of training on them."""

    batch: Batch
    rows: Rows
    metrics: Metrics
    """of the rollouts"""
    updates: list[Metrics]
    """of the mini-batches that are done"""
    first: Scores | None = None
    """scores with their graph, see `update`"""


@dataclass
class RolloutTrainer(Trainer):
    """Samples, rewards, scores and credits responses, records them, and updates the policy."""

    settings: RolloutRun
    algorithm: RolloutAlgorithm
    policy: Policy
    collector: Collector
    order: Stream[int]
    """of the prompts, by their indices"""
    shaping: Shaping
    kl_coef: float
    folder: Path
    prompts_used: int = 0
    """so far in their order"""
    unfinished: Round | None = field(default=None)
    """the round that was being trained on when the run was killed"""
    told: set[str] = field(default_factory=set)
    """rules of the doctor whose findings were told"""
    doctor: Attendance | None = None
    """on the main process, where the settings have the doctor look"""

    @property
    def model(self) -> Any:
        return self.policy.model

    def step(self, step: int) -> Metrics:
        """Sample, reward, score, credit, record and update."""
        clock = Clock()
        round_ = self.unfinished or self._collected(step, clock)
        self.unfinished = None
        with clock("record"):
            self._record(step, round_)
            check_finite(step, round_.batch.columns, round_.batch["mask"])
        with clock("update"):
            self._update(step, round_)
        metrics = round_.metrics | averaged(round_.updates)
        if "kl/objective" in metrics:
            self._adapt(metrics["kl/objective"], len(round_.batch))
        metrics |= value_metrics(metrics, round_.updates)
        return metrics | clock.metrics(tokens=float(round_.batch["mask"].sum()))

    def prepare(self, folder: Path) -> None:
        if self.learner.processes.is_main and self.settings.doctor.looks:
            self.doctor = Attendance(self.settings.doctor, folder, self.told)

    def reason_to_stop(self) -> str | None:
        reason = self.doctor.reason_to_stop(self.next_step) if self.doctor else None
        return self.learner.processes.of_main(reason) if self.settings.doctor.stops else None

    def finish(self, folder: Path) -> Metrics:
        if self.learner.processes.is_main:
            save_trained(folder / "model", self.model, self.tokenizer, self.settings.model)
        return {}

    def state(self) -> dict[str, Any]:
        return {
            "kl_coef": self.kl_coef,
            "moments": self.shaping.moments.state(),
            "prompts_used": self.prompts_used,
            "told": sorted(self.told),
        }

    def load_state(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        self.kl_coef, self.prompts_used = state["kl_coef"], state["prompts_used"]
        self.shaping.moments = RunningMoments(**state["moments"])
        self.told = set(state["told"])
        if checkpoint.tensors:
            batch = Batch(checkpoint.tensors)
            self.unfinished = Round(batch, state["rows"], state["metrics"], state["updates"])

    def describe(self) -> dict[str, Any]:
        prompts, sampler = self.collector.prompts, self.collector.sampler
        return {
            "eos_token_ids": sampler.eos.tolist(),
            "prompts": {"count": len(prompts), "dropped": list(prompts.dropped)},
        }

    def notes(self) -> list[str]:
        notes = list(self.collector.prompts.notes)
        dropped = self.collector.prompts.dropped
        if dropped:
            rows = ", ".join(str(row + 1) for row in dropped[:10]) + (", …" if len(dropped) > 10 else "")
            count = len(dropped) + len(self.collector.prompts)
            notes.append(f"{len(dropped)} of {count} prompts are over data.max_prompt_tokens and dropped: rows {rows}")
        weakness = self.settings.kl_use.weakness
        if self.settings.kl.coef and weakness:
            notes.append(weakness)
        filters = self.settings.sampling.filters
        if filters:
            notes.append(f"sampling is filtered ({', '.join(filters)}): KL is measured wrongly and may become negative")
        return notes

    def _collected(self, step: int, clock: Clock) -> Round:
        """Collect the rollouts of a step; if a reward fails, save the steps before this one in a checkpoint."""
        used = self.prompts_used
        try:
            return self._collect(step, clock)
        except UserCodeError:
            self.prompts_used = used
            # Other processes may not have failed, and waiting for them in `save` would never end.
            if step and self.learner.processes.count == 1:
                self.save(self.folder)
            raise

    def _collect(self, step: int, clock: Clock) -> Round:
        """Sample until there are enough rollouts to learn from, or the limit is reached; score and credit them."""
        _seed_everything(self.settings.seed, step, self.learner.processes.rank)
        batches, rows = [], []
        for sampled in range(self.algorithm.most_batches):
            batch, more = self._sample(step, sampled, clock)
            batches.append(batch)
            rows.append(more)
            learned = self._informative(rows)
            if int(learned.sum()) == self.settings.batch_size:
                break
        if not bool(learned.any()):
            learned[: self.settings.batch_size] = True
        batch, all_rows = joined(batches, rows)
        with clock("score"):
            batch, first = self._score(step, batch, learned)
        with clock("credit"):
            batch, all_rows = self._shape(batch.with_columns(learned=learned), all_rows)
            batch = self.algorithm.credit(batch, self.kl_coef)
        metrics = rollout_metrics(batch, all_rows, self.kl_coef, self.settings.penalty) | self.algorithm.metrics(batch)
        # The graph covers the rows chosen before scoring; `credit` may have reduced them, which makes it unusable.
        return Round(batch, all_rows, metrics, [], first if torch.equal(batch["learned"], learned) else None)

    def _informative(self, rows: list[Rows]) -> Tensor:
        """Return the first responses that can be learned from, up to one batch: `[B]` bool."""
        rewards, group = (torch.tensor([v for part in rows for v in part[name]]) for name in ("reward", "group_id"))
        informative = self.algorithm.informative(rewards, group)
        return informative & (informative.cumsum(0) <= self.settings.batch_size)

    def _sample(self, step: int, sampled: int, clock: Clock) -> tuple[Batch, Rows]:
        settings, processes = self.settings, self.learner.processes
        share = processes.share(settings.batch_size)
        numbers = range(sampled * settings.batch_size + share.start, sampled * settings.batch_size + share.stop)
        with clock("generate"):
            temperature = settings.sampling_temperature(step)
            batch, rows = self.collector.sample(self._prompts(share), step, numbers, temperature)
        with clock("reward"):
            rows = self.collector.reward(rows, settings.shaping.subtract_query)
        groups = [number // settings.samples_per_prompt for number in numbers]
        return processes.gather(batch, rows | {"group_id": groups})

    def _score(self, step: int, batch: Batch, learned: Tensor) -> tuple[Batch, Scores | None]:
        """Score all rollouts, in the same micro-batches as in the first epoch of the update.

        Matrix products of other sizes round differently, in bfloat16 by a hundredth of a nat per token. Ratios would
        then differ from 1 before the first update.
        """
        processes, update = self.learner.processes, self.settings.update
        rows, rest = learned.nonzero().squeeze(1), (~learned).nonzero().squeeze(1)
        passes = [rows[mini] for mini in mini_batches(len(rows), update, self._place(step), 0)]
        batches = [*passes, *rest.split(self.settings.batch_size)]
        parts = [some[part] for some in batches for part in micro_batches(len(some), update, processes)]
        # If the update needs only this forward pass, keep its graph for the update.
        is_only_pass = update.epochs == len(passes) == len(micro_batches(len(rows), update, processes)) == 1
        return score_rollouts(self.policy, batch, self.settings.penalty, parts, processes, is_only_pass)

    def _prompts(self, share: range) -> list[int]:
        per_prompt = self.settings.samples_per_prompt
        count = self.settings.batch_size // per_prompt
        prompts = self.order.take(self.prompts_used, count)
        self.prompts_used += count
        return [prompts[row // per_prompt] for row in share]

    def _shape(self, batch: Batch, rows: Rows) -> tuple[Batch, Rows]:
        ended = [reason != "length" for reason in rows["finish_reason"]]
        kept = {name: values for name, values in rows.items() if name not in ("query_reward", "group_id", "discarded")}
        shaped = self.shaping(rows["reward"], rows.get("query_reward"), ended)
        columns = {"shaped_reward": torch.tensor(shaped), "reward": torch.tensor(rows["reward"])}
        columns |= {"ended": torch.tensor(ended).float(), "discarded": torch.tensor(rows["discarded"])}
        columns |= {"group": torch.tensor(rows["group_id"]), "kl_coef": torch.full((len(batch),), self.kl_coef)}
        return batch.with_columns(**columns), kept | {"shaped_reward": shaped}

    def _record(self, step: int, round_: Round) -> None:
        if self.recorder is None:
            return
        batch = round_.batch
        constant = {"split": "train", "policy_version": step, "kl_coef": self.kl_coef}
        columns = round_.rows | {name: [value] * len(batch) for name, value in constant.items()}
        tokens = {name: batch[name].numpy() for name in TOKEN_COLUMNS if name in batch}
        tokens |= {"token_id": batch["response_ids"].numpy(), "mask": batch["mask"].bool().numpy()}
        self.recorder.rollouts(step, columns, tokens)
        self.algorithm.leave(self.folder, step, round_.rows, batch)

    def _update(self, step: int, round_: Round) -> None:
        settings = self.settings
        every = settings.checkpoint.updates
        total = settings.update.epochs * settings.update.mini_batches
        learned = round_.batch.take(round_.batch["learned"].nonzero().squeeze(1))

        def save_inside(done: list[Metrics]) -> None:
            signal = self.signal()
            if len(done) < total and (signal or (every and len(done) % every == 0)):
                inside = {"rows": round_.rows, "metrics": round_.metrics, "updates": done}
                # An algorithm may use one tensor under two names, which safetensors does not allow.
                tensors = {name: column.clone() for name, column in round_.batch.columns.items()}
                self.save(self.folder, tensors, **inside)
            if signal and len(done) < total:
                place = f"in step {step}, after {len(done)} of its {total} updates"
                raise SignalledError(f"interrupted {place}; the checkpoint is complete", signal)

        place = self._place(step)
        round_.updates = update(
            self.learner, learned, settings.update, place, first=round_.first, done=round_.updates, after=save_inside
        )
        round_.metrics["optim/learning_rate"] = place.learning_rate
        round_.metrics["optim/mini_batches"] = float(len(round_.updates))

    def _place(self, step: int) -> Place:
        return Place(self.settings.seed, step, learning_rate(self.settings.optimizer, step, self.steps))

    def _adapt(self, kl: float, samples: int) -> None:
        target = self.settings.kl.target
        if target is not None:
            self.kl_coef = adapted_coefficient(self.kl_coef, kl, target, self.settings.kl.horizon, samples)


def _seed_everything(seed: int, step: int, rank: int) -> None:
    """Seed the global generators, which a user's reward may use, so that a resumed run draws the same numbers."""
    number = int(generator(seed, Purpose.GLOBAL, step, rank).integers(2**32))
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
