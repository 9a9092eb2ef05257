"""One step's statistics of its rollouts; every one is explained in docs/algorithms/ppo.md."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from dressage.ops import kl
from dressage.ops.masked import weighted_mean, weighted_var
from dressage.types import Batch


class Clock:
    """Seconds spent per stage of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = perf_counter()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = perf_counter()
        yield
        self.seconds[f"time/{stage}"] = self.seconds.get(f"time/{stage}", 0.0) + perf_counter() - start

    def total(self) -> float:
        return perf_counter() - self._start


def rollout_metrics(batch: Batch, rows: Mapping[str, Sequence[Any]], kl_coef: float) -> dict[str, float]:
    """Rewards, KL, entropy, lengths and values of one step's rollouts, before any update."""
    mask = batch["mask"]
    spreads = {
        "reward/": torch.tensor(rows["reward"]),
        "kl/objective_": _per_response(kl.k1(batch["logprob"], batch["ref_logprob"]), mask),
        "length/response_": mask.sum(1),
        "length/prompt_": batch["prompt_mask"].sum(1).float(),
    }
    metrics = {f"{name}mean": float(x.mean()) for name, x in spreads.items()}
    metrics |= {f"{name}std": float(x.std(correction=0)) for name, x in spreads.items()}
    metrics["kl/objective"] = metrics.pop("kl/objective_mean")
    metrics |= {
        "reward/shaped": float(batch["shaped_reward"].mean()),
        "kl/objective_k3": float(_per_response(kl.k3(batch["logprob"], batch["ref_logprob"]), mask).mean()),
        "kl/penalty": float(_per_response(batch["kl_penalty"], mask).mean()),
        "kl/coef": kl_coef,
        "reward/kl_per_token": float(weighted_mean(-kl_coef * batch["kl_penalty"], mask)),
        "entropy/sampled": float(_per_response(-batch["logprob"], mask).mean()),
        "logprob/policy": float(weighted_mean(batch["logprob"], mask)),
        "logprob/reference": float(weighted_mean(batch["ref_logprob"], mask)),
        "logprob/sampler_gap": float(weighted_mean((batch["logprob"] - batch["sampler_logprob"]).abs(), mask)),
    }
    for name in ("value", "return", "advantage"):
        metrics[f"{name}/rollout_mean"] = float(weighted_mean(batch[name], mask))
        metrics[f"{name}/rollout_var"] = float(weighted_var(batch[name], mask))
    for reason in ("eos", "stop", "length"):
        metrics[f"finish/{reason}"] = sum(r == reason for r in rows["finish_reason"]) / len(rows["finish_reason"])
    return metrics | _part_means(rows["reward_parts"])


def _per_response(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).masked_fill(mask == 0, 0.0).sum(1)


def _part_means(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {f"reward/part/{name}": sum(p[name] for p in parts) / len(parts) for name in parts[0]}
