"""The three records of a run: fully, as a person would in ten lines, and text and reward only."""

from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

import cavesson
from benchmarks.faults.small.tasks import Task
from benchmarks.faults.small.trainers.model import EOS
from cavesson.record import write_run, write_vocabulary

WAYS = FULL, USUAL, TEXT = ("full", "usual", "text")
METRICS = {
    "group_relative": {
        "clip_frac": "policy/clip_fraction", "policy_kl": "policy/approx_kl", "grad_norm": "optim/grad_norm",
        "first_ratio_error": "policy/first_ratio_error",
    },
    "reinforce": {"gnorm": "optim/grad_norm", "first_ratio_error": "policy/first_ratio_error"},
    "actor_critic": {
        "clipfrac": "policy/clip_fraction", "approx_kl": "policy/approx_kl", "pi_norm": "optim/grad_norm",
        "v_loss": "loss/value", "ratio": "policy/ratio", "first_ratio_error": "policy/first_ratio_error",
    },
}  # fmt: skip
"""The metrics of a trainer that have the same meaning in Cavesson → their names there."""
ALGORITHMS = {"group_relative": "grpo", "reinforce": "rloo", "actor_critic": "ppo"}
PENALTIES = {"group_relative": "beta", "reinforce": "kl_weight", "actor_critic": "kl_coef"}
PLACES = {"group_relative": ("loss", "k3"), "reinforce": ("reward", "k1"), "actor_critic": ("reward", "k1")}
NOT_USUAL = ("first_ratio_error", "ratio_error")
"""Metrics that few people log."""


class Recordings:
    """Records a run three times, as a context manager.

    Args:
        folder: Of the three runs.
        task: The task.
        trainer: Name of the trainer.
        settings: Of the trainer.
        first_step: Number of the first step.
    """

    def __init__(self, folder: Path, task: Task, trainer: str, settings: Any, first_step: int = 0) -> None:
        self.trainer, self.first_step = trainer, first_step
        self.penalty = getattr(settings, PENALTIES[trainer])
        place, estimator = PLACES[trainer]
        info = {"config": vars(settings), "algorithm": ALGORITHMS[trainer], "eos_token_ids": [EOS], "dtype": "float32"}
        if self.penalty:
            info["kl"] = {"place": place, "estimator": estimator}
        write_run(folder / FULL, info)
        for way in (FULL, USUAL):
            write_vocabulary(folder / way, task.texts, [text + task.between for text in task.texts])
        self.recorders = {way: cavesson.Recorder(folder / way) for way in WAYS}

    def __enter__(self) -> "Recordings":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for recorder in self.recorders.values():
            recorder.close()

    def __call__(self, step: int, metrics: dict[str, float], **batch: Any) -> None:
        """Record a step."""
        step += self.first_step
        batch = {name: value.detach().numpy() if isinstance(value, Tensor) else value for name, value in batch.items()}
        text = {"prompt": batch["prompts"], "response": batch["texts"], "reward": batch["rewards"]}
        self.recorders[TEXT].rollouts(step, text)
        self._record_usual(step, metrics, text, batch)
        self._record_fully(step, metrics, text, batch)

    def _record_usual(self, step: int, metrics: dict[str, float], text: dict[str, Any], batch: dict[str, Any]) -> None:
        tokens = {"attended": batch["mask"], "token_id": batch["answers"], "logprob": batch["logprobs"]}
        tokens |= {"ref_logprob": batch["ref_logprobs"], "advantage": batch["advantages"]}
        self.recorders[USUAL].rollouts(step, text, tokens)
        self.recorders[USUAL].metrics(step, {name: one for name, one in metrics.items() if name not in NOT_USUAL})

    def _record_fully(self, step: int, metrics: dict[str, float], text: dict[str, Any], batch: dict[str, Any]) -> None:
        mask = batch["mask"]
        ended = (batch["answers"] == EOS).any(1)
        rows = text | {
            "group": [1000 * step + place for place in batch["groups"]],
            "prompt_ids": [ids[seen].tolist() for ids, seen in zip(batch["prompt_ids"], batch["prompt_attended"],
                                                                   strict=True)],
            "finish_reason": ["eos" if one else "length" for one in ended],
            "policy_version": [self.first_step + batch["version"]] * len(mask),
            "kl_coef": [self.penalty] * len(mask),
        }  # fmt: skip
        tokens = {"attended": mask, "token_id": batch["answers"]}
        for plural, name in (
            ("logprobs", "logprob"), ("ref_logprobs", "ref_logprob"), ("sampler_logprobs", "sampler_logprob"),
            ("entropies", "entropy"), ("advantages", "advantage"), ("values", "value"), ("returns", "return"),
            ("token_rewards", "token_reward"),
        ):  # fmt: skip
            if plural in batch:
                tokens[name] = batch[plural]
        self.recorders[FULL].rollouts(step, rows, tokens)
        known = METRICS[self.trainer]
        self.recorders[FULL].metrics(step, {known.get(name, name): one for name, one in metrics.items()})
