"""What gpu.py compares with: a loss with plain PyTorch and Hugging Face, and TRL's GRPO."""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from gpu_work import GROUP, PROMPT, Size, peak_tflops, random_model, texts, update_flops
from torch import Tensor
from torch.utils.checkpoint import checkpoint

HEAD_TOKENS = 2048
"""tokens whose logits are in memory at a time"""


def wait(device: str) -> None:
    """Wait until the GPU has done everything."""
    if device != "cpu":
        torch.cuda.synchronize()


def bound(size: Size, device: str, rounds: int, peak: float | None) -> dict[str, list[float]]:
    """Measure the forward and the backward pass of a policy loss: compiled, without recomputation, padding or a mask.

    This is what learning could cost with plain PyTorch: no optimiser, no reference, and no bookkeeping.

    Args:
        size: of the model and its work.
        device: where to compute.
        rounds: passes that count.
        peak: TFLOP/s of the device, if its name is not known.
    """
    model = random_model(size, device).train()
    if size.lora:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
        model = get_peft_model(model, adapters, autocast_adapter_dtype=False).base_model.model
        model.enable_input_require_grads()
    for layer in model.model.layers:
        layer.compile(dynamic=False)
    head: Callable[..., Tensor] = torch.compile(_logprobs, dynamic=False)
    ids = torch.randint(3, size.config["vocab_size"], (size.batch, PROMPT + size.response), device=device)
    rows, seconds = max(1, size.micro // ids.shape[1]), []
    for _ in range(rounds + 1):
        wait(device)
        start = perf_counter()
        for part in ids.split(rows):
            (_policy_logprobs(model, part, head).sum() / ids.numel()).backward()
        wait(device)
        seconds.append(perf_counter() - start)
        model.zero_grad(set_to_none=True)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    flops = update_flops(model.config, trained, size.batch, PROMPT, size.response)
    found = {"learning, s": seconds[1:], "first, s more": [seconds[0] - median(seconds[1:])]}
    tflops = peak_tflops(torch.device(device), peak)
    if tflops is not None:
        found["utilisation, %"] = [100 * flops / each / 1e12 / tflops for each in seconds[1:]]
    return found


def _policy_logprobs(model: Any, ids: Tensor, head: Callable[..., Tensor]) -> Tensor:
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, PROMPT - 1 : -1].flatten(0, 1)
    parts = zip(hidden.split(HEAD_TOKENS), ids[:, PROMPT:].flatten().split(HEAD_TOKENS), strict=True)
    return torch.cat([checkpoint(head, each, model.lm_head.weight, t, use_reentrant=False) for each, t in parts])


def _logprobs(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    logits = (hidden @ weight.T).float()
    return logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)


def trl(size: Size, device: str, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Measure GRPO of TRL with its defaults: float32 weights, bfloat16 autocast, and recomputation.

    Raises:
        ImportError: TRL is not installed.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model.generation_config.eos_token_id = None
    rows, is_cpu = max(1, size.micro // (PROMPT + size.response)), device == "cpu"
    config = GRPOConfig(
        output_dir=str(folder / "trl"), report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1,
        per_device_train_batch_size=rows, gradient_accumulation_steps=size.batch // rows, max_steps=rounds + 1,
        gradient_checkpointing=True, bf16=not is_cpu, use_cpu=is_cpu, num_generations=min(GROUP, rows), beta=0.05,
        max_completion_length=size.response, generation_kwargs={"min_new_tokens": size.response}, learning_rate=1e-6,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model, _variety, args=config, processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        train_dataset=Dataset.from_dict({"prompt": texts(size.batch // GROUP, PROMPT) * (rounds + 1) * GROUP}),
    )  # fmt: skip
    steps, samplings = _timed(trainer, "training_step", device), _timed(trainer, "_generate", device)
    trainer.train()
    parts = size.batch // rows  # calls of training_step in a step; the first of them samples
    whole = [sum(steps[at : at + parts]) for at in range(0, len(steps), parts)][1:]
    sampled = samplings[1:]
    return {
        "step without optimiser, s": whole,
        "sampling, s": sampled,
        "learning, s": [all_of - one for all_of, one in zip(whole, sampled, strict=True)],
    }


def _variety(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(one))) for one in completions]


def _timed(trainer: Any, name: str, device: str) -> list[float]:
    """Let a method note the seconds of each call."""
    inner, seconds = getattr(trainer, name), list[float]()

    def timed(*args: Any, **kwargs: Any) -> Any:
        wait(device)
        start = perf_counter()
        result = inner(*args, **kwargs)
        wait(device)
        seconds.append(perf_counter() - start)
        return result

    setattr(trainer, name, timed)
    return seconds
