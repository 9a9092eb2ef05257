"""Predictions beside published measurements of another trainer, prime-rl, on GPUs.

The numbers are from https://github.com/PrimeIntellect-ai/prime-rl, benchmarks/baselines, commit 559b447: two
micro-batches of one sequence per GPU, full recomputation, bfloat16, the memory that PyTorch had reserved. Its trainer
is compiled and has kernels of its own; what is predicted is the same step of `cavesson sft`. Nothing is fitted to them.

    python benchmarks/plan.py --published
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from transformers import Qwen3Config

from cavesson.config import check
from cavesson.models.tiny import tiny_tokenizer
from cavesson.plan.devices import device_of
from cavesson.plan.predict import Predictor
from cavesson.plan.recipe import Planned
from cavesson.registry import ALGORITHMS


class Published(NamedTuple):
    """A published measurement."""

    gpu: str
    gpus: int
    model: str
    lora: int
    """rank of the adapters; 0 = all weights are trained"""
    length: int
    seconds: float
    memory: float
    """GiB"""
    date: str


SIZES: dict[str, dict[str, int]] = {
    "Qwen3-0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
PUBLISHED = (
    Published("h100", 1, "Qwen3-0.6B", 0, 16_384, 1.99, 12.5, "2026-01-15"),
    Published("h100", 1, "Qwen3-0.6B", 0, 65_536, 12.18, 19.6, "2026-01-15"),
    Published("h100", 1, "Qwen3-0.6B", 16, 16_384, 2.45, 5.1, "2026-01-15"),
    Published("h100", 1, "Qwen3-0.6B", 16, 65_536, 13.16, 11.5, "2026-01-15"),
    Published("h100", 1, "Qwen3-4B", 16, 16_384, 5.26, 23.3, "2026-01-15"),
    Published("h100", 8, "Qwen3-4B", 0, 16_384, 4.69, 17.1, "2026-01-15"),
    Published("h100", 8, "Qwen3-4B", 0, 65_536, 30.29, 36.1, "2026-01-15"),
    Published("h100", 8, "Qwen3-4B", 16, 16_384, 5.38, 10.3, "2026-01-15"),
    Published("h100", 8, "Qwen3-4B", 16, 65_536, 32.0, 28.8, "2026-01-15"),
    Published("h200", 8, "Qwen3-4B", 0, 16_384, 4.42, 17.1, "2026-01-15"),
    Published("h200", 8, "Qwen3-4B", 0, 65_536, 29.89, 36.1, "2026-01-15"),
    Published("b200", 8, "Qwen3-4B", 0, 16_384, 4.63, 17.0, "2026-01-15"),
    Published("a6000", 1, "Qwen3-0.6B", 0, 16_384, 7.46, 12.5, "2026-01-15"),
)


def predicted(one: Published, folder: Path) -> tuple[float, float]:
    """The predicted GiB of a device and the seconds of a step."""
    model, data = folder / one.model, folder / f"{one.length}.jsonl"
    config: Any = {**SIZES[one.model], "vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128}
    config |= {"tie_word_embeddings": True, "max_position_embeddings": 2**18, "eos_token_id": 0, "pad_token_id": 1}
    Qwen3Config(**config).save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    data.write_text(json.dumps({"prompt": "a", "response": "a" * (one.length - 2)}))
    lora = {"lora": {"rank": one.lora}} if one.lora else {}
    values = {
        "steps": 2,
        "batch_size": 2 * one.gpus,
        "model": {"path": str(model), "dtype": "bfloat16", "gradient_checkpointing": True, **lora},
        "parallel": {"shard": "full" if one.gpus > 1 else "none"},
        "update": {"micro_batch_size": 1},
        "data": {"path": str(data), "max_length": one.length},
    }
    settings: Any = check(ALGORITHMS["sft"].settings, values, "the case")
    predictor = Predictor(Planned("", "sft", settings, (), False), device_of(one.gpu, one.gpus), one.gpus)
    prediction = predictor.predict(settings)
    return prediction.memory.peak / 2**30, prediction.seconds


def main() -> None:
    """Print the table."""
    print(
        "| GPUs | model | tokens | GiB | published | | seconds | published | |\n|---|---|---|---|---|---|---|---|---|"
    )
    with TemporaryDirectory() as folder:
        for one in PUBLISHED:
            memory, seconds = predicted(one, Path(folder))
            model = f"{one.model}, LoRA" if one.lora else one.model
            print(
                f"| {one.gpus} × {one.gpu} | {model} | {one.length:,} | {memory:.1f} | {one.memory} "
                f"| {memory / one.memory - 1:+.0%} "
                f"| {seconds:.2f} | {one.seconds} | {seconds / one.seconds - 1:+.0%} |",
                flush=True,
            )
