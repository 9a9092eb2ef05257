"""TRL's trainers on given data: no shuffling, no dropout, a constant learning rate; what they return is every loss.

`folder` holds the model and its tokenizer; AdamW, its betas, ε, no weight decay and the gradient norm of 1 are the
defaults of both sides.
"""

import os
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

Row = dict[str, str]
Pair = dict[str, Any]
Tokens = Sequence[Sequence[int]]


def sft(folder: str, rows: Sequence[Row], batch_size: int, learning_rate: float, **more: Any) -> list[float]:
    """Rows of `prompt` and `completion`, in their order."""
    config = SFTConfig(**{**_common(folder, len(rows) // batch_size, batch_size, learning_rate), **more})
    return _losses(
        SFTTrainer(_causal(folder), config, train_dataset=_dataset(rows), processing_class=_tokenizer(folder))
    )


def reward(folder: str, rows: Sequence[Pair], batch_size: int, learning_rate: float, **more: Any) -> list[float]:
    """Rows of `chosen_ids` and `rejected_ids`, in their order; the model is a sequence classifier.

    As texts they would get an end token each.
    """
    config = RewardConfig(**{**_common(folder, len(rows) // batch_size, batch_size, learning_rate), **more})
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    return _losses(RewardTrainer(model, args=config, train_dataset=_dataset(rows), processing_class=_tokenizer(folder)))


def dpo(folder: str, rows: Sequence[Row], batch_size: int, learning_rate: float, **more: Any) -> list[float]:
    """Rows of `prompt`, `chosen` and `rejected`, in their order."""
    return _with_reference(DPOTrainer, DPOConfig, folder, rows, batch_size, learning_rate, **more)


def kto(folder: str, rows: Sequence[Pair], batch_size: int, learning_rate: float, **more: Any) -> list[float]:
    """Rows of `prompt`, `completion` and `label`, in their order."""
    return _with_reference(KTOTrainer, KTOConfig, folder, rows, batch_size, learning_rate, **more)


def cpo(folder: str, rows: Sequence[Row], batch_size: int, learning_rate: float, **more: Any) -> list[float]:
    """Rows of `prompt`, `chosen` and `rejected`, in their order."""
    return _without_reference(CPOTrainer, CPOConfig, folder, rows, batch_size, learning_rate, **more)


def orpo(folder: str, rows: Sequence[Row], batch_size: int, learning_rate: float, **more: Any) -> list[float]:
    """Rows of `prompt`, `chosen` and `rejected`, in their order."""
    return _without_reference(ORPOTrainer, ORPOConfig, folder, rows, batch_size, learning_rate, **more)


def odds_ratio_losses(chosen: torch.Tensor, rejected: torch.Tensor, beta: float) -> torch.Tensor:
    """ORPO's loss without its likelihood: what both trainers add to it is not the same."""
    trainer = SimpleNamespace(beta=beta, accelerator=SimpleNamespace(device="cpu"))
    losses: torch.Tensor = ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)[0]
    return -losses


def _with_reference(trainer: Any, config: Any, folder: str, *rest: Any, **more: Any) -> list[float]:
    return _without_reference(partial(trainer, ref_model=_causal(folder)), config, folder, *rest, **more)


def _without_reference(
    trainer: Any, config: Any, folder: str, rows: Sequence[Row], batch_size: int, learning_rate: float, **more: Any
) -> list[float]:
    args = config(**{**_common(folder, len(rows) // batch_size, batch_size, learning_rate), **more})
    return _losses(
        trainer(_causal(folder), args=args, train_dataset=_dataset(rows), processing_class=_tokenizer(folder))
    )


def grpo(
    folder: str,
    prompts: Sequence[str],
    responses: Sequence[Tokens],
    rewards: Sequence[Sequence[float]],
    learning_rate: float,
    **more: Any,
) -> list[float]:
    """Given responses instead of sampled ones, so that both sides learn from the same.

    Args:
        folder: of the model.
        prompts: of all steps, each once; as many per step as there are groups.
        responses: [steps][responses of the step] token ids; those to one prompt are neighbours.
        rewards: [steps][responses of the step].
        learning_rate: constant.
        more: settings, among them `num_generations`; with `num_iterations` over 1 a step's responses serve for so
            many optimiser steps, and there are as many losses.
    """
    iterations = int(more.get("num_iterations", 1))
    at_once = len(responses[0])
    tokenizer = _tokenizer(folder)
    given = iter(zip(responses, rewards, strict=True))
    seen: list[Sequence[float]] = []

    def rollout(texts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        ids, earned = next(given)
        seen.append(earned)
        logprobs = [[0.0] * len(row) for row in ids]  # of the sampler; nobody asks for them without vLLM
        prompt_ids = [tokenizer(text)["input_ids"] for text in texts]
        return {"prompt_ids": prompt_ids, "completion_ids": [list(row) for row in ids], "logprobs": logprobs}

    def reward(completions: list[str], **_: Any) -> list[float]:
        return list(seen[-1])

    common = _common(folder, len(responses) * iterations, at_once, learning_rate)
    config = GRPOConfig(**common, shuffle_dataset=False, **more)
    return _losses(
        GRPOTrainer(
            _causal(folder),
            reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": list(prompts)}),
            processing_class=tokenizer,
            rollout_func=rollout,
        )
    )


def rloo(
    folder: str,
    prompts: Sequence[str],
    responses: Sequence[Tokens],
    rewards: Sequence[Sequence[float]],
    learning_rate: float,
    **more: Any,
) -> list[float]:
    """Given responses, as for `grpo`."""
    given = iter(zip(responses, rewards, strict=True))
    seen: list[Sequence[float]] = []

    class Trainer(RLOOTrainer):  # type: ignore[misc]
        def _generate_single_turn(self, *_: Any) -> list[list[int]]:
            ids, earned = next(given)
            seen.append(earned)
            return [list(row) for row in ids]

    def reward(completions: list[str], **_: Any) -> list[float]:
        return list(seen[-1])

    steps = len(responses) * int(more.get("num_iterations", 1))
    config = RLOOConfig(**_common(folder, steps, len(responses[0]), learning_rate), shuffle_dataset=False, **more)
    dataset = Dataset.from_dict({"prompt": list(prompts)})
    return _losses(Trainer(_causal(folder), reward, config, train_dataset=dataset, processing_class=_tokenizer(folder)))


def _common(folder: str, steps: int, batch_size: int, learning_rate: float) -> dict[str, Any]:
    return {
        "output_dir": f"{folder}-trl",
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "max_steps": steps,
        "per_device_train_batch_size": batch_size,
        "learning_rate": learning_rate,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "train_sampling_strategy": "sequential",
    }


def _losses(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _dataset(rows: Sequence[dict[str, Any]]) -> Dataset:
    return Dataset.from_list([dict(row) for row in rows])


def _causal(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _tokenizer(folder: str) -> Any:
    return AutoTokenizer.from_pretrained(folder)
