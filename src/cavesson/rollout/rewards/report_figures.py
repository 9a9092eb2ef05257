"""Statistics of a reward model on held-out pairs: how often it is right, in which cases, and where it is most wrong.

A pair with equal rewards counts as half right, because a random choice between the two is right half of the time. A
model that gives every response the same reward thus has an accuracy of 0.5, like a random choice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedTokenizerBase

from cavesson.correlation import rank_correlation
from cavesson.data.examples import Examples, PairTokens, Tokens
from cavesson.ops.intervals import share_interval, twin_correlation
from cavesson.processes import Processes

Numbers = NDArray[np.float64]
Prompts = NDArray[np.int64]

CALIBRATION = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Bounds of the bins of confidence σ(|r_chosen − r_rejected|)."""
LENGTH_GROUPS = 5
"""Groups of pairs by difference of length, of about equal size."""
EXTREMES = 5
"""Pairs in each list of extreme cases."""
MANY_TIES = 0.05
"""Share of equal rewards that is worth a warning."""


@dataclass(frozen=True)
class ScoredPairs:
    """Held-out pairs with their rewards, `[N]` each."""

    pairs: Sequence[PairTokens]
    chosen: Numbers
    rejected: Numbers

    @property
    def difference(self) -> Numbers:
        return self.chosen - self.rejected

    @property
    def right(self) -> Numbers:
        """1 if the chosen response has the higher reward, ½ if both are equal, else 0."""
        return _half_for_ties(self.difference)

    @property
    def longer_by(self) -> Numbers:
        """The number of learned tokens of the chosen response minus that of the rejected one."""
        return np.array([sum(pair.chosen.learn) - sum(pair.rejected.learn) for pair in self.pairs], dtype=float)

    @property
    def prompt(self) -> Prompts:
        """The number of the prompt of each pair; pairs of the same prompt are not independent."""
        numbers: dict[tuple[int, ...], int] = {}
        asked = (tuple(pair.chosen.ids[: pair.chosen.learn.index(True)]) for pair in self.pairs)
        return np.array([numbers.setdefault(prompt, len(numbers)) for prompt in asked], dtype=np.int64)


@torch.no_grad()
def score(model: nn.Module, examples: Examples[PairTokens], processes: Processes, at_once: int) -> ScoredPairs:
    """Score all held-out pairs with a `RewardModel`; every process scores its share."""
    pairs = examples.held_out
    device = next(model.parameters()).device
    order = sorted(processes.share(len(pairs)), key=lambda i: pairs[i].size)
    rewards = torch.zeros(len(pairs), 2)
    for rows in processes.micro_batches(order, at_once):
        seen = model(examples.collate([pairs[i] for i in rows or [0]]).to(device))
        rewards[rows] = torch.stack([seen.chosen, seen.rejected], dim=1).cpu()[: len(rows)]
    chosen, rejected = processes.sum_tensor(rewards).double().numpy().T
    return ScoredPairs(pairs, chosen, rejected)


def summarise(scored: ScoredPairs) -> dict[str, Any]:
    """Return all statistics of the report as plain values; None if the pairs do not determine a statistic."""
    right, longer, difference, prompts = scored.right, scored.longer_by, scored.difference, scored.prompt
    confidence = 1 / (1 + np.exp(-np.abs(difference)))
    margins = np.array([pair.margin or 0.0 for pair in scored.pairs])
    both = np.concatenate([scored.chosen, scored.rejected])
    prompt = twin_correlation(scored.chosen.tolist(), scored.rejected.tolist())
    return {
        "pairs": len(scored.pairs),
        "loss": float(np.logaddexp(0, margins - difference).mean()),
        "accuracy": _share(right, prompts),
        "ties": float((difference == 0).mean()),
        "length_baseline": _share(_half_for_ties(longer), prompts),
        "by_length": {
            "chosen longer": _share(right[longer > 0], prompts[longer > 0]),
            "same length": _share(right[longer == 0], prompts[longer == 0]),
            "chosen shorter": _share(right[longer < 0], prompts[longer < 0]),
        },
        "by_length_difference": list(_by_length_difference(longer, right, prompts)),
        "length_correlation": rank_correlation(difference, longer),
        "confidence": float(confidence.mean()),
        "calibration": list(_calibration(confidence, right, prompts)),
        "prompt_correlation": prompt and asdict(prompt),
        "reward": {"mean": float(both.mean()), "std": float(both.std())},
    }


def warnings(summary: dict[str, Any]) -> list[str]:
    """Return warnings about this reward model, in words."""
    return [*_about_accuracy(summary), *_about_length(summary), *_about_confidence(summary), *_about_prompts(summary)]


def extreme_cases(scored: ScoredPairs, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return the pairs worth reading: the most wrong, the most surely right, and the highest and lowest rewards."""
    difference = scored.difference
    everywhere = np.ones(len(difference), dtype=bool)
    lists = {
        "most wrong": (difference, difference < 0),
        "most surely right": (-difference, difference > 0),
        "highest reward": (-np.maximum(scored.chosen, scored.rejected), everywhere),
        "lowest reward": (np.minimum(scored.chosen, scored.rejected), everywhere),
    }
    return [
        {"list": name, **_case(scored, row, tokenizer)}
        for name, (order, member) in lists.items()
        for row in [row for row in np.argsort(order, kind="stable").tolist() if member[row]][:EXTREMES]
    ]


def _half_for_ties(difference: Numbers) -> Numbers:
    return (1 + np.sign(difference)) / 2


def _share(right: Numbers, prompts: Prompts) -> dict[str, Any] | None:
    if not len(right):
        return None
    return {**asdict(share_interval(right.tolist(), prompts.tolist())), "pairs": len(right)}


def _by_length_difference(longer: Numbers, right: Numbers, prompts: Prompts) -> Iterator[dict[str, Any]]:
    """Yield the accuracy in each group of pairs; equal differences are in the same group."""
    inner = np.unique(np.quantile(longer, np.linspace(0, 1, LENGTH_GROUPS + 1)[1:-1]))
    group = np.searchsorted(inner, longer)
    for number in np.unique(group).tolist():
        inside = group == number
        bounds = {"from": float(longer[inside].min()), "to": float(longer[inside].max())}
        yield {
            **bounds,
            "mean_difference": float(longer[inside].mean()),
            **(_share(right[inside], prompts[inside]) or {}),
        }


def _calibration(confidence: Numbers, right: Numbers, prompts: Prompts) -> Iterator[dict[str, Any]]:
    """Yield the accuracy in each bin of confidence that has pairs."""
    for low, high in pairwise(CALIBRATION):
        inside = (confidence >= low) & ((confidence < high) | (high == CALIBRATION[-1]))
        if inside.any():
            share = _share(right[inside], prompts[inside]) or {}
            yield {"from": low, "to": high, "confidence": float(confidence[inside].mean()), **share}


def _about_accuracy(summary: dict[str, Any]) -> Iterator[str]:
    accuracy, ties = summary["accuracy"], summary["ties"]
    if accuracy["high"] < 0.5:
        yield "it is worse than chance: are chosen and rejected swapped?"
    elif accuracy["low"] <= 0.5:
        yield "it may be no better than chance: the interval of its accuracy reaches down to 0.5"
    if ties > MANY_TIES:
        yield (
            f"both responses get the same reward in {ties:.0%} of the pairs; common causes are bfloat16 "
            "and responses that data.max_length cuts off"
        )


def _about_length(summary: dict[str, Any]) -> Iterator[str]:
    accuracy, longest = summary["accuracy"]["mean"], summary["length_baseline"]["mean"]
    alone = max(longest, 1 - longest)
    if accuracy <= alone and alone > 0.5:
        kind = "longer" if longest > 0.5 else "shorter"
        yield f"always taking the {kind} response is right {alone:.0%} of the time, and the model {accuracy:.0%}"
    longer, shorter = summary["by_length"]["chosen longer"], summary["by_length"]["chosen shorter"]
    if longer and shorter and (longer["low"] > shorter["high"] or shorter["low"] > longer["high"]):
        liked = "long" if longer["mean"] > shorter["mean"] else "short"
        yield (
            f"it prefers {liked} responses: right {longer['mean']:.0%} of the time where the better one is longer, "
            f"{shorter['mean']:.0%} where it is shorter"
        )


def _about_confidence(summary: dict[str, Any]) -> Iterator[str]:
    if summary["confidence"] > summary["accuracy"]["high"]:
        yield (
            f"it is overconfident: its mean confidence is {summary['confidence']:.0%}, but it is right in only "
            f"{summary['accuracy']['mean']:.0%}; fewer epochs or a lower learning rate help"
        )


def _about_prompts(summary: dict[str, Any]) -> Iterator[str]:
    prompt = summary["prompt_correlation"]
    if prompt and prompt["low"] > 0.5:
        yield (
            f"the prompt explains {prompt['mean']:.0%} of the variance of the rewards, the response the rest; in PPO, "
            "set shaping.subtract_query; elsewhere, compare only responses to the same prompt"
        )


def _case(scored: ScoredPairs, row: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    pair = scored.pairs[row]
    return {
        "pair": row,
        "chosen_reward": float(scored.chosen[row]),
        "rejected_reward": float(scored.rejected[row]),
        "prompt": tokenizer.decode(list(pair.chosen.ids[: pair.chosen.learn.index(True)])),
        "chosen": _response(pair.chosen, tokenizer),
        "rejected": _response(pair.rejected, tokenizer),
    }


def _response(tokens: Tokens, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text that was rewarded, without special tokens."""
    return str(tokenizer.decode(list(tokens.ids[tokens.learn.index(True) :]), skip_special_tokens=True))
