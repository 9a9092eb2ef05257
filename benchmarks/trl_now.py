"""TRL 1.16 on the work of work.py and example_work.py: SFT, reward model and GRPO, all weights trained, float32.

SFT and the reward model learn from two examples at a time, as ours do, and TRL pads them to the longer one. TRL
computes activations again in the backward pass unless told otherwise; `--mode …-kept` keeps them, which is faster and
takes more memory.
"""

from argparse import Namespace
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import example_work
import torch
import work
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

GROUP = 8


def common(given: Namespace, folder: str, checkpointing: bool) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "per_device_train_batch_size": given.batch,
        "max_steps": given.steps,
        "gradient_checkpointing": checkpointing,
    }


def examples(given: Namespace, config: dict[str, Any]) -> dict[str, Any]:
    """Return the same settings with micro-batches, and the same optimiser steps."""
    size = example_work.AT_ONCE
    parts = {"per_device_train_batch_size": size, "gradient_accumulation_steps": given.batch // size}
    return {**config, **parts, "max_length": example_work.MAX_LENGTH}


def sft(given: Namespace, config: dict[str, Any]) -> SFTTrainer:
    return SFTTrainer(
        AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32),
        SFTConfig(**examples(given, config)),
        train_dataset=Dataset.from_list(example_work.demonstrations(given.batch * given.steps)),
        processing_class=AutoTokenizer.from_pretrained(given.model),
    )


def reward(given: Namespace, config: dict[str, Any]) -> RewardTrainer:
    return RewardTrainer(
        AutoModelForSequenceClassification.from_pretrained(f"{given.model}-classifier", dtype=torch.float32),
        RewardConfig(**examples(given, config)),
        train_dataset=Dataset.from_list(example_work.pairs(given.batch * given.steps)),
        processing_class=AutoTokenizer.from_pretrained(given.model),
    )


def grpo(given: Namespace, config: dict[str, Any]) -> GRPOTrainer:
    length = {"max_completion_length": work.RESPONSE, "generation_kwargs": {"min_new_tokens": work.RESPONSE}}
    return GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32),
        variety,
        args=GRPOConfig(**config, **length, num_generations=GROUP, beta=0.05),
        train_dataset=Dataset.from_dict({"prompt": work.prompts(given.batch * given.steps)}),
        processing_class=AutoTokenizer.from_pretrained(given.model, padding_side="left"),
    )


def variety(completions: list[str], **_: Any) -> list[float]:
    """How many different characters a response has: a reward that costs nothing."""
    return [float(len(set(completion))) for completion in completions]


TRAINERS = {"sft": sft, "reward": reward, "grpo": grpo}


def main() -> None:
    """Print seconds, examples or tokens per second, and peak memory."""
    given = work.arguments(__doc__, (*TRAINERS, *(f"{name}-kept" for name in TRAINERS)))
    name = given.mode.removesuffix("-kept")
    with TemporaryDirectory() as folder:
        trainer = TRAINERS[name](given, common(given, folder, checkpointing=name == given.mode))
        positions = work.count_positions(trainer.model)
        start = perf_counter()
        trainer.train()
        seconds = perf_counter() - start
    if name == "grpo":
        work.print_result(seconds, given.batch, given.steps, work.peak_gib())
    else:
        work.print_examples(seconds, given.batch, given.steps, work.peak_gib(), positions)


if __name__ == "__main__":
    main()
