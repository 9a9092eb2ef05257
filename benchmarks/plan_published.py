"""Predictions beside published measurements of other trainers on GPUs. Nothing is fitted to them.

Most numbers are from https://github.com/PrimeIntellect-ai/prime-rl, benchmarks/baselines, commit 559b447: two
micro-batches of one sequence per GPU, full recomputation, bfloat16, and the memory that PyTorch had reserved. Its
trainer compiles the model and uses FlashAttention 3; what is predicted is the same step of `cavesson sft`.

The last line is from the performance summary of NeMo-RL v0.4 (https://github.com/NVIDIA-NeMo/RL,
docs/about/performance-summary.md): GRPO with 2,048 responses, of 1,060 tokens with their prompts on average, trained in
four mini-batches by Megatron and sampled by vLLM.

    python benchmarks/plan.py --published
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from transformers import LlamaConfig, Qwen3Config

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


def predicted_grpo(folder: Path) -> float:
    """The predicted seconds of a step of NeMo-RL's GRPO: prompts of 160 tokens, responses of 900, 32 per prompt."""
    config: Any = {"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 2**17}
    LlamaConfig(**config, eos_token_id=0, pad_token_id=1).save_pretrained(folder / "llama")
    tiny_tokenizer().save_pretrained(folder / "llama")
    data = folder / "prompts.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"{number:a<160}"}) for number in range(64)))
    servers = [f"http://host:{8000 + number}" for number in range(16)]
    values = {
        "batch_size": 2048,
        "samples_per_prompt": 32,
        "model": {"path": str(folder / "llama"), "dtype": "bfloat16", "gradient_checkpointing": True},
        "parallel": {"shard": "full"},
        "update": {"mini_batches": 4, "micro_batch_size": 4},
        "data": {"path": str(data)},
        "sampling": {"engine": "vllm", "servers": servers, "max_new_tokens": 900},
        "rewards": [{"use": "lowercase"}],
    }
    settings: Any = check(ALGORITHMS["grpo"].settings, values, "the case")
    return Predictor(Planned("", "grpo", settings, (), False), device_of("h100", 16), 16).predict(settings).seconds


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
        seconds, published = predicted_grpo(Path(folder)), 97.7
        columns = f"{seconds:.0f} | {published} | {seconds / published - 1:+.0%}"
        print(f"| 16 × h100 | Llama-3.1-8B, GRPO | 1,060 | | | | {columns} |")
