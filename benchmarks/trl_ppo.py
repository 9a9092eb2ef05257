"""TRL's PPO on the work of work.py: four models, all weights trained, float32."""

import os

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

from tempfile import TemporaryDirectory
from time import perf_counter

import torch
import work
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.experimental.ppo import PPOConfig, PPOTrainer


def trainer(model: str, batch: int, steps: int, folder: str) -> PPOTrainer:
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    data = Dataset.from_dict({"input_ids": tokenizer(work.prompts(batch * steps))["input_ids"]})
    config = PPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        per_device_train_batch_size=batch,
        local_rollout_forward_batch_size=batch,
        gradient_accumulation_steps=1,
        num_mini_batches=1,
        num_ppo_epochs=1,
        num_sample_generations=0,
        total_episodes=batch * steps,
        response_length=work.RESPONSE,  # nothing ends a response before that, unless stop_token is set
        temperature=1.0,
    )
    policy, reference = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in range(2))
    scorers = (
        AutoModelForSequenceClassification.from_pretrained(f"{model}-classifier", dtype=torch.float32) for _ in range(2)
    )
    return PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=next(scorers),
        value_model=next(scorers),
        train_dataset=data,
        eval_dataset=data,
    )


def main() -> None:
    """Print seconds, tokens per second and peak memory."""
    given = work.arguments(__doc__)
    with TemporaryDirectory() as folder:
        ppo = trainer(given.model, given.batch, given.steps, folder)
        start = perf_counter()
        ppo.train()
        work.print_result(perf_counter() - start, given.batch, given.steps, work.peak_gib())


if __name__ == "__main__":
    main()
