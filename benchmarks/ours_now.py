"""Cavesson's SFT, reward model and GRPO on the work of work.py and example_work.py, with all that a user has on."""

import json
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import example_work
import work
from transformers import AutoConfig

from cavesson import Training, UserError
from cavesson.algorithms.grpo import GRPORun
from cavesson.algorithms.reward_model import RewardModelRun
from cavesson.algorithms.sft import SFTRun

GROUP = 8


def of_examples(given: Namespace, folder: Path, rows: list[dict[str, str]], model: str) -> dict[str, Any]:
    """Settings of a run over rows, all weights trained, float32."""
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return {
        "run": folder / "run",
        "batch_size": given.batch,
        "model": {"path": model},
        "data": {"path": str(path), "max_length": example_work.MAX_LENGTH},
        "update": {"micro_batch_size": example_work.AT_ONCE},
    }


def sft(given: Namespace, folder: Path) -> Training:
    rows = example_work.demonstrations(given.batch * given.steps)
    return Training(SFTRun.model_validate(of_examples(given, folder, rows, given.model)))


def reward(given: Namespace, folder: Path) -> Training:
    rows = example_work.pairs(given.batch * given.steps)
    return Training(RewardModelRun.model_validate(of_examples(given, folder, rows, f"{given.model}-classifier")))


def grpo(given: Namespace, folder: Path, **model: Any) -> Training:
    # An end token outside the vocabulary: every response runs to its full length.
    never = AutoConfig.from_pretrained(given.model).vocab_size
    settings = {
        "run": folder / "run",
        "steps": given.steps,
        "batch_size": given.batch,
        "samples_per_prompt": GROUP,
        "model": {"path": given.model, **model},
        "data": {"shuffle": False},
        "sampling": {"max_new_tokens": work.RESPONSE, "eos_token_ids": (never,)},
        "kl": {"coef": 0.05},
    }
    prompts = work.prompts(given.batch * given.steps)
    return Training(GRPORun.model_validate(settings), prompts=prompts, rewards=variety)


def lora(given: Namespace, folder: Path) -> Training:
    return grpo(given, folder, dtype="bfloat16", lora={})


def variety(prompts: list[str], responses: list[str], **_: Any) -> list[float]:
    """How many different characters a response has: a reward that costs nothing."""
    return [float(len(set(response))) for response in responses]


RUNS = {"sft": sft, "reward": reward, "grpo": grpo, "grpo-lora": lora}


class Watch:
    """Notes when the first step began, when the last one ended, and the most memory until then."""

    def __init__(self) -> None:
        self.begin = self.end = self.peak = 0.0

    def __call__(self, step: int, metrics: dict[str, float]) -> None:
        if step == 0:
            self.begin = perf_counter() - metrics["time/total"]
        if metrics.get("length/response_mean", work.RESPONSE) != work.RESPONSE:
            raise UserError(f"step {step}: not every response has {work.RESPONSE} tokens; the work is not the same")
        self.end, self.peak = perf_counter(), work.peak_gib()


def main() -> None:
    """Print seconds, examples or tokens per second, and peak memory."""
    given = work.arguments(__doc__, tuple(RUNS))
    with TemporaryDirectory() as folder:
        watch, training = Watch(), RUNS[given.mode](given, Path(folder))
        positions = work.count_positions(training.trainer.learner.model.model)
        training.run(watch)
    seconds = watch.end - watch.begin
    if given.mode.startswith("grpo"):
        work.print_result(seconds, given.batch, given.steps, watch.peak)
    else:
        work.print_examples(seconds, given.batch, given.steps, watch.peak, positions)


if __name__ == "__main__":
    main()
