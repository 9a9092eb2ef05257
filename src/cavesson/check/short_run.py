"""A short run: its memory and time; and of a policy, without KL penalty, responses and a suggested KL coefficient."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from cavesson.algorithms.runs import ExampleRun, RolloutRun
from cavesson.check.disk import gigabytes
from cavesson.config import check
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.findings import findings_in
from cavesson.doctor.plugins import all_rules
from cavesson.doctor.words import language
from cavesson.findings.finding import Finding, Result, Results
from cavesson.memory import peak_resident
from cavesson.record import open as open_run
from cavesson.scratch import Scratch
from cavesson.train.run import Training

Row = dict[str, Any]

TARGET = 6.0
"""Nats per response: the target of the first adaptive controllers (arXiv:1909.08593)."""
_MAX_CUT = 0.5
_MAX_EQUAL = 0.5
NO_MEMORY = "The run will run out of memory"
LESS_MEMORY = (
    "a smaller update.micro_batch_size; model.gradient_checkpointing = true; model.lora; shorter prompts "
    "(data.max_prompt_tokens, data.max_length)"
)
_WEAKER, _STRONGER = 100.0, 10.0
"""How far a coefficient may be off. A weak one shows late: most runs stop long before their optimum."""


@dataclass(frozen=True)
class First:
    """Statistics of the first responses."""

    responses: int
    ended: float
    """share that ended by themselves"""
    lengths: tuple[int, int, int]
    """tokens of the shortest, the middle and the longest"""
    reward: float | None
    """None if nothing rewards them"""
    reward_std: float | None
    equal_groups: float | None
    """share of groups whose responses all have the same reward; None where nothing compares those of a group"""
    samples: tuple[tuple[str, str, float | None], ...]
    """a few prompts, responses and rewards"""


@dataclass(frozen=True)
class Suggestion:
    """A suggested KL coefficient."""

    coef: float
    target: float
    reward_std: float
    follows: float
    """correlation of the log-ratio with the reward, over responses"""
    kl: float
    """of the last step, nats per response"""
    kl_std: float


class Measured(NamedTuple):
    """What a short run has measured."""

    batch: str
    """of a step: "64 responses" """
    seconds: float
    """of a step, the median"""
    peak: int
    """peak memory of this process, in bytes; 0: the system does not report it"""
    first: First | None = None
    """None: the run samples nothing"""
    suggestion: Suggestion | None = None
    """None: the algorithm has no KL penalty"""
    errors: Sequence[Finding] = ()
    """what the doctor finds in the record"""


def suggested_coefficient(reward_std: float, follows: float, target: float) -> float:
    """Return the KL coefficient β at which reward and penalty balance at the target KL.

    Training maximises E[r] − β·KL. Multiplying a log-ratio Δ by s changes the mean reward by s·Cov(r, Δ) and gives a KL
    of s²·Var(Δ)/2, to lowest order. With the correlation ρ of r and Δ, the best s gives a KL of ρ²σ²/(2β²) nats: the
    reward grows with the square root of the KL, as has been measured (arXiv:2204.05862, section 4.3;
    arXiv:2210.10760), and β = ρσ/√(2·KL*) gives the target KL*. With ρ = 1 this is the optimum π ∝ π_ref·exp(r/β) of
    normal rewards (arXiv:2205.11275); no policy can follow its reward that closely, so real ones stay far below it.

    The same balance holds for a KL in the loss of every token: advantage and KL of a response are summed over the same
    tokens.

    Args:
        reward_std: σ of what the algorithm maximises, over responses to the same prompt if it compares those.
        follows: ρ, over the same responses.
        target: the target KL*, in nats per response.
    """
    return follows * reward_std / math.sqrt(2 * target)


def correlation(rewards: Sequence[Sequence[float]], log_ratios: Sequence[Sequence[float]]) -> float:
    """Compute the correlation within groups, but at least 1/√n, the standard error if there is none."""
    reward, ratio = (np.concatenate([np.array(g) - np.mean(g) for g in groups]) for groups in (rewards, log_ratios))
    norm = math.sqrt(float(reward @ reward) * float(ratio @ ratio))
    return max(1 / math.sqrt(len(reward)), float(reward @ ratio) / norm if norm else 0.0)


def short_settings(settings: Any, rollouts: int, steps: int, folder: Path) -> Any:
    """Return the settings of a short run of one process; a policy has no penalty, but a reference to measure the KL."""
    values: dict[str, Any] = settings.model_dump(exclude_unset=True)
    values |= {"run": folder / "run", "steps": steps, "record": None, "trackers": (), "evaluation": {}}
    changed: dict[str, dict[str, Any]] = {
        "parallel": {"shard": "none"},
        "data": {"validation": 0.0, "validation_path": None, "validation_split": None},
        "checkpoint": {"every": 0, "keep": 2},
        "optimizer": {"warmup_steps": 0, "schedule": "constant"},
    }
    if isinstance(settings, RolloutRun):
        group = settings.smallest_batch
        values["batch_size"] = max(group, min(rollouts, settings.batch_size) // group * group)
        changed |= _without_penalty(settings, values["batch_size"])
        changed["checkpoint"]["updates"] = 0
        # Settings that have no effect without a penalty, or with one optimiser step, would be rejected.
        for owner, _, idle in (name.partition(".") for name in settings.penalty_settings):
            values.get(owner, {}).pop(idle, None)
    for name, update in changed.items():
        values[name] = {**values.get(name, {}), **update}
    return check(type(settings), values, "the short run")


def _without_penalty(settings: RolloutRun, batch: int) -> dict[str, dict[str, Any]]:
    mini_batches = min(settings.update.mini_batches, settings.learned_from(batch))
    return {
        "kl": {"coef": 0.0, "target": None, "horizon": 10_000},
        "update": {"mini_batches": mini_batches, "target_policy_kl": None},
        "reference": {"kind": "auto"} if settings.reference.kind == "none" else {},
    }


def short_run(settings: RolloutRun | ExampleRun, rollouts: int, steps: int) -> Measured:
    """Train a few steps in a temporary folder, and return what was measured."""
    with Scratch("check") as folder:
        short = short_settings(settings, rollouts, steps, Path(folder.name))
        training = Training(short)
        ends = [perf_counter()]
        training.run(report=lambda _step, _metrics: ends.append(perf_counter()))
        seconds = median(after - before for before, after in pairwise(ends))
        if isinstance(settings, ExampleRun):
            return Measured(f"{short.batch_size} examples", seconds, peak_resident())
        run = open_run(short.run)
        rows = run.rows().to_pylist()
        errors = _diagnosed(RunData(run))
    compared = settings.samples_per_prompt if settings.algorithm.traits.grouped else 1
    suggestion = _suggestion(settings, rows) if settings.kl_use else None
    batch = f"{short.batch_size} responses"
    return Measured(batch, seconds, peak_resident(), _first(rows, compared), suggestion, errors)


def _diagnosed(data: RunData) -> list[Finding]:
    """Return the doctor's errors in the short run's record, such as a ratio that is not 1 before the first update.

    The doctor's warnings need more steps.
    """
    # The settings already say whether end tokens were forbidden, so that rule is not needed.
    rules = [rule for rule in all_rules() if rule.name != "end-forbidden"]
    found = findings_in(diagnose(data, rules), language("en"))
    return [one for one in found if one.root and one.severity == "error"]


def judge_memory(measured: Measured, has: int) -> Results:
    """Compare the measured peak, if the system reports it, with the bytes that the run may take."""
    if measured.peak:
        yield Finding(
            "memory-measured",
            "error",
            NO_MEMORY,
            f"This process took {gigabytes(measured.peak)} at the peak of the short run.",
            LESS_MEMORY,
            gigabytes(measured.peak),
            f"at the peak of the short run, with {measured.batch} a step; at most {gigabytes(has)}",
        ).unless(measured.peak <= has)


def judge(first: First, suggestion: Suggestion | None, settings: RolloutRun) -> Results:
    """Judge the first responses and the KL coefficient of the recipe, if there is one."""
    cut = 1 - first.ended
    yield Finding(
        "responses-cut",
        "warning",
        "Most responses do not end",
        f"{cut:.0%} of the first responses are cut at {settings.sampling.longest} tokens; the reward sees only the "
        "beginning of a response.",
        "a larger sampling.max_new_tokens; or fine-tune first on responses that end; or sampling.eos_token_ids",
        cut,
        f"share of first responses cut at the length limit; at most {_MAX_CUT:g}",
        "DAPO, arXiv:2503.14476",
    ).unless(cut <= _MAX_CUT)
    if first.equal_groups is not None:
        yield Finding(
            "groups-equal",
            "warning",
            "Most groups carry no signal",
            "If all responses to a prompt have the same reward, there is nothing to compare.",
            "easier or harder prompts, more samples_per_prompt, or resample",
            first.equal_groups,
            f"share of groups whose responses all have the same reward; at most {_MAX_EQUAL:g}",
            "DAPO, arXiv:2503.14476",
        ).unless(first.equal_groups <= _MAX_EQUAL)
    if suggestion is not None:
        yield _coefficient(suggestion, settings)


def _coefficient(suggestion: Suggestion, settings: RolloutRun) -> Result:
    given = settings.kl.coef
    fixed = given > 0 and settings.kl.target is None
    off = fixed and not suggestion.coef / _WEAKER <= given <= suggestion.coef * _STRONGER
    low = given < suggestion.coef
    return Finding(
        "kl-coefficient-measured",
        "warning",
        "The penalty is much weaker than the reward" if low else "The penalty is much stronger than the reward",
        f"The standard deviation of the reward is {suggestion.reward_std:.3g}; without penalty, its correlation with "
        f"the log-ratio is {suggestion.follows:.2f}.",
        f"kl.coef = {suggestion.coef:.2g}, or kl.target = {suggestion.target:g}",
        given,
        f"β of the KL penalty; about {suggestion.coef:.2g} ends near {suggestion.target:g} nats per response",
        "arXiv:2205.11275; arXiv:2204.05862, section 4.3",
    ).unless(not off or suggestion.reward_std == 0)


def _first(rows: Sequence[Row], samples_per_prompt: int) -> First:
    rows = [row for row in rows if row["step"] == 0]
    rows.sort(key=lambda row: -math.inf if row["reward"] is None else row["reward"])
    lengths = sorted(row["length"] for row in rows)
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    groups = _groups(rows, "reward", samples_per_prompt)
    return First(
        responses=len(rows),
        ended=sum(row["finish_reason"] != "length" for row in rows) / len(rows),
        lengths=(lengths[0], lengths[len(lengths) // 2], lengths[-1]),
        reward=float(np.mean(rewards)) if rewards else None,
        reward_std=float(np.std(rewards)) if rewards else None,
        equal_groups=sum(len(set(group)) == 1 for group in groups) / len(groups) if samples_per_prompt > 1 else None,
        samples=tuple(
            (row["prompt"], row["response"], row["reward"]) for row in (rows[0], rows[len(rows) // 2], rows[-1])
        ),
    )


def _suggestion(settings: RolloutRun, rows: Sequence[Row]) -> Suggestion:
    last = max(row["step"] for row in rows)
    moved = [row for row in rows if row["step"] > 0] or rows
    # A single response per prompt is compared with the other responses of its step.
    together = settings.samples_per_prompt if settings.samples_per_prompt > 1 else settings.batch_size
    rewards, log_ratios = (_groups(moved, name, together) for name in ("shaped_reward", "kl_k1"))
    spread = math.sqrt(float(np.mean([np.var(group) for group in rewards])))
    if spread and settings.rewards_are_scaled:
        spread = 1.0
    spent = [row["kl_k1"] for row in rows if row["step"] == last]
    follows = correlation(rewards, log_ratios)
    target = settings.kl.target or TARGET
    coef = suggested_coefficient(spread, follows, target)
    return Suggestion(coef, target, spread, follows, float(np.mean(spent)), float(np.std(spent)))


def _groups(rows: Sequence[Row], name: str, together: int) -> list[list[float]]:
    """Group a column by step into groups of `together` consecutive samples."""
    found: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        found.setdefault((row["step"], row["sample"] // together), []).append(row[name])
    return list(found.values())
