"""Builds TRL's trainers for a plan."""

import os

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    TrainerCallback,
)

from benchmarks.faults.others.plan import Plan

CRITIC = 5
"""PPO's critic learns so many times faster than the policy: it has to learn the reward within a few steps."""


def built(plan: Plan, folder: Path, seed: int) -> Any:
    """Return the trainer; what it writes itself goes to ``folder``."""
    tokenizer = AutoTokenizer.from_pretrained(plan.world.policy, padding_side="left")
    settings = plan.settings | {"output_dir": str(folder), "seed": seed}
    start = seed * 1000  # other prompts for each seed
    prompts = [*plan.prompts[start:], *plan.prompts[:start]]
    trainer = (_ppo if plan.trainer == "ppo" else _grouped)(plan, settings, tokenizer, prompts)
    trainer.add_callback(_Stepped(plan, trainer))
    plan.object = trainer
    return trainer


def _policy(plan: Plan) -> Any:
    return AutoModelForCausalLM.from_pretrained(plan.world.policy, dtype=torch.float32)


def _ppo(plan: Plan, settings: dict[str, Any], tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> Any:
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    def encoded(texts: Sequence[str]) -> Dataset:
        return Dataset.from_dict({"input_ids": tokenizer(list(texts), add_special_tokens=False)["input_ids"]})

    critic = AutoModelForSequenceClassification.from_pretrained(
        plan.world.policy, dtype=torch.float32, num_labels=1, pad_token_id=tokenizer.pad_token_id
    )
    torch.nn.init.zeros_(critic.score.weight)  # rewards are about 0 at first, and so is the critic
    policy, rate = _policy(plan), settings["learning_rate"]
    groups = [(policy.parameters(), rate), (critic.parameters(), CRITIC * rate)]
    return PPOTrainer(
        args=PPOConfig(**settings),
        processing_class=tokenizer,
        model=policy,
        ref_model=_policy(plan),
        reward_model=Scorer(plan, tokenizer),
        value_model=critic,
        train_dataset=encoded(prompts),
        eval_dataset=encoded(plan.world.held_out),
        optimizers=(torch.optim.AdamW([{"params": ps, "lr": lr} for ps, lr in groups], weight_decay=0.0), None),
    )


def _grouped(plan: Plan, settings: dict[str, Any], tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> Any:
    import trl

    def task_reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return plan.reward(prompts, completions)

    name = plan.trainer.upper()
    return getattr(trl, f"{name}Trainer")(
        model=_policy(plan),  # the reference is loaded from where it came from
        reward_funcs=task_reward,
        args=getattr(trl, f"{name}Config")(**settings),
        train_dataset=Dataset.from_dict({"prompt": list(prompts)}),
        processing_class=tokenizer,
    )


class Scorer(torch.nn.Module):
    """A reward model for PPO that reads texts: its hidden state is the reward, and its head passes that on."""

    base_model_prefix = "backbone"

    def __init__(self, plan: Plan, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self._plan, self._tokenizer = plan, tokenizer
        self.score = torch.nn.Identity()

    def backbone(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> SimpleNamespace:
        """Return the reward of each text at all of its positions."""
        texts = [self._tokenizer.decode(row[mask.bool()]) for row, mask in zip(input_ids, attention_mask, strict=True)]
        mark, end = self._plan.world.mark, self._tokenizer.eos_token
        parts = [text.partition(mark) for text in texts]
        rewards = self._plan.reward([before + mark for before, _, _ in parts], [r.split(end)[0] for *_, r in parts])
        column = torch.tensor(rewards, dtype=torch.float32)[:, None, None]
        return SimpleNamespace(hidden_states=(column.expand(*input_ids.shape, 1),))


class _Stepped(TrainerCallback):
    def __init__(self, plan: Plan, trainer: Any) -> None:
        self._plan, self._trainer = plan, trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for action in self._plan.stepped:
            action(self._trainer)
