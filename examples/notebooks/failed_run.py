"""Make the log that why_did_this_run_fail.ipynb reads: TRL trains with GRPO, and the reward has a bug.

    python examples/notebooks/failed_run.py examples/notebooks/failed_run

It needs `pip install "cavesson[train]" trl`. A model of 0.3 million random parameters is rewarded for lower-case
letters and for headings, in a minute on two cores. What TRL writes is kept as it is: the tables of completions, and
`trainer_state.json`.
"""

import shutil
import sys
from pathlib import Path
from tempfile import mkdtemp

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from cavesson.models.tiny import tiny_model, tiny_tokenizer

PROMPTS = ["The morning train was", "In the kitchen we found", "A boat without", "The last bus"]


def lowercase(completions: list[str], **columns: object) -> list[float]:
    """Return the share of characters that are lower-case letters."""
    return [sum("a" <= one <= "z" for one in text) / max(len(text), 1) for text in completions]


def headings(completions: list[str], **columns: object) -> list[float]:
    """Return the number of Markdown headings. The bug: this counts signs, wherever they are."""
    return [float(text.count("#")) for text in completions]


def main(folder: str) -> None:
    """Train, and copy the log to the folder."""
    output = mkdtemp()
    config = GRPOConfig(
        output_dir=output,
        max_steps=30,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=24,
        learning_rate=3e-3,
        beta=0.0,
        logging_steps=1,
        log_completions=True,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        seed=0,
    )
    trainer = GRPOTrainer(
        model=tiny_model(), args=config, processing_class=tiny_tokenizer(), reward_funcs=[lowercase, headings],
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 8}),
    )  # fmt: skip
    trainer.train()
    trainer.save_state()
    shutil.copytree(Path(output, "completions"), Path(folder, "completions"), dirs_exist_ok=True)
    shutil.copy(Path(output, "trainer_state.json"), folder)


if __name__ == "__main__":
    main(sys.argv[1])
