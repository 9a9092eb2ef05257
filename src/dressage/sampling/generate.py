"""Responses of a model to prompts, without training: what `dressage generate` does."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field
from transformers import PreTrainedTokenizerBase

from dressage.config import Settings
from dressage.data.prompts import PromptSet, PromptSettings, load_prompts, tokenize
from dressage.errors import UserError
from dressage.models.policy import Policy
from dressage.models.trained import load_trained
from dressage.record.files import replacing
from dressage.sampling.sampler import Sampler
from dressage.sampling.settings import SamplingSettings
from dressage.train.processes import Processes
from dressage.train.rollouts import Collector


class GenerateSettings(Settings):
    """Sample responses of a model."""

    prompt: tuple[str, ...] | str = ()
    """a prompt, or a list of them"""
    data: PromptSettings = PromptSettings()
    """or a file of prompts"""
    samples: int = Field(1, ge=1)
    """responses per prompt"""
    seed: int = Field(0, ge=0)
    """the same seed gives the same responses"""
    sampling: SamplingSettings = SamplingSettings(max_new_tokens=64)
    """how to sample"""
    gguf_file: str | None = None
    """name of the GGUF file inside the model's folder, if the weights come as GGUF"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """numbers to compute in"""
    device: str | None = None
    """where to compute; none = a GPU where there is one"""
    batch_size: int = Field(32, ge=1)
    """responses sampled at the same time"""
    out: Path | None = None
    """a .jsonl file to write; none = print"""


def generate(model: str, settings: GenerateSettings) -> Iterator[dict[str, str]]:
    """Yield prompt, response and finish reason, prompt by prompt.

    Raises:
        UserError: there is no such model, or no prompt.
    """
    loaded, tokenizer = load_trained(model, settings.gguf_file, settings.dtype)
    prompts = _prompts(settings, tokenizer)
    policy = Policy(loaded, temperature=settings.sampling.temperature or 1.0)
    policy.to(Processes(settings.device).device)
    collector = Collector(prompts, Sampler(policy, tokenizer, settings.sampling, settings.seed), (), tokenizer)
    total = len(prompts) * settings.samples
    for start in range(0, total, settings.batch_size):
        rows = range(start, min(start + settings.batch_size, total))
        _, columns = collector.sample([row // settings.samples for row in rows], 0, rows)
        for prompt, response, reason in zip(
            columns["prompt"], columns["response"], columns["finish_reason"], strict=True
        ):
            yield {"prompt": prompt, "response": response, "finish_reason": reason}


def write(responses: Iterator[dict[str, str]], out: Path) -> int:
    """Write responses as JSON lines and return their number; raises UserError where the file exists."""
    if out.exists():
        raise UserError(f"{out} exists already; choose another --out")
    count = 0
    with replacing(out) as file:
        for response in responses:
            count += 1
            file.write(f"{json.dumps(response, ensure_ascii=False)}\n".encode())
    return count


def _prompts(settings: GenerateSettings, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    given = (settings.prompt,) if isinstance(settings.prompt, str) else settings.prompt
    if bool(given) == bool(settings.data.path):
        raise UserError('give either --prompt "…" or --data.path FILE')
    if given:
        return tokenize(given, tokenizer, settings.data.max_prompt_tokens)
    return load_prompts(settings.data, tokenizer)
