"""What the two tasks have in common: a policy, prompts, a reward, and settings under which a run is healthy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GROUP = 8
"""Responses per prompt of GRPO and RLOO."""


@dataclass(frozen=True)
class World:
    """A task."""

    policy: Path
    """Folder of the model that is trained, with its tokenizer."""
    prompts: Sequence[str]
    held_out: Sequence[str]
    """Prompts of which TRL's PPO shows responses while it trains."""
    mark: str
    """Ends every prompt and occurs nowhere else in it, so that a text can be split again."""
    reward: Callable[[Sequence[str], Sequence[str]], list[float]]
    limit: int
    """Tokens of a response at most."""
    batch: int
    """Responses per step."""
    steps: int
    learning_rate: Mapping[str, float]
    """Trainer → one that works."""
    sign: str
    """What few responses contain at first."""
    letters: int
    """Letters of a token, about."""

    def settings(self, trainer: str) -> dict[str, Any]:
        """Return the settings of a healthy run, under TRL's names."""
        common = {
            "learning_rate": self.learning_rate[trainer],
            "per_device_train_batch_size": self.batch,
            "gradient_accumulation_steps": 1,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
        }
        return common | (self._ppo() if trainer == "ppo" else self._grouped())

    def _ppo(self) -> dict[str, Any]:
        return {
            "per_device_train_batch_size": self.batch // 2,
            "num_mini_batches": 2,
            "gradient_accumulation_steps": 2,
            "num_ppo_epochs": 2,
            "local_rollout_forward_batch_size": self.batch,
            "per_device_eval_batch_size": len(self.held_out),
            "num_sample_generations": self.steps,
            "total_episodes": self.batch * self.steps,
            "response_length": self.limit,
            "temperature": 1.0,
            "stop_token": "eos",
            "missing_eos_penalty": 1.0,
            "kl_coef": 0.05,
            "gamma": 1.0,
            "lam": 0.95,
        }

    def _grouped(self) -> dict[str, Any]:
        return {
            "max_steps": self.steps,
            "num_generations": GROUP,
            "max_completion_length": self.limit,
            "temperature": 1.0,
            "beta": 0.05,
            "log_completions": True,
            "gradient_checkpointing": False,
        }
