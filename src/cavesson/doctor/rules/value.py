"""Rules on the critic."""

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.derive.penalty import MATCHED, ROUNDED
from cavesson.doctor.derive.versions import MIN_TOKENS, policy_changes, recurring
from cavesson.doctor.reading import Curve, Reading, Words
from cavesson.doctor.readings import HIGH, MIN_SHARE, MIN_SPIKES, spikes
from cavesson.doctor.rule import rule
from cavesson.doctor.rules.consequences import CRITIC
from cavesson.doctor.rules.returns import returns
from cavesson.doctor.series import Series, since, smoothed, standard_error, together
from cavesson.findings.finding import Severity
from cavesson.findings.settings import FADED, reaching
from cavesson.findings.words import Phrase

WARM_UP = 0.3
"""Share of the run, at most 20 steps, in which a critic may still be learning."""
CLEAR = 3.0
"""Standard errors by which the share that the critic explains, over the steps since the beginning, must be below 0."""
FEW = 3
"""Steps that a critic has to come near the returns."""
APART = 0.05
"""Share of the variance that a critic which tells tokens apart explains, its mean error not counted."""


def _warm(points: Series) -> Series:
    first = points.step[0] + min(20.0, WARM_UP * (points.step[-1] - points.step[0])) if len(points) else 0
    return points.where(points.step >= first)


def explained(data: RunData, *, mean_counts: bool = True) -> Series:
    """Return by step 1 − mean((G − V)²)/Var(G) over the trained tokens, for steps in which the returns G vary.

    This counts what the critic is off by on average. A critic that gives every token the same wrong value explains
    nothing, and says so with a negative number.

    Args:
        data: The run.
        mean_counts: False for 1 − Var(G − V)/Var(G), which says whether the critic tells tokens apart.
    """
    sample = data.sample
    goal, value = returns(data, sample), np.where(sample.trained, sample["value"], np.nan)
    misses = sample.mean_by_step((goal - value) ** 2) if mean_counts else sample.variance_by_step(goal - value)
    all_of, left = together(sample.variance_by_step(goal), misses)
    known = all_of.value > 1e-8
    return Series(all_of.step[known], 1 - left.value[known] / all_of.value[known])


def _learning(value: float, data: RunData, reading: Reading) -> float:
    """Give the value loss its usual weight if it has none."""
    return value or 0.1


@rule(
    number=40,
    needs=["tokens.value", "tokens.token_reward", "rows.reward|rows.shaped_reward"],
    min_steps=12,
    traits=["critic"],
    title="The critic does not fit the returns",
    cause="After {when}, the critic explains {seen} of the variance of the returns, its mean error counted; below "
    "0 it is worse than their mean, and the advantages are noise.",
    healthy="1 − mean((G − V)²)/Var(G) after the first steps: above {limit}, or {far} if the critic tells tokens apart "
    "and lags behind their mean, rising towards 1; values that change while the policy does; and no three steps, not "
    "even of the first ones, that are below {left} and worse than the critic was before its first update",
    fix="a separate learning rate and some steps of warm-up for the critic; a wider ppo.value_clip; check the returns",
    settings={"ppo.value_coef": _learning},
    source="Deep RL hacks (Schulman's talk); verl; Andy Jones, Debugging RL",
    explains=["value-constant", "clip-fraction-high"],
)
def value_not_fitting(data: RunData, *, limit: float = -0.1, far: float = -0.5, left: float = -10.0) -> Reading | None:
    course = explained(data)
    points = _warm(course)
    if len(points) < 6:
        return None
    wrong = _learns_something_else(data) or _never_learns(data)
    apart = _warm(explained(data, mean_counts=False))
    first = int(points.step[0]) if wrong else _worse_than_mean(points, apart, limit, far)
    leaves = since(course, (course.value < left) & (course.value < course.value[0]), FEW)
    if leaves is not None:  # its own updates throw it off; where it ends up after that, it may predict nothing
        points, first = course, leaves
    far_off = points.value[points.value < left] if leaves is not None else points.after(first).value
    lags = leaves is None and not wrong and first is not None and _only_lags(points.after(first), apart.after(first))
    words: Words = {"when": Phrase("its warm-up" if leaves is None else "its first updates")}
    evidence = data.step_evidence(points.step[np.argsort(points.value)])
    curve = Curve(points, limit, 1.0)
    severity: Severity | None = "note" if lags else None
    return Reading(float(np.median(far_off)), first is not None, first, evidence, words, curve, severity=severity)


def _worse_than_mean(points: Series, apart: Series, limit: float, far: float) -> int | None:
    """Return the step from which the explained variance is below the limit, and clearly below 0; None if it is not.

    Where nothing can be predicted, as with a reward that is mostly noise, it varies around a number that is a little
    below 0: the mean that a critic learns lags behind. So it does where the rewards rise; a critic that tells tokens
    apart may be below the limit by that.

    Args:
        points: The explained variance, mean errors counted.
        apart: The same without mean errors.
        limit: Of the explained variance.
        far: Of the explained variance where the critic tells tokens apart.
    """
    smooth = smoothed(points)
    first = since(smooth, smooth.value < limit, 6)
    later = np.maximum(points.after(first).value, -1.0)  # a single step can be far below
    lags = later.mean() > far and np.median(apart.after(first).value) > APART
    return first if later.mean() + CLEAR * standard_error(later) < 0 and not lags else None


def _only_lags(points: Series, apart: Series) -> bool:
    """Return whether the mean of the values is all that is wrong, by less than the returns differ from each other.

    That is usual where rewards rise or become equal; it adds one number to all advantages of a step.
    """
    return float(np.median(points.value)) > -1.0 and float(np.median(apart.value)) > -APART


def _learns_something_else(data: RunData) -> bool:
    """Return whether the critic's training target hardly correlates with the actual returns."""
    sample = data.sample
    goal, target = returns(data, sample), sample["return"]
    known = np.isfinite(goal) & np.isfinite(target)
    if known.sum() < 100 or goal[known].std() < 1e-6 or target[known].std() < 1e-6:
        return False
    return float(np.corrcoef(goal[known], target[known])[0, 1]) < 0.3


def _never_learns(data: RunData) -> bool:
    """Return whether the first value of a prompt stays the same over all steps, while the policy changes."""
    before, now = recurring(data.sample, "value")
    same = np.abs(now - before) <= ROUNDED * np.abs(before)
    return len(same) >= MIN_TOKENS and bool(np.mean(same) > MATCHED) and policy_changes(data)


@rule(
    number=41,
    needs=["tokens.value", "tokens.token_reward", "rows.reward|rows.shaped_reward"],
    traits=["critic"],
    title="The critic starts far from the returns",
    cause="At the first step, the values are {seen} standard deviations of the returns away from the returns: the "
    "value head is random, or was copied from a reward model with an offset.",
    healthy="|mean(V − G)| / standard deviation of G at the first step: below {limit}; more if all values are near 0, "
    "or if most of the first three steps are below it",
    fix="initialise the value head with zeros, or train the critic for some steps before the policy",
    source="The N implementation details of RLHF with PPO; VC-PPO 2503.01491",
    explains=["length-collapse", "truncated", *CRITIC],
    alone="note",
)
def value_start(data: RunData, *, limit: float = 1.0) -> Reading | None:
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
    # A head that outputs zero is off by the mean of the returns, which is not a fault of the head.
    random_head = float(value[known].std() / goal[known].std()) > 0.5 or abs(value[known].mean()) > goal[known].std()
    distance = sample.mean_by_step((sample["value"] - returns(data, sample)) / goal[known].std())
    # A critic that its first updates bring near has misled hardly an update; one that never changes, or that they throw
    # off further, has another fault.
    usual = float(np.median(np.abs(distance.value[:FEW])))
    stays = limit < usual < 2 * abs(away) and not _never_learns(data)
    unhealthy = abs(away) > limit and random_head and stays
    name = Phrase("mean(V − G) / standard deviation of G at the first step")
    evidence = sample.rows.evidence(range(len(sample.rows)))
    return Reading(
        abs(away), unhealthy, int(sample.rows.steps[0]), evidence, curve=Curve(distance, -limit, limit, name)
    )


@rule(
    number=42,
    needs=["tokens.value", "tokens.token_reward", "rows.reward|rows.shaped_reward"],
    min_steps=12,
    traits=["critic"],
    title="The critic gives the same value everywhere",
    cause="After its warm-up, the standard deviation of the values is {seen} times that of the returns: the value head "
    "is dead, or the gradient does not reach it.",
    healthy="standard deviation of V / of the returns, over these steps: above {limit}",
    fix="check that the value loss reaches the value head (ppo.value_coef, requires_grad), and its learning rate",
    settings={"ppo.value_coef": _learning},
    source="own threshold",
    explains=["value-not-fitting"],
)
def value_constant(data: RunData, *, limit: float = 0.05) -> Reading | None:
    sample = data.sample
    goal, value = returns(data, sample), sample["value"]
    points = _warm(sample.variance_by_step(goal))
    if len(points) < 6:
        return None
    # All these steps together: even a critic that learns slowly follows the mean of the returns.
    late = (sample.step >= points.step[0]) & sample.trained & np.isfinite(goal) & np.isfinite(value)
    if not late.any() or goal[late].std() < 1e-4:
        return None
    found = float(value[late].std() / goal[late].std())
    of_values, of_returns = together(sample.variance_by_step(value), points)
    share = Series(of_values.step, np.sqrt(of_values.value / np.maximum(of_returns.value, 1e-8)))
    evidence = data.step_evidence(points.step[:1])
    return Reading(found, found < limit, int(points.step[0]), evidence, curve=Curve(share, low=limit))


@rule(
    number=43,
    needs=["steps.loss/value"],
    min_steps=10,
    traits=["critic"],
    title="The value loss spikes repeatedly",
    cause="The value loss repeatedly reaches up to {seen} times its median of the steps before.",
    healthy="value loss / running median: above {limit} in fewer than {steps} steps, or in less than {often} of the "
    "steps",
    fix="normalise or clip the reward (shaping.scale, shaping.clip); do not widen ppo.value_clip",
    source="TRL 0.7.10, logging",
)
def value_loss_spike(
    data: RunData, *, limit: float = HIGH, steps: int = MIN_SPIKES, often: float = MIN_SHARE
) -> Reading | None:
    return spikes(data, "loss/value", limit, steps, often)


@rule(
    number=44,
    needs=["info.config.ppo.lam", "rows.length"],
    traits=["critic"],
    title="The reward fades before it reaches the first tokens",
    cause="Only {seen} of the reward at the end of a response reaches its first token, at γ·λ = {decay} and {length} "
    "tokens.",
    healthy="(γλ)^length at the median length: above {limit}",
    fix="ppo.lam = 1 (or a λ that grows with the length), ppo.gamma = 1",
    settings={"ppo.lam": 1.0, "ppo.gamma": 1.0},
    source="VC-PPO 2503.01491",
    explains=["reward-falls"],
)
def reward_fades(data: RunData, *, limit: float = FADED) -> Reading | None:
    decay = float(data.setting("config.ppo.gamma", 1.0)) * float(data.setting("config.ppo.lam", 1.0))
    length = float(np.nanmedian(data.rows["length"]))
    left = reaching(decay, length)
    before_end = np.arange(int(length) + 1)
    name, along = Phrase("share of the reward that reaches a token"), Phrase("tokens before the end of the response")
    reaches = Curve(Series(before_end, reaching(decay, before_end)), low=limit, name=name, along=along)
    words = {"decay": decay, "length": length}
    return Reading(left, left < limit, int(data.rows.steps[0]), words=words, curve=reaches)
