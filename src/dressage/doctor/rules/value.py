"""The critic."""

import numpy as np

from dressage.doctor.data import RunData
from dressage.doctor.finding import Curve, Reading, Words
from dressage.doctor.rule import rule
from dressage.doctor.sample import Sample
from dressage.doctor.series import Array, Series, over_median, since, smoothed

WARM_UP = 0.3
"""Share of the run, at most 20 steps, in which a critic may still be learning."""


def returns(data: RunData, sample: Sample) -> Array:
    """Returns [N] what the value should have been: the discounted sum of the token rewards from here on.

    The recorded return is the critic's target, which leans on its own estimates where λ < 1.
    """
    gamma = float(data.setting("config.ppo.gamma", 1.0))
    rewards = np.where(sample.trained, sample["token_reward"], 0.0)
    found = np.zeros(len(sample))
    following, line = 0.0, -1
    for i in range(len(sample) - 1, -1, -1) if gamma != 1 else ():
        following = rewards[i] + gamma * (following if sample.line[i] == line else 0.0)
        found[i], line = following, sample.line[i]
    if gamma == 1:
        total = np.cumsum(rewards)
        end = np.searchsorted(sample.line, sample.line, side="right") - 1
        found = total[end] - total + rewards
    return np.where(sample.trained, found, np.nan)


def _warm(points: Series) -> Series:
    first = points.step[0] + min(20.0, WARM_UP * (points.step[-1] - points.step[0])) if len(points) else 0
    return points.where(points.step >= first)


def explained(data: RunData) -> Series:
    """Returns by step 1 − Var(G − V)/Var(G) over the trained tokens, where the returns G vary."""
    sample = data.sample
    goal, value = returns(data, sample), np.where(sample.trained, sample["value"], np.nan)
    all_of, left = sample.variance_by_step(goal), sample.variance_by_step(goal - value)
    known = all_of.value > 1e-8
    return Series(all_of.step[known], 1 - left.value[known] / all_of.value[known])


@rule(
    row=40,
    needs=["tokens.value", "tokens.token_reward"],
    least_steps=12,
    algorithms=["ppo"],
    title="The critic does not fit",
    cause="After its warm-up the explained variance of the returns is {seen}; below 0 the critic is worse than their "
    "mean, and the advantages are noise.",
    healthy="explained variance after the first steps: above 0, rising towards 1",
    fix="a learning rate of its own and some steps of warm-up for the critic; no narrow ppo.value_clip; check returns",
    source="Deep RL hacks (Schulman's talk); verl; Andy Jones, Debugging RL",
    explains=["reward-falls", "clip-fraction-high"],
)
def value_not_fitting(data: RunData) -> Reading | None:
    points = _warm(explained(data))
    if len(points) < 6:
        return None
    smooth = smoothed(points)
    first = since(smooth, smooth.value < -0.02, 6)
    evidence = data.step_evidence(points.step[np.argsort(points.value)][:3] if first is not None else [])
    return Reading(float(np.median(points.value)), first is not None, first, evidence, curve=Curve(points, 0.0, 1.0))


@rule(
    row=41,
    needs=["tokens.value", "tokens.token_reward"],
    severity="error",
    algorithms=["ppo"],
    title="The critic starts far from the returns",
    cause="At the first step the values are {seen} standard deviations of the returns away from them: a random head, "
    "or one copied from a reward model with an offset.",
    healthy="|mean(V − G)| / standard deviation of G at the first step: below 1",
    fix="start the value head at zero, or train the critic for some steps before the policy",
    source="The N implementation details of RLHF with PPO; VC-PPO 2503.01491",
    explains=["value-not-fitting", "length-collapse", "value-loss-spike"],
)
def value_start(data: RunData) -> Reading | None:
    sample = data.sample
    if sample.rows.steps[0] > 1:
        return None
    first = (sample.step == sample.rows.steps[0]) & sample.trained
    goal = returns(data, sample)[first]
    value = sample["value"][first]
    known = np.isfinite(goal) & np.isfinite(value)
    if known.sum() < 20 or goal[known].std() < 1e-6:
        return None
    away = float((value - goal)[known].mean() / goal[known].std())
    # A head of zeros is as far from the returns as their mean is from zero: that is not the head's fault.
    random_head = float(value[known].std() / goal[known].std()) > 0.5 or abs(value[known].mean()) > goal[known].std()
    sick = abs(away) > 1 and random_head
    return Reading(
        abs(away), sick, int(sample.rows.steps[0]) if sick else None, sample.evidence(np.arange(3)) if sick else ()
    )


@rule(
    row=42,
    needs=["tokens.value", "tokens.token_reward"],
    least_steps=12,
    algorithms=["ppo"],
    title="The critic says the same everywhere",
    cause="After its warm-up the values vary {seen} times as much as the returns do: the head is dead or cut off from "
    "the gradient.",
    healthy="standard deviation of V / of the returns: above 0.05",
    fix="check that the value loss reaches the head (ppo.value_coef, requires_grad) and its learning rate",
    source="own threshold",
    explains=["value-not-fitting"],
)
def value_constant(data: RunData) -> Reading | None:
    sample = data.sample
    goal = sample.variance_by_step(returns(data, sample))
    value = sample.variance_by_step(sample["value"])
    if len(goal) != len(value):
        return None
    known = goal.value > 1e-8
    points = _warm(Series(goal.step[known], np.sqrt(value.value[known] / goal.value[known])))
    if len(points) < 6:
        return None
    first = since(points, points.value < 0.05, 6)
    evidence = data.step_evidence([first] if first is not None else [])
    return Reading(float(np.median(points.value)), first is not None, first, evidence, curve=Curve(points, low=0.05))


@rule(
    row=43,
    needs=["steps.loss/value"],
    least_steps=10,
    algorithms=["ppo"],
    title="The value loss spikes",
    cause="The value loss is {seen} times its median of the steps before.",
    healthy="value loss / running median: below 10",
    fix="normalise or clip the reward (shaping.scale, shaping.clip); do not widen ppo.value_clip",
    source="TRL 0.7.10, logging",
)
def value_loss_spike(data: RunData) -> Reading | None:
    points = data.metric("loss/value")
    over = np.nan_to_num(over_median(points))
    bad = points.step[over > 10]
    sick = len(bad) > 0
    return Reading(
        float(over.max(initial=0)),
        sick,
        int(bad[0]) if sick else None,
        data.step_evidence(bad[:3]),
        curve=Curve(Series(points.step, over), high=10.0),
    )


@rule(
    row=44,
    needs=["info.config.ppo.lam", "rows.length"],
    algorithms=["ppo"],
    title="The reward fades before it reaches the first tokens",
    cause="With γ·λ = {decay} and {length} tokens, {seen} of the reward at the end reaches the first token of a "
    "response.",
    healthy="(γλ)^length at the median length: above 0.01",
    fix="ppo.lam = 1 (or a λ that grows with the length), ppo.gamma = 1",
    source="VC-PPO 2503.01491",
)
def reward_fades(data: RunData) -> Reading | None:
    decay = float(data.setting("config.ppo.gamma", 1.0)) * float(data.setting("config.ppo.lam", 1.0))
    length = float(np.nanmedian(data.rows["length"]))
    left = decay**length
    words: Words = {"decay": decay, "length": length}
    return Reading(left, left < 0.01, int(data.rows.steps[0]) if left < 0.01 else None, words=words)
