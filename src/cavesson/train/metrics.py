"""Statistics of one step's rollouts; all of them are explained in docs/algorithms/ppo.md."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from time import perf_counter

import torch
import xxhash
from torch import Tensor

from cavesson.ops import kl
from cavesson.ops.masked import weighted_var
from cavesson.ops.ratios import response_sum
from cavesson.processes import Processes
from cavesson.text.statistics import response_statistics
from cavesson.types import Batch, Rollouts


class Clock:
    """Seconds spent per stage of a step; `enter` is called with the name of every stage that begins."""

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


def staleness_metrics(rollouts: Rollouts, step: int, processes: Processes) -> dict[str, float]:
    """Return the age of the weights that sampled the tokens, in training steps, if any of them is above 0."""
    age = (step - rollouts["sampler_version"]).double()
    mask = rollouts["learned"]
    oldest = float(processes.rows((age * mask).amax(1)).max())
    return {"staleness/mean": float(processes.mean(age, mask)), "staleness/max": oldest} if oldest else {}


def unscored_metrics(rollouts: Rollouts, processes: Processes) -> dict[str, float]:
    """Return the share of a step's responses that no reward judges."""
    return {"reward/unscored": 1 - _mean(rollouts.is_scored.double(), processes)}


def rollout_metrics(
    rollouts: Rollouts, kl_coef: float | None, estimator: str | None, processes: Processes
) -> dict[str, float]:
    """Return metrics of rewards, KL, entropy, lengths and values of one step's rollouts, before any update.

    All processes call this together, and get metrics of the rollouts of all of them. `kl_coef` is β in force, or None
    if the algorithm has no KL penalty; `estimator` that of the penalty of every token, or None if the algorithm does
    not read it.
    """
    batch, mask, mean = rollouts.batch, rollouts["learned"], processes.mean
    spreads = {
        **({"reward/": batch["reward"]} if rollouts.has_rewards else {}),
        "length/response_": mask.sum(1),
        "length/prompt_": batch["prompt_mask"].sum(1).float(),
    }
    metrics = {f"{name}mean": _mean(x, processes) for name, x in spreads.items()}
    metrics |= {f"{name}std": _std(x, processes) for name, x in spreads.items()}
    if rollouts.has_rewards:
        metrics["reward/shaped"] = _mean(batch["shaped_reward"], processes)
    metrics |= {
        "entropy/sampled": _mean(response_sum(-batch["logprob"], mask), processes),
        "logprob/policy": float(mean(batch["logprob"], mask)),
        "logprob/sampler_gap": float(mean((batch["logprob"] - batch["sampler_logprob"]).abs(), mask)),
    }
    for name in ("value", "return", "advantage"):
        if name in batch:
            metrics[f"{name}/rollout_mean"] = float(mean(batch[name], mask))
            metrics[f"{name}/rollout_var"] = float(weighted_var(batch[name], mask, mean))
    if "ref_logprob" in batch:
        metrics |= _reference_metrics(batch, kl_coef, processes)
    if estimator is not None and kl_coef is not None:
        metrics["kl/penalty"] = _mean(response_sum(batch["kl_penalty"], mask), processes)
        metrics["reward/kl_per_token"] = float(mean(-kl_coef * batch["kl_penalty"], mask))
    return metrics | _text_metrics(rollouts, processes)


def _mean(x: Tensor, processes: Processes) -> float:
    """Return the mean of a column `[b]` over the rows of all processes."""
    return float(processes.mean(x, torch.ones_like(x)))


def _std(x: Tensor, processes: Processes) -> float:
    """Return the standard deviation of a column `[b]` over the rows of all processes."""
    return float(weighted_var(x, torch.ones_like(x), processes.mean).sqrt())


def _text_metrics(rollouts: Rollouts, processes: Processes) -> dict[str, float]:
    """Return how responses ended, the parts of their rewards, and the statistics of their texts.

    Diversity is that of all responses together, so the main process gets their token ids, and digests of their texts.
    """
    reasons, parts = rollouts.finish_reason, rollouts.reward_parts
    ends = dict.fromkeys(("eos", "stop", "length", *reasons))
    per_row = {f"finish/{reason}": [float(one == reason) for one in reasons] for reason in ends}
    # A reward may return other parts for other responses, and so in other processes.
    names = dict.fromkeys(name for part in parts for name in part)
    per_row |= {f"reward/part/{name}": [part[name] for part in parts if name in part] for name in names}
    totals = processes.combine({name: float(sum(values)) for name, values in per_row.items()}, sum)
    rows = processes.combine({name: float(len(values)) for name, values in per_row.items()}, sum)
    metrics = {name: total / rows[name] for name, total in totals.items()}
    digests = [xxhash.xxh3_64_intdigest(text.encode()) >> 1 if text else 0 for text in rollouts.response]  # fits int64
    tokens = (rollouts["response_ids"].int() + 1) * (rollouts["learned"] > 0)  # 0 is also what pads the rows of others
    order = processes.rows(torch.tensor(rollouts.sample, dtype=torch.long)).argsort()
    texts, padded = (processes.rows(x)[order].tolist() for x in (torch.tensor(digests, dtype=torch.long), tokens))
    if processes.is_main:
        metrics |= response_statistics(texts, [[token - 1 for token in row if token] for row in padded])
    return processes.of_main(metrics)


def episode_metrics(rollouts: Rollouts, processes: Processes) -> dict[str, float]:
    """Return how many turns the policy had in an episode, and of each tool the calls, their errors and their seconds.

    All processes call this together. Without turns, there are no metrics.
    """
    turns = list(chain.from_iterable(rollouts.turns))
    sums: dict[str, float] = {"episodes": float(len(rollouts.turns)), "turns": 0.0}
    for turn in turns:
        counted = {"turns": float(turn.role == "assistant")}
        if turn.name is not None:
            tool = f"tool/{turn.name}/"
            counted |= {f"{tool}calls": 1.0, f"{tool}errors": float(turn.error is not None)}
            counted[f"{tool}seconds"] = turn.seconds or 0.0
        sums |= {name: sums.get(name, 0.0) + value for name, value in counted.items()}
    total = processes.combine(sums, sum)
    episodes = total.pop("episodes")
    if not episodes:
        return {}
    found = {"episode/turns": total.pop("turns") / episodes}
    for name, value in total.items():
        tool, _, quantity = name.rpartition("/")
        found[name] = value / (episodes if quantity == "calls" else total[f"{tool}/calls"])
    return found


def value_metrics(metrics: Mapping[str, float], updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return metrics that need both the rollouts and the update."""
    found = {}
    if "value/error" in metrics and metrics["return/rollout_var"]:
        found["value/explained_variance"] = 1 - metrics["value/error"] / metrics["return/rollout_var"]
    if "policy/ratio_error_max" in updates[0]:
        found["policy/first_ratio_error"] = updates[0]["policy/ratio_error_max"]
        found["policy/first_approx_kl"] = updates[0]["policy/approx_kl"]
    return found


def _reference_metrics(batch: Batch, kl_coef: float | None, processes: Processes) -> dict[str, float]:
    mask, logprob, reference = batch["learned"], batch["logprob"], batch["ref_logprob"]
    objective = response_sum(kl.k1(logprob, reference), mask)
    return {
        "kl/objective": _mean(objective, processes),
        "kl/objective_std": _std(objective, processes),
        "kl/objective_k3": _mean(response_sum(kl.k3(logprob, reference), mask), processes),
        **({} if kl_coef is None else {"kl/coef": kl_coef}),
        "logprob/reference": float(processes.mean(reference, mask)),
    }
