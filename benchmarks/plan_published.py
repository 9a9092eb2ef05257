"""Predictions beside published measurements of other trainers on GPUs. Nothing is fitted to them.

- prime-rl: https://github.com/PrimeIntellect-ai/prime-rl, benchmarks/baselines at commit 559b447, every measurement of
  a dense model in RL mode with full recomputation: two micro-batches of one sequence per GPU, bfloat16, the model
  compiled, FlashAttention 2 or 3, and the memory that PyTorch had reserved.
- torchtitan: https://github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md at commit b5bcd76:
  FSDP2 without compilation, two sequences per GPU, on H100 with 2.4 TB/s and a limit of 500 W. It recomputes part of
  what the layers compute, so two predictions are printed, without recomputation and with full recomputation.
- torchtune: https://github.com/pytorch/torchtune, README.md at commit bd2a0fc, "+ Packed Dataset": no compilation, no
  recomputation, weights and optimiser in bfloat16, so that its memory cannot be compared.
- NeMo-RL: https://github.com/NVIDIA-NeMo/RL, docs/about/performance-summary.md, v0.4: GRPO with 2,048 responses, of
  1,060 tokens with their prompts on average, trained in four mini-batches by Megatron and sampled by vLLM.

    python benchmarks/plan_published.py                  all of them: about 10 minutes
    python benchmarks/plan_published.py --only NeMo-RL   those of a trainer or a model
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from cavesson.config import check
from cavesson.models.tiny import tiny_tokenizer
from cavesson.plan.devices import Device, device_of
from cavesson.plan.predict import Prediction, Predictor
from cavesson.plan.recipe import Planned
from cavesson.registry import ALGORITHMS

QWEN: dict[str, Any] = {"vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
LLAMA: dict[str, Any] = {"vocab_size": 128_256, "num_key_value_heads": 8, "head_dim": 128}


def _sizes(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, int]:
    return {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
            "num_attention_heads": heads}  # fmt: skip


MODELS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "Qwen3-0.6B": (Qwen3Config, {**QWEN, **_sizes(1024, 3072, 28, 16)}),
    "Qwen3-4B": (Qwen3Config, {**QWEN, **_sizes(2560, 9728, 36, 32)}),
    "Llama-3.1-8B": (LlamaConfig, {**LLAMA, **_sizes(4096, 14_336, 32, 32)}),
    "Llama-3.2-3B": (LlamaConfig, {**LLAMA, **_sizes(3072, 8192, 28, 24), "tie_word_embeddings": True}),
}


class Published(NamedTuple):
    """A published measurement."""

    trainer: str
    gpus: int
    gpu: str
    model: str
    rank: int
    """of the adapters; 0 = all weights are trained"""
    length: int
    seconds: float
    memory: float
    """GiB; 0 = cannot be compared"""


TABLE = """
    prime-rl    1 h100   Qwen3-0.6B    0  16384   1.99  12.5
    prime-rl    1 h100   Qwen3-0.6B    0  65536  12.18  19.6
    prime-rl    1 h100   Qwen3-0.6B   16  16384   2.45   5.1
    prime-rl    1 h100   Qwen3-0.6B   16  65536  13.16  11.5
    prime-rl    1 h100   Qwen3-4B     16  16384   5.26  23.3
    prime-rl    1 h100   Qwen3-4B     16  65536  31.49  42.0
    prime-rl    8 h100   Qwen3-4B      0  16384   4.69  17.1
    prime-rl    8 h100   Qwen3-4B      0  65536  30.29  36.1
    prime-rl    8 h100   Qwen3-4B     16  16384   5.38  10.3
    prime-rl    8 h100   Qwen3-4B     16  65536  32.00  28.8
    prime-rl    8 h200   Qwen3-4B      0  16384   4.42  17.1
    prime-rl    8 h200   Qwen3-4B      0  65536  29.89  36.1
    prime-rl    8 h200   Qwen3-4B     16  16384   5.01  10.3
    prime-rl    8 h200   Qwen3-4B     16  65536  31.42  28.8
    prime-rl    8 b200   Qwen3-4B      0  16384   4.63  17.0
    prime-rl    8 b200   Qwen3-4B     16  16384   5.69  10.2
    prime-rl    8 b200   Qwen3-4B     16  65536  41.86  28.8
    prime-rl    1 a6000  Qwen3-0.6B    0  16384   7.46  12.5
    prime-rl    1 a6000  Qwen3-0.6B    0  65536  52.80  11.7
    prime-rl    1 a6000  Qwen3-0.6B   16  16384   9.23   5.1
    prime-rl    1 a6000  Qwen3-0.6B   16  65536  65.77  11.5
    prime-rl    1 a6000  Qwen3-4B     16  16384  24.43  23.3
    prime-rl    4 a6000  Qwen3-0.6B    0  65536  63.90   6.3
    torchtitan  8 h100   Llama-3.1-8B  0   8192   2.84  82.4
    torchtitan 128 h100  Llama-3.1-8B  0   8192   2.92  67.0
    torchtune   1 a100   Llama-3.2-3B  0   4096   1.16   0
"""
NEMO = Published("NeMo-RL", 16, "h100", "Llama-3.1-8B", 0, 1060, 97.7, 0)
"""The one step of GRPO; the others are of SFT."""


def published() -> list[Published]:
    """The measurements."""
    return [
        Published(trainer, int(gpus), gpu, model, int(rank), int(length), float(seconds), float(memory))
        for trainer, gpus, gpu, model, rank, length, seconds, memory in map(str.split, TABLE.strip().splitlines())
    ]


def predict(
    command: str, architecture: str, rows: list[dict[str, str]], device: Device, gpus: int, **values: Any
) -> Prediction:
    """Predict a run in bfloat16 on data of these rows."""
    kind, config = MODELS[architecture]
    with TemporaryDirectory() as name:
        folder = Path(name)
        kind(**config, max_position_embeddings=2**18, eos_token_id=0, pad_token_id=1).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
        values["model"] = {"path": name, "dtype": "bfloat16", **values.get("model", {})}
        values["data"] = {"path": str(folder / "data.jsonl"), **values.get("data", {})}
        values["parallel"] = {"shard": "full" if gpus > 1 else "none"}
        settings: Any = check(ALGORITHMS[command].settings, values, "the case")
        return Predictor(Planned("", command, settings, (), False), device, gpus).predict(settings)


def predict_step(one: Published, recomputes: bool) -> Prediction:
    """Predict the same step of `cavesson sft`."""
    device = device_of(one.gpu, one.gpus)
    if one.trainer == "torchtitan":
        device = replace(device, bandwidth=2.4e12)
    row = {"prompt": "a", "response": "a" * (one.length - 2)}
    return predict(
        "sft", one.model, [row], device, one.gpus,
        steps=2,
        batch_size=2 * one.gpus,
        model={"gradient_checkpointing": recomputes, **({"lora": {"rank": one.rank}} if one.rank else {})},
        update={"micro_batch_size": 1 if one.trainer == "prime-rl" else 2},
        data={"max_length": one.length},
    )  # fmt: skip


def predict_grpo() -> Prediction:
    """Predict a step of NeMo-RL's GRPO: prompts of 160 tokens, responses of 900, 32 per prompt."""
    rows = [{"prompt": f"{number:a<160}"} for number in range(64)]
    servers = [f"http://host:{8000 + number}" for number in range(16)]
    return predict(
        "grpo", "Llama-3.1-8B", rows, device_of("h100", 16), 16,
        batch_size=2048,
        samples_per_prompt=32,
        model={"gradient_checkpointing": True},
        update={"mini_batches": 4, "micro_batch_size": 4},
        sampling={"engine": "vllm", "servers": servers, "max_new_tokens": 900},
        rewards=[{"use": "lowercase"}],
    )  # fmt: skip


def show(one: Published, kind: str, prediction: Prediction) -> None:
    """Print a line of the table."""
    memory, seconds = prediction.memory.peak / 2**30, prediction.seconds
    arithmetic = sum(part.computing for part in prediction.times.values())
    columns = f"{memory:.1f} | {one.memory} | {memory / one.memory - 1:+.0%}" if one.memory else "| |"
    print(
        f"| {one.trainer} | {one.gpus} × {one.gpu} | {one.model}{kind} | {one.length:,} | {columns} "
        f"| {seconds:.2f} ({arithmetic:.2f}) | {one.seconds} | {seconds / one.seconds - 1:+.0%} |",
        flush=True,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the name of a trainer or a model")
    only = parser.parse_args().only
    chosen = [one for one in (*published(), NEMO) if only in f"{one.trainer} {one.model}"]
    if not chosen:
        parser.error(f"no trainer and no model has {only!r} in its name")
    print(
        "| trainer | GPUs | model | tokens | GiB | published | | seconds (arithmetic) | published | |\n"
        + 10 * "|---"
        + "|"
    )
    for one in chosen:
        if one is NEMO:
            show(one, ", GRPO", predict_grpo())
        elif one.trainer == "torchtitan":
            show(one, ", no recomputation", predict_step(one, recomputes=False))
            show(one, ", full recomputation", predict_step(one, recomputes=True))
        else:
            show(one, ", LoRA" if one.rank else "", predict_step(one, recomputes=one.trainer == "prime-rl"))


if __name__ == "__main__":
    main()
