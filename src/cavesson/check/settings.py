"""Checks of the settings alone: filtered sampling, learning rates and penalties out of range, and batch sizes."""

import math
from pathlib import Path

from cavesson.algorithms.judged import judged
from cavesson.algorithms.runs import ExampleRun, RolloutRun
from cavesson.command_line import continuation
from cavesson.findings.finding import Finding, Results
from cavesson.record.storage import check_new_record
from cavesson.record.write.lock import is_free
from cavesson.record.write.writable import check_writable

LARGEST_TARGET = 10.0
LARGEST_COEF = 0.2
"""Where TRL's and OpenAI's adaptive controllers begin."""
_LORA_FACTOR = 10.0
_LARGE_MODEL = 50e6
_RL_RATE = 5e-5


def check_settings(settings: RolloutRun | ExampleRun, weights: int, random: bool) -> Results:
    """Check everything that needs neither data nor a model.

    Of the model, the number of weights without embeddings is known, and whether it starts from random ones.
    """
    yield from _folder(settings.run)
    if settings.record is not None:
        check_new_record(settings.record)
    yield from _learning_rate(settings, weights, random)
    yield from _warm_up(settings)
    if isinstance(settings, RolloutRun):
        yield from judged(settings)
        yield from _penalty(settings)
        yield from _micro_batch(settings.update.micro_batch_size, settings.batch_size // settings.update.mini_batches)
    else:
        yield from _micro_batch(settings.update.micro_batch_size, settings.batch_size)


def _folder(run: Path) -> Results:
    check_writable(run)
    if not is_free(run):
        way = continuation(run)
        yield Finding(
            "run-folder",
            "error",
            "The run's folder exists already",
            f"{run} is not empty; a new run needs an empty or new folder.",
            "--run another folder" + (f", or continue that run with: {way}" if way else ""),
        )


def _penalty(settings: RolloutRun) -> Results:
    """Check target and coefficient of the KL penalty (rows 18 and 20)."""
    target, coef = settings.kl.target, settings.kl_coef
    if coef is None:
        return
    if target is not None:
        yield Finding(
            "kl-target",
            "warning",
            "The KL target is so large that policies may collapse",
            f"The penalty is adapted so that the KL reaches {target:g} nats per response.",
            "kl.target = 6",
            target,
            f"target of the KL in nats per response; at most {LARGEST_TARGET:g}, often 6",
            "TRL 0.7.10, how_to_train; arXiv:1909.08593",
        ).unless(target <= LARGEST_TARGET)
    yield Finding(
        "kl-coefficient",
        "warning",
        "The penalty may outweigh the reward",
        f"At β = {coef:g}, a KL of 10 nats costs {10 * coef:g}; rewards rarely vary that much.",
        "a short run without penalty suggests a coefficient: cavesson check … --short-run",
        coef,
        f"β of the KL penalty; at most {LARGEST_COEF:g}, often 0.02 to 0.05",
        "arXiv:2203.02155 (0.02), arXiv:2204.05862 (0.001), arXiv:2307.04964 (0.05)",
    ).unless(coef <= LARGEST_COEF or target is not None)


def highest_rate(weights: int) -> float:
    """Return the best learning rate for training a model of this size from scratch.

    It is 0.003239 − 0.0001395 · ln N, with N weights without embeddings (arXiv:2001.08361, equation D.1), but at least
    1e-4, the rate of GPT-3 with 13 billion parameters (arXiv:2005.14165, table 2.1).
    """
    return max(1e-4, 0.003239 - 0.0001395 * math.log(max(weights, 1)))


def _learning_rate(settings: RolloutRun | ExampleRun, weights: int, random: bool) -> Results:
    """Check the learning rate: too high causes rows 18 and 32 to 35, too low row 19.

    An update changes a weight by about the learning rate (Adam's bound, arXiv:1412.6980, section 2.1). Adapters need
    about ten times the learning rate of full training ("LoRA Without Regret", thinkingmachines.ai, 2025).
    """
    rate, adapters = settings.optimizer.learning_rate, settings.model.lora is not None
    is_rl = isinstance(settings, RolloutRun) and not random and weights >= _LARGE_MODEL
    highest = (_LORA_FACTOR if adapters else 1.0) * (_RL_RATE if is_rl else 3 * highest_rate(weights))
    healthy = f"learning rate; at most about {highest:.1g} for {'adapters on ' if adapters else ''}{weights:,} weights"
    steps = settings.steps or 1000
    if rate > highest:
        yield Finding(
            "learning-rate",
            "warning",
            "The learning rate is high",
            "Ratios, gradients and the KL will grow out of bounds before the reward improves."
            if is_rl
            else "It is higher than the usual rate for training such a model from scratch: the model will forget.",
            f"optimizer.learning_rate = {highest / 5:.0e}",
            rate,
            healthy,
            "arXiv:2203.02155 and TRL 0.7.10 (1e-5 for PPO)" if is_rl else "arXiv:2001.08361, equation D.1",
        )
        return
    yield Finding(
        "learning-rate",
        "warning",
        "Nothing will be learned",
        f"AdamW moves a weight by about the learning rate: in {steps} steps by {rate * steps:.0e}, where weights are "
        "about 0.02.",
        "optimizer.learning_rate = 1e-5",
        rate,
        healthy,
        "arXiv:1412.6980, section 2.1",
    ).unless(rate * steps >= 1e-6)


def _warm_up(settings: RolloutRun | ExampleRun) -> Results:
    warm_up, steps = settings.optimizer.warmup_steps, settings.steps
    if steps is not None and warm_up >= steps:
        yield Finding(
            "warm-up",
            "warning",
            "The learning rate never reaches its peak",
            f"It rises over {warm_up} steps, and the run has {steps}.",
            f"optimizer.warmup_steps = {steps // 10}",
            warm_up,
            "steps of warm-up; fewer than the run has",
        )


def _micro_batch(micro: int, rows: int) -> Results:
    if micro > rows:
        yield Finding(
            "micro-batch",
            "note",
            "The micro-batch is larger than the batch",
            f"An optimiser step has only {rows} sequences; the limit has no effect.",
            f"update.micro_batch_size = {rows}, or less to save memory",
            micro,
            f"sequences in memory at a time; at most {rows}",
        )
