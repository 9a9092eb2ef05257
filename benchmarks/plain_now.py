"""The work of ours_now.py without Cavesson: plain PyTorch and transformers.

SFT and the reward model learn from two examples at a time, which stand in one row, so that nothing is padded. GRPO
passes over a step once to sample, which reads a prompt once for its whole group, once with gradients, and once by the
reference; the latter two read the prompt again for every response.
"""

from argparse import Namespace
from collections.abc import Callable, Iterable
from itertools import chain
from time import perf_counter
from typing import Any

import example_work
import torch
import work
from plain import logprobs, optimizer_of, sample, states, with_adapters, with_reference
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

GROUP, KL_COEF = 8, 0.05


def packed(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return rows as one, `[1, N]`, and each token's place in its own row, by which transformers separates them."""
    joined, places = torch.tensor(list(chain(*rows))), torch.cat([torch.arange(len(row)) for row in rows])
    return joined[None], places[None]


def batches(given: Namespace, rows: list[Any]) -> Iterable[list[list[Any]]]:
    """Yield the micro-batches of each step."""
    size = example_work.AT_ONCE
    for first in range(0, given.batch * given.steps, given.batch):
        step = rows[first : first + given.batch]
        yield [step[part : part + size] for part in range(0, given.batch, size)]


def sft(given: Namespace, tokenizer: PreTrainedTokenizerBase) -> tuple[Any, Callable[[], None]]:
    """Return a model, and what trains it on demonstrations."""
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    optimizer = optimizer_of(model)
    examples = [
        (tokenizer(row["prompt"]).input_ids, [*tokenizer(row["completion"]).input_ids, tokenizer.eos_token_id])
        for row in example_work.demonstrations(given.batch * given.steps)
    ]

    def train() -> None:
        for parts in batches(given, examples):
            learned = sum(len(completion) for part in parts for _, completion in part)
            for part in parts:
                ids, positions = packed([prompt + completion for prompt, completion in part])
                # The last token of a row predicts none.
                labels = packed([[-100] * (len(prompt) - 1) + completion + [-100] for prompt, completion in part])[0]
                hidden = model.model(input_ids=ids, position_ids=positions, use_cache=False)[0]
                logits = model.lm_head(hidden[labels >= 0])
                (nn.functional.cross_entropy(logits, labels[labels >= 0], reduction="sum") / learned).backward()
            optimizer.step()
            optimizer.zero_grad()

    return model, train


def reward(given: Namespace, tokenizer: PreTrainedTokenizerBase) -> tuple[Any, Callable[[], None]]:
    """Return a model, and what trains it on pairs."""
    model = AutoModelForSequenceClassification.from_pretrained(f"{given.model}-classifier", dtype=torch.float32)
    optimizer = optimizer_of(model)
    pairs = [
        [[*tokenizer(row["prompt"] + row[side]).input_ids, tokenizer.eos_token_id] for side in ("chosen", "rejected")]
        for row in example_work.pairs(given.batch * given.steps)
    ]

    def train() -> None:
        for parts in batches(given, pairs):
            for part in parts:
                rows = [row for pair in part for row in pair]
                ids, positions = packed(rows)
                hidden = model.model(input_ids=ids, position_ids=positions, use_cache=False)[0]
                last = torch.tensor([len(row) for row in rows]).cumsum(0) - 1
                scores = model.score(hidden[0, last]).view(-1, 2)
                (-nn.functional.logsigmoid(scores[:, 0] - scores[:, 1]).sum() / given.batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    return model, train


def grpo(given: Namespace, tokenizer: PreTrainedTokenizerBase) -> tuple[Any, Callable[[], None]]:
    """Return a policy, and what trains it on groups of responses, arXiv:2402.03300.

    The reward counts different tokens.
    """
    policy, trained, compared = (with_adapters if given.mode == "grpo-lora" else with_reference)(given.model)
    optimizer = optimizer_of(trained)
    texts = work.prompts(given.batch * given.steps // GROUP)  # one for each group, as ours has

    def train() -> None:
        for parts in range(0, len(texts), given.batch // GROUP):
            prompts = tokenizer(texts[parts : parts + given.batch // GROUP], padding=True, return_tensors="pt")
            response = sample(policy, prompts.input_ids, prompts.attention_mask, GROUP)
            repeated, mask = (prompts[name].repeat_interleave(GROUP, 0) for name in ("input_ids", "attention_mask"))
            ids = torch.cat([repeated, response], dim=1)
            mask = torch.cat([mask, torch.ones_like(response)], dim=1)
            with torch.no_grad():
                reference = compared(ids, mask, response)
            scores = torch.tensor([float(len(set(row))) for row in response.tolist()]).view(-1, GROUP)
            advantage = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-4)
            logprob = logprobs(policy, states(policy.model, ids, mask), response)
            distance = (reference - logprob).exp() - (reference - logprob) - 1
            gained = (logprob - logprob.detach()).exp() * advantage.view(-1, 1)
            (KL_COEF * distance - gained).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return policy, train


MODES = {"sft": sft, "reward": reward, "grpo": grpo, "grpo-lora": grpo}


def main() -> None:
    """Print seconds, examples or tokens per second, and peak memory."""
    given = work.arguments(__doc__, tuple(MODES))
    tokenizer = AutoTokenizer.from_pretrained(given.model, padding_side="left")
    model, train = MODES[given.mode](given, tokenizer)
    positions = work.count_positions(model)
    start = perf_counter()
    train()
    seconds = perf_counter() - start
    if given.mode.startswith("grpo"):
        work.print_result(seconds, given.batch, given.steps, work.peak_gib())
    else:
        work.print_examples(seconds, given.batch, given.steps, work.peak_gib(), positions)


if __name__ == "__main__":
    main()
