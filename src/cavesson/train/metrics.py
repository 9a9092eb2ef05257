"""Statistics of one step's rollouts; all of them are explained in docs/algorithms/ppo.md."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter

from cavesson.ops import kl
from cavesson.ops.masked import weighted_mean, weighted_var
from cavesson.ops.ratios import response_sum
from cavesson.text.statistics import response_statistics
from cavesson.types import Batch, Rollouts


class Clock:
    """Seconds spent per stage of a step.

    Args:
        enter: called with the name of every stage that begins.
    """

    def __init__(self, enter: Callable[[str], None]) -> None:
        self._enter = enter
        self.seconds: dict[str, float] = {}
        self._start = perf_counter()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self._enter(stage)
        start = perf_counter()
        yield
        self.seconds[f"time/{stage}"] = self.seconds.get(f"time/{stage}", 0.0) + perf_counter() - start

    def metrics(self, tokens: float) -> dict[str, float]:
        """Return the seconds per stage and of the whole step, and the tokens per second."""
        total = perf_counter() - self._start
        return {**self.seconds, "time/total": total, "tokens_per_second": tokens / total}


def staleness_metrics(rollouts: Rollouts, step: int) -> dict[str, float]:
    """Return the age of the weights that sampled the tokens, in training steps, if any of them is above 0."""
    age = (step - rollouts["sampler_version"]).double()
    mask = rollouts["mask"]
    oldest = float((age * mask).max())
    return {"staleness/mean": float(weighted_mean(age, mask)), "staleness/max": oldest} if oldest else {}


def rollout_metrics(rollouts: Rollouts, kl_coef: float, estimator: str | None) -> dict[str, float]:
    """Return metrics of rewards, KL, entropy, lengths and values of one step's rollouts, before any update.

    Args:
        rollouts: with their credit.
        kl_coef: β in force.
        estimator: of the KL penalty, or None for no penalty.
    """
    batch, mask = rollouts.batch, rollouts["mask"]
    spreads = {
        "reward/": batch["reward"],
        "length/response_": mask.sum(1),
        "length/prompt_": batch["prompt_mask"].sum(1).float(),
    }
    metrics = {f"{name}mean": float(x.mean()) for name, x in spreads.items()}
    metrics |= {f"{name}std": float(x.std(correction=0)) for name, x in spreads.items()}
    metrics |= {
        "reward/shaped": float(batch["shaped_reward"].mean()),
        "entropy/sampled": float(response_sum(-batch["logprob"], mask).mean()),
        "logprob/policy": float(weighted_mean(batch["logprob"], mask)),
        "logprob/sampler_gap": float(weighted_mean((batch["logprob"] - batch["sampler_logprob"]).abs(), mask)),
    }
    for name in ("value", "return", "advantage"):
        if name in batch:
            metrics[f"{name}/rollout_mean"] = float(weighted_mean(batch[name], mask))
            metrics[f"{name}/rollout_var"] = float(weighted_var(batch[name], mask))
    for reason in ("eos", "stop", "length"):
        metrics[f"finish/{reason}"] = rollouts.finish_reason.count(reason) / len(rollouts)
    if "ref_logprob" in batch:
        metrics |= _reference_metrics(batch, kl_coef)
    if estimator is not None:
        metrics["kl/penalty"] = float(response_sum(batch["kl_penalty"], mask).mean())
        metrics["reward/kl_per_token"] = float(weighted_mean(-kl_coef * batch["kl_penalty"], mask))
    ids = [row[: int(length)] for row, length in zip(batch["response_ids"].tolist(), mask.sum(1), strict=True)]
    parts = rollouts.reward_parts
    means = {f"reward/part/{name}": sum(part[name] for part in parts) / len(parts) for name in parts[0]}
    return metrics | means | response_statistics(rollouts.response, ids)


def value_metrics(metrics: Mapping[str, float], updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return metrics that need both the rollouts and the update."""
    found = {}
    if "value/error" in metrics and metrics["return/rollout_var"]:
        found["value/explained_variance"] = 1 - metrics["value/error"] / metrics["return/rollout_var"]
    if "policy/ratio_error_max" in updates[0]:
        found["policy/first_ratio_error"] = updates[0]["policy/ratio_error_max"]
        found["policy/first_approx_kl"] = updates[0]["policy/approx_kl"]
    return found


def _reference_metrics(batch: Batch, kl_coef: float) -> dict[str, float]:
    mask, logprob, reference = batch["mask"], batch["logprob"], batch["ref_logprob"]
    objective = response_sum(kl.k1(logprob, reference), mask)
    return {
        "kl/objective": float(objective.mean()),
        "kl/objective_std": float(objective.std(correction=0)),
        "kl/objective_k3": float(response_sum(kl.k3(logprob, reference), mask).mean()),
        "kl/coef": kl_coef,
        "logprob/reference": float(weighted_mean(reference, mask)),
    }
