"""PPO and GRPO on a GPU: speed of sampling and of updates, model FLOP utilisation, and peak memory.

    make gpu                                              # on a machine with a GPU: the tests marked gpu, then this
    python benchmarks/gpu.py --size 7b --algorithm ppo
    python benchmarks/gpu.py --size tiny --response 16    # on a CPU, to see that it runs

The models have the sizes of Qwen2.5 and random weights, made here; nothing is downloaded. What is measured, and what is
counted as a FLOP, is explained in docs/gpu.md.
"""

import json
import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, Qwen2Config, Qwen2ForCausalLM

from cavesson import Training
from cavesson.models.tiny import tiny_tokenizer
from cavesson.plan.devices import DEVICES
from cavesson.registry import ALGORITHMS

PROMPT = 64
"""tokens of every prompt"""
GROUP = 8
"""responses to a prompt"""
PEAKS = {
    "B200": 2250, "H200 NVL": 835, "H200": 989, "H100 NVL": 835, "H100 PCIe": 756, "H100": 989, "A100": 312,
    "L40S": 362, "RTX 4090": 165,
}  # fmt: skip
"""dense bfloat16 TFLOP/s by NVIDIA's data sheets, by a part of the GPU's name; the first that fits counts"""


class Size(NamedTuple):
    """A model, and settings under which its training fits a GPU with 80 GB."""

    config: dict[str, Any]
    batch: int
    micro: int
    lora: bool


_QWEN = {"vocab_size": 151936, "max_position_embeddings": 32768, "rope_parameters": {"rope_theta": 1e6}}
SIZES = {
    "0.5b": Size(
        {**_QWEN, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
         "num_key_value_heads": 2, "tie_word_embeddings": True}, 64, 16, False,
    ),
    # All weights would take 18 bytes each: bfloat16, and in float32 a copy, the gradient and two averages.
    "7b": Size(
        {**_QWEN, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
         "num_key_value_heads": 4, "tie_word_embeddings": False}, 64, 8, True,
    ),
    "tiny": Size(
        {"vocab_size": 258, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}, 16, 8, True,
    ),
}  # fmt: skip


def save_model(size: Size, folder: Path) -> None:
    """Save a model with random weights, in bfloat16, and a tokenizer with a token per byte."""
    torch.manual_seed(0)
    config = Qwen2Config(**size.config, bos_token_id=None, eos_token_id=0, pad_token_id=1, dtype=torch.bfloat16)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            Qwen2ForCausalLM(config).save_pretrained(folder)
    finally:
        torch.set_default_dtype(before)
    tiny_tokenizer().save_pretrained(folder)


def settings_of(algorithm: str, size: Size, folder: Path, given: Namespace) -> dict[str, Any]:
    """Settings of a run whose step is one pass over its responses."""
    return {
        "run": str(folder / "run"),
        "steps": given.rounds + 1,
        "batch_size": size.batch,
        "samples_per_prompt": GROUP,
        "model": {
            "path": str(folder / "model"), "dtype": "bfloat16", "gradient_checkpointing": True,
            **({"lora": {"rank": 16, "alpha": 32}} if size.lora else {}),
            **({"device": given.device} if given.device else {}),
        },
        # A token that no text has: every response has its full length.
        "sampling": {"max_new_tokens": given.response, "eos_token_ids": [size.config["vocab_size"]]},
        "update": {"micro_batch_size": size.micro, "mini_batches": 1, "epochs": 1},
        "kl": {"coef": 0.05},
        "checkpoint": {"every": 0},
        "doctor": {"on_finding": "ignore"},
    }  # fmt: skip


def variety(prompts: list[str], responses: list[str], **_: Any) -> list[float]:
    """How many different characters a response has: a reward that costs nothing."""
    return [float(len(set(response))) for response in responses]


def forward_flops(config: Any, responses: int, prompt: int, response: int) -> tuple[float, float]:
    """Return the FLOPs of a forward pass over responses: of its products with weights, and of attention.

    A weight matrix takes 2 FLOPs per weight and token. The output head is applied to response tokens alone. Attention
    takes 2 · width · length² per layer, since a token sees half of the others on average.
    """
    width, length = config.hidden_size, prompt + response
    matrices = 2 * (layer_weights(config) * length + width * config.vocab_size * response)
    attention = config.num_hidden_layers * 2 * width * length**2
    return float(responses * matrices), float(responses * attention)


def layer_weights(config: Any) -> int:
    """Return the number of weights in the matrices of all layers."""
    width, head = config.hidden_size, config.hidden_size // config.num_attention_heads
    keys = config.num_key_value_heads * head
    layer = 2 * width * width + 2 * width * keys + 3 * width * config.intermediate_size
    return int(config.num_hidden_layers * layer)


def update_flops(config: Any, trained: int, responses: int, prompt: int, response: int) -> float:
    """Return the FLOPs of the forward and the backward pass over responses, without what is recomputed.

    Backward, a weight matrix takes 2 FLOPs per weight and token for the gradient of its input, and 2 for its own if it
    is trained; attention takes twice as many as forward.

    Args:
        config: of the model.
        trained: trained weights; fewer than those of the layers are adapters.
        responses: number of responses.
        prompt: tokens of a prompt.
        response: tokens of a response.
    """
    matrices, attention = forward_flops(config, responses, prompt, response)
    if trained >= layer_weights(config):
        return 3 * matrices + 3 * attention
    return 2 * matrices + 3 * attention + 6.0 * trained * responses * (prompt + response)


def learning_flops(training: Training, config: Any, size: Size, response: int) -> float:
    """Return the FLOPs that the scoring and the update of a step need.

    These are the passes of the policy that learn, a forward pass of the reference, and where advantages depend on
    scores, so that all responses are scored before any is learned from, one more of the policy.
    """
    trained = sum(p.numel() for p in training.trainer.learner.model.parameters() if p.requires_grad)
    passes = 2 if training.settings.algorithm.credits_scores else 1
    forward = sum(forward_flops(config, size.batch, PROMPT, response))
    return update_flops(config, trained, size.batch, PROMPT, response) + passes * forward


def peak_tflops(device: torch.device, given: float | None) -> float | None:
    """Return the dense bfloat16 TFLOP/s of the GPU, or None if they are not known."""
    if given is not None or device.type != "cuda":
        return given
    name = torch.cuda.get_device_name(device)
    return next((float(peak) for part, peak in PEAKS.items() if part in name), None)


def measure(algorithm: str, size: Size, folder: Path, given: Namespace) -> dict[str, Any]:
    """Train, and return the figures of every step but the first, which warms up."""
    values = settings_of(algorithm, size, folder, given)
    training = Training(
        ALGORITHMS[algorithm].settings.model_validate(values),
        prompts=["".join(chr(97 + (n * 7 + i) % 26) for i in range(PROMPT)) for n in range(size.batch // GROUP)],
        rewards=variety,
    )
    device = training.processes.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    metrics = training.run(lambda step, seen: None).metrics[1 : given.rounds + 1]
    flops = learning_flops(training, AutoConfig.from_pretrained(folder / "model"), size, given.response)
    peak = peak_tflops(device, given.peak)
    tokens = size.batch * given.response
    learning = [seen["time/score"] + seen["time/update"] for seen in metrics]
    found = {
        "step, s": [seen["time/total"] for seen in metrics],
        "sampled tokens/s": [tokens / seen["time/generate"] for seen in metrics],
        "learning, s": learning,
        "learning TFLOP/s": [flops / seconds / 1e12 for seconds in learning],
    }
    if peak is not None:
        found["utilisation, %"] = [100 * each / peak for each in found["learning TFLOP/s"]]
    if device.type == "cuda":
        found["peak memory, GB"] = [torch.cuda.max_memory_allocated(device) / 1e9]
        found["peak reserved, GB"] = [torch.cuda.max_memory_reserved(device) / 1e9]
    return found


def predicted_gb(algorithm: str, size: Size, folder: Path, given: Namespace) -> float | None:
    """Return the peak memory that `cavesson plan` predicts for the recipe, or None if it does not know the device."""
    is_cpu = given.device == "cpu" or not torch.cuda.is_available()
    name = "cpu" if is_cpu else torch.cuda.get_device_name(given.device).lower()
    gpu = next((known for known in ["cpu", *DEVICES] if known in name), None)
    if gpu is None:
        return None
    values = settings_of(algorithm, size, folder, given)
    (folder / "prompts.txt").write_text("\n".join("a" * PROMPT for _ in range(size.batch // GROUP)))
    values |= {"data": {"path": str(folder / "prompts.txt")}, "rewards": [{"use": "lowercase"}]}
    recipe = folder / f"{algorithm}.toml"
    recipe.write_text(toml(values))
    command = [sys.executable, "-m", "cavesson", "plan", str(recipe), "--command", algorithm, "--gpu", gpu, "--json"]
    (plan,) = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return float(plan["memory"]["peak"]) / 1e9


def toml(values: dict[str, Any]) -> str:
    """Write settings as TOML, every value by its dotted name."""
    flat: dict[str, Any] = {}

    def walk(group: dict[str, Any], prefix: str) -> None:
        for name, value in group.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{name}.")
            else:
                flat[prefix + name] = value

    walk({name: value for name, value in values.items() if name != "rewards"}, "")
    lines = [f"{name} = {json.dumps(value)}" for name, value in flat.items()]
    for reward in values.get("rewards", ()):
        lines += ["[[rewards]]", *(f"{name} = {json.dumps(value)}" for name, value in reward.items())]
    return "\n".join(lines) + "\n"


def machine(given: Namespace) -> str:
    """Return the names and versions that figures depend on."""
    if given.device == "cpu" or not torch.cuda.is_available():
        return f"CPU, {os.cpu_count()} cores, torch {torch.__version__}"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]
    name = torch.cuda.get_device_name(given.device)
    return f"{name}, driver {driver}, CUDA {torch.version.cuda}, torch {torch.__version__}"


def arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, action="append", help="default: 0.5b and 7b")
    parser.add_argument("--algorithm", choices=("ppo", "grpo"), action="append", help="default: both")
    parser.add_argument("--response", type=int, default=512, help="tokens of every response")
    parser.add_argument("--rounds", type=int, default=5, help="steps that count")
    parser.add_argument("--peak", type=float, help="dense bfloat16 TFLOP/s of the device, if its name is not known")
    parser.add_argument("--device", help="cpu, cuda or cuda:1; default: a GPU if there is one")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    sizes = given.size or ["0.5b", "7b"]
    if (given.device == "cpu" or not torch.cuda.is_available()) and set(sizes) != {"tiny"}:
        raise SystemExit("this machine has no usable GPU; --size tiny runs on a CPU")
    print(machine(given))
    for name in sizes:
        size = SIZES[name]
        for algorithm in given.algorithm or ("ppo", "grpo"):
            with TemporaryDirectory(prefix="cavesson-bench-") as place:
                save_model(size, Path(place) / "model")
                found = measure(algorithm, size, Path(place), given)
                kind = "adapters" if size.lora else "all weights"
                print(f"{algorithm}, {name}, {kind}, {size.batch} responses of {given.response} tokens, median (range)")
                for figure, values in found.items():
                    print(f"  {figure:18} {median(values):.4g} ({min(values):.4g} to {max(values):.4g})", flush=True)
                predicted = predicted_gb(algorithm, size, Path(place), given)
            if predicted is not None:
                print(f"  {'predicted, GB':18} {predicted:.4g}")
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
