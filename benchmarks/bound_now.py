"""The work of ours_now.py without Cavesson: PyTorch and transformers doing what no trainer can leave out.

SFT and the reward model learn from two examples at a time, the shortest first, so that little is padded. GRPO's policy
passes over a step once to sample and once with gradients, its reference once without.
"""

from argparse import Namespace
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import example_work
import torch
import work
from bound import logprobs, optimizer_of, sample, states, with_adapters, with_reference
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

GROUP, KL_COEF, AT_ONCE = 8, 0.05, 2


def batches(given: Namespace, rows: list[Any], size: Callable[[Any], int]) -> Iterable[list[list[Any]]]:
    """The parts of each step, of rows of similar size."""
    for step in range(given.steps):
        ordered = sorted(rows[step * given.batch : (step + 1) * given.batch], key=size)
        yield [ordered[first : first + AT_ONCE] for first in range(0, given.batch, AT_ONCE)]


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Ids and mask of rows, with the padding at the end."""
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in rows], batch_first=True)
    return ids, mask


def sft(given: Namespace, tokenizer: PreTrainedTokenizerBase) -> Callable[[], None]:
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    optimizer = optimizer_of(model)
    examples = [
        (tokenizer(row["prompt"]).input_ids, [*tokenizer(row["completion"]).input_ids, tokenizer.eos_token_id])
        for row in example_work.demonstrations(given.batch * given.steps)
    ]

    def train() -> None:
        for parts in batches(given, examples, lambda example: len(example[0]) + len(example[1])):
            learned = sum(len(completion) for part in parts for _, completion in part)
            for part in parts:
                ids, mask = padded([prompt + completion for prompt, completion in part])
                labels = padded([[-100] * len(prompt) + completion for prompt, completion in part])[0]
                labels = torch.where(mask.bool(), labels, -100)[:, 1:]
                hidden = model.model(input_ids=ids, attention_mask=mask, use_cache=False)[0][:, :-1]
                logits = model.lm_head(hidden[labels >= 0])
                (nn.functional.cross_entropy(logits, labels[labels >= 0], reduction="sum") / learned).backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def reward(given: Namespace, tokenizer: PreTrainedTokenizerBase) -> Callable[[], None]:
    model = AutoModelForSequenceClassification.from_pretrained(f"{given.model}-classifier", dtype=torch.float32)
    optimizer = optimizer_of(model)
    pairs = [
        [[*tokenizer(row["prompt"] + row[side]).input_ids, tokenizer.eos_token_id] for side in ("chosen", "rejected")]
        for row in example_work.pairs(given.batch * given.steps)
    ]

    def train() -> None:
        for parts in batches(given, pairs, lambda pair: max(map(len, pair))):
            for part in parts:
                ids, mask = padded([row for pair in part for row in pair])
                hidden = model.model(input_ids=ids, attention_mask=mask, use_cache=False)[0]
                last = hidden[torch.arange(len(ids)), mask.sum(1).long() - 1]
                scores = model.score(last).view(-1, 2)
                (-nn.functional.logsigmoid(scores[:, 0] - scores[:, 1]).sum() / given.batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def grpo(given: Namespace, tokenizer: PreTrainedTokenizerBase) -> Callable[[], None]:
    """Return what trains a policy on groups of responses, arXiv:2402.03300; the reward counts different tokens."""
    policy, trained, compared = (with_adapters if given.mode == "grpo-lora" else with_reference)(given.model)
    optimizer = optimizer_of(trained)
    # A prompt for each group, as ours has.
    texts = [text for text in work.prompts(given.batch * given.steps // GROUP) for _ in range(GROUP)]

    def train() -> None:
        for step in range(given.steps):
            prompts = tokenizer(texts[step * given.batch : (step + 1) * given.batch], padding=True, return_tensors="pt")
            response = sample(policy, prompts.input_ids, prompts.attention_mask)
            ids = torch.cat([prompts.input_ids, response], dim=1)
            mask = torch.cat([prompts.attention_mask, torch.ones_like(response)], dim=1)
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

    return train


MODES = {"sft": sft, "reward": reward, "grpo": grpo, "grpo-lora": grpo}


def main() -> None:
    """Print seconds, examples or tokens per second, and peak memory."""
    given = work.arguments(__doc__, tuple(MODES))
    tokenizer = AutoTokenizer.from_pretrained(given.model, padding_side="left")
    train = MODES[given.mode](given, tokenizer)
    start = perf_counter()
    train()
    seconds = perf_counter() - start
    if given.mode.startswith("grpo"):
        work.print_result(seconds, given.batch, given.steps, work.peak_gib())
        return
    work.print_json({
        "seconds": seconds,
        "examples_per_second": given.batch * given.steps / seconds,
        "peak_rss_gib": work.peak_gib(),
    })  # fmt: skip


if __name__ == "__main__":
    main()
