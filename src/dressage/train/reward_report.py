"""What a reward model is worth: how often it is right on held-out pairs, when, and where it is most wrong."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from dressage.data.examples import Examples, size_of
from dressage.data.tokens import PairTokens, Tokens
from dressage.models.sequences import RewardModel
from dressage.record.files import write_json
from dressage.train.intervals import Interval, share_interval
from dressage.train.processes import Processes

Numbers = NDArray[np.float64]

CALIBRATION = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Bounds of the bins of confidence σ(|r_chosen − r_rejected|)."""
EXTREMES = 5
"""Pairs in each list of extreme cases."""


@dataclass(frozen=True)
class Scored:
    """Held-out pairs with their rewards and lengths in tokens, `[N]` each."""

    pairs: Sequence[PairTokens]
    chosen: Numbers
    rejected: Numbers

    @property
    def right(self) -> NDArray[np.bool_]:
        return self.chosen > self.rejected

    @property
    def longer_by(self) -> Numbers:
        """How many learned tokens the chosen response has more than the rejected one."""
        return np.array([sum(pair.chosen.learn) - sum(pair.rejected.learn) for pair in self.pairs], dtype=float)


@torch.no_grad()
def score(model: RewardModel, examples: Examples[PairTokens], processes: Processes, at_once: int) -> Scored:
    """Rewards of all held-out pairs; every process scores its share."""
    pairs = examples.held_out
    device = next(model.parameters()).device
    order = sorted(processes.share(len(pairs)), key=lambda i: size_of(pairs[i]))
    rewards = torch.zeros(len(pairs), 2)
    for start in range(0, len(order), at_once):
        rows = order[start : start + at_once]
        seen = model(examples.collate([pairs[i] for i in rows]).to(device))
        rewards[rows] = torch.stack([seen.chosen, seen.rejected], dim=1).cpu()
    chosen, rejected = processes.sum_tensor(rewards).double().numpy().T
    return Scored(pairs, chosen, rejected)


def summarise(scored: Scored) -> dict[str, Any]:
    """Every figure of the report, as plain values."""
    right, longer = scored.right, scored.longer_by
    margins = np.abs(scored.chosen - scored.rejected)
    return {
        "pairs": len(scored.pairs),
        "accuracy": _share(right),
        "length_baseline": _share(longer > 0),
        "by_length": {
            "chosen longer": _share(right[longer > 0]),
            "same length": _share(right[longer == 0]),
            "chosen shorter": _share(right[longer < 0]),
        },
        "length_correlation": _rank_correlation(scored.chosen - scored.rejected, longer),
        "calibration": list(_calibration(1 / (1 + np.exp(-margins)), right)),
        "reward": {"mean": float(_both(scored).mean()), "std": float(_both(scored).std())},
    }


def warnings(summary: dict[str, Any]) -> list[str]:
    """What a user should be told about this reward model, in words."""
    found = []
    accuracy, baseline = summary["accuracy"], summary["length_baseline"]
    if accuracy["low"] <= 0.5:
        found.append("it is not better than a coin: the interval of its accuracy reaches down to 0.5")
    if accuracy["mean"] <= max(baseline["mean"], 1 - baseline["mean"]):
        found.append("looking at the length of the responses alone does as well")
    longer, shorter = summary["by_length"]["chosen longer"], summary["by_length"]["chosen shorter"]
    if longer and shorter and (longer["low"] > shorter["high"] or shorter["low"] > longer["high"]):
        liked = "long" if longer["mean"] > shorter["mean"] else "short"
        found.append(
            f"it likes {liked} responses: right {longer['mean']:.0%} of the time where the better one is longer, "
            f"{shorter['mean']:.0%} where it is shorter"
        )
    return found


def write(scored: Scored, summary: dict[str, Any], tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write `reward_model.json` (figures and warnings) and `extreme_cases.jsonl` (texts) into the run's folder."""
    write_json(folder / "reward_model.json", {**summary, "warnings": warnings(summary)})
    lines = [json.dumps(case, ensure_ascii=False) for case in extreme_cases(scored, tokenizer)]
    (folder / "extreme_cases.jsonl").write_text("\n".join([*lines, ""]), encoding="utf-8")


def extreme_cases(scored: Scored, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """The pairs that are worth reading: most wrong, most surely right, and the highest and lowest rewards."""
    difference = scored.chosen - scored.rejected
    orders = {
        "most wrong": difference,
        "most surely right": -difference,
        "highest reward": -np.maximum(scored.chosen, scored.rejected),
        "lowest reward": np.minimum(scored.chosen, scored.rejected),
    }
    return [
        {"list": name, **_case(scored, row, tokenizer)}
        for name, order in orders.items()
        for row in np.argsort(order, kind="stable")[:EXTREMES].tolist()
    ]


def show(summary: dict[str, Any], folder: Path, console: Console) -> None:
    """Print the figures."""
    table = Table("held-out pairs", "share right", "95 % interval", "pairs", title="The reward model")
    lines = {
        "all": summary["accuracy"],
        **summary["by_length"],
        "the longer response, always": summary["length_baseline"],
        **{f"confidence {bin_['from']:.1f} to {bin_['to']:.1f}": bin_ for bin_ in summary["calibration"]},
    }
    for name, share in lines.items():
        if share:
            table.add_row(
                name, f"{share['mean']:.3f}", f"{share['low']:.3f} to {share['high']:.3f}", str(share["pairs"])
            )
    console.print(table)
    for warning in warnings(summary):
        console.print(Text(f"Careful: {warning}.", style="bold"))
    console.print(f"Pairs to look at: {folder}/extreme_cases.jsonl", soft_wrap=True, highlight=False)


def _both(scored: Scored) -> Numbers:
    return np.concatenate([scored.chosen, scored.rejected])


def _share(right: NDArray[np.bool_]) -> dict[str, Any] | None:
    if not len(right):
        return None
    interval: Interval = share_interval(int(right.sum()), len(right))
    return {**asdict(interval), "pairs": len(right)}


def _calibration(confidence: Numbers, right: NDArray[np.bool_]) -> Any:
    """How often the model is right where it gives its choice this probability: a line for each bin that has a pair."""
    for low, high in zip(CALIBRATION[:-1], CALIBRATION[1:], strict=True):
        inside = (confidence >= low) & ((confidence < high) | (high == CALIBRATION[-1]))
        if inside.any():
            share = _share(right[inside])
            assert share is not None
            yield {"from": low, "to": high, "confidence": float(confidence[inside].mean()), **share}


def _rank_correlation(x: Numbers, y: Numbers) -> float | None:
    """Spearman's ρ, ties sharing their mean rank; None where nothing varies."""
    ranks = [_ranks(values) for values in (x, y)]
    if min(rank.std() for rank in ranks) == 0:
        return None
    return float(np.corrcoef(*ranks)[0, 1])


def _ranks(values: Numbers) -> Numbers:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return np.asarray((last - (counts - 1) / 2)[inverse], dtype=float)


def _case(scored: Scored, row: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    pair = scored.pairs[row]
    prompt, chosen = _texts(pair.chosen, tokenizer)
    return {
        "pair": row,
        "chosen_reward": float(scored.chosen[row]),
        "rejected_reward": float(scored.rejected[row]),
        "prompt": prompt,
        "chosen": chosen,
        "rejected": _texts(pair.rejected, tokenizer)[1],
    }


def _texts(tokens: Tokens, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    begin = tokens.learn.index(True)
    return str(tokenizer.decode(list(tokens.ids[:begin]))), str(tokenizer.decode(list(tokens.ids[begin:])))
