"""The settings that a finding proposes to change, by how much the number that was measured asks for."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from cavesson.command_line import is_trained_here
from cavesson.doctor.data import RunData
from cavesson.doctor.reading import Reading
from cavesson.doctor.rule import Rule
from cavesson.findings.fixes import has_effect, in_run
from cavesson.findings.trainers import value_in

MOVED = 0.03
"""½·mean((log π − log π_old)²) per token and step to aim for: the middle of what is usual (0.01 to 0.05)."""
PRICE = 0.05
"""Price of one nat of KL to aim for, in standard deviations of the reward (Secrets of RLHF 2307.04964)."""
HALF = 0.5
"""What a setting is at least lowered to, so that a change that just reaches a limit also ends the problem."""
SLOWEST, UNMEASURED = 0.01, 0.25
"""Factors of a learning rate: the smallest one, and the one where nothing measures how far a step goes."""
STRONGEST = 10.0
"""Largest factor of a KL coefficient, and the inverse of the smallest one of its target."""
LONGEST = 8.0
"""Largest factor of a limit on lengths."""
_MISSING = object()

Factor = Callable[[RunData, Reading], float]
"""By what a setting is multiplied, or how many times too large something is."""


@dataclass(frozen=True)
class Times:
    """Multiplies a setting, so that the change can be stated even if the value of the setting is not recorded."""

    factor: Factor
    at_zero: float = 0
    """Its new value if it is 0."""
    unless: Callable[[RunData], bool] = lambda data: False
    """Whether the run keeps its own value."""

    def __call__(self, value: float | None, data: RunData, reading: Reading) -> float | None:
        """Return the new value, with two significant digits; of a whole number, the next larger one."""
        if value is None or self.unless(data):
            return value
        new = value * self.factor(data, reading)
        if not new:
            return self.at_zero
        return math.ceil(new) if isinstance(value, int) else rounded(new)


def proposal(data: RunData, rule: Rule, reading: Reading) -> dict[str, Any]:
    """Return the settings that a finding proposes, by their dotted names.

    Returns:
        Only settings that the run has and that would change; empty for runs of other trainers.
    """
    if not rule.settings or not is_trained_here(data.info):
        return {}
    info, found = data.info, {}
    for setting, change in rule.settings.items():
        name = in_run(setting, info)
        now = _at(info["config"], name)
        if now is _MISSING or not has_effect(name, info):
            continue
        value = change(now, data, reading) if callable(change) else change
        if value != now and (not isinstance(value, float) or math.isfinite(value)):
            found[name] = value
    return found


def sizes(data: RunData, rule: Rule, reading: Reading) -> dict[str, str]:
    """Return by how much to change settings of another trainer, as a text behind the names in a fix.

    Returns:
        By Cavesson's dotted names, such as " (1e-06 → 2.5e-07)", or " (× 0.25)" if the value is not recorded.
    """
    if is_trained_here(data.info):
        return {}
    found = {}
    for setting, change in rule.settings.items():
        if not isinstance(change, Times) or change.unless(data):
            continue
        now = value_in(data.info, setting)
        if isinstance(now, int | float):
            found[setting] = f" ({now:g} → {change(now, data, reading):g})"
        else:
            found[setting] = f" (× {rounded(change.factor(data, reading)):g})"
    return found


def _at(config: Any, name: str) -> Any:
    for key in name.split("."):
        if not isinstance(config, dict) or key not in config:
            return _MISSING
        config = config[key]
    return config


def rounded(value: float) -> float:
    """Round to two significant digits."""
    return float(f"{value:.1e}")


def at_least(least: float) -> Callable[[float, RunData, Reading], float]:
    """Return a change that raises a setting to a value; a larger one is kept."""
    return lambda value, data, reading: max(value, least)


def calmer(own: Factor | None = None) -> Times:
    """Return a change that lowers a learning rate to at most half of it, by how much too far the steps of the run go.

    Args:
        own: The factor that the number asks for which the rule has measured.
    """

    def factor(data: RunData, reading: Reading) -> float:
        measured = [*_by_step(data), *([own(data, reading)] if own else [])]
        return min(HALF, max(SLOWEST, min(measured, default=UNMEASURED)))

    return Times(factor)


def _by_step(data: RunData) -> list[float]:
    """Return the factor of a learning rate by which the largest steps are too large; none if nothing measures them."""
    moved = data.metric("policy/approx_kl").value
    return [_root(MOVED / max(float(np.quantile(moved, 0.9)), 1e-9))] if len(moved) else []


def _root(ratio: float) -> float:
    """Return the factor of a learning rate, or the inverse of one of β, that changes a KL by a factor.

    The KL of a step grows with the square of the learning rate, and that of the optimal policy,
    π_ref · exp(reward / β), with the inverse square of β.
    """
    return math.sqrt(max(ratio, 0.0))


def for_step(data: RunData, reading: Reading) -> float:
    """Return the factor of a learning rate that makes a step usual whose KL a rule has seen."""
    return _root(MOVED / reading.seen)


def for_kl(data: RunData, reading: Reading) -> float:
    """Return the factor of a learning rate that brings a KL which a rule has seen to its limit."""
    return _root(1 / max(over_limit(data, reading), 1.0))


def for_ratio(data: RunData, reading: Reading) -> float:
    """Return the factor of a learning rate that brings a ratio which a rule has seen to its limit.

    Log-ratios are proportional to the learning rate.
    """
    high = _limit(reading)
    return math.log(high) / math.log(reading.seen) if reading.seen > high else 1.0


def for_clipping(data: RunData, reading: Reading) -> float:
    """Return the factor of a learning rate that brings a clip fraction which a rule has seen to its limit.

    Log-ratios are taken to be normal around 0. Their standard deviation is proportional to the learning rate, so that a
    fraction p is clipped at Φ⁻¹(1 − p/2) standard deviations.
    """
    seen, high = (NormalDist().inv_cdf(1 - min(share, 1 - 1e-9) / 2) for share in (reading.seen, _limit(reading)))
    return seen / high


def over_limit(data: RunData, reading: Reading) -> float:
    """Return how many times its limit a number is that a rule has seen."""
    return reading.seen / _limit(reading)


def grown(data: RunData, reading: Reading) -> float:
    """Return how many times the KL is now what it was when a problem began; 1 if it is not known."""
    logged = [data.metric(name) for name in ("kl/objective", "kl/per_token")]
    several = [data.rows.mean("kl_k1"), *logged] if data.has("rows.kl_k1") else logged
    kl = next(filter(len, several), None)
    if kl is None or reading.since is None:
        return 1.0
    before = float(np.interp(reading.since, kl.step, kl.value))
    return kl.last() / before if before > 0 else 1.0


def _limit(reading: Reading) -> float:
    assert reading.curve is not None and reading.curve.high is not None
    return reading.curve.high


def stronger(excess: Factor) -> Times:
    """Return a change that at least doubles a constant KL coefficient; a run with a target, or no reference, keeps it.

    Args:
        excess: How many times too large the KL is.
    """
    return Times(
        lambda data, reading: min(STRONGEST, max(2.0, _root(excess(data, reading)))),
        PRICE,
        lambda data: data.setting("config.kl.target") is not None or _has_no_reference(data),
    )


def tighter(excess: Factor) -> Times:
    """Return a change that at least halves the target of an adaptive KL coefficient; ``excess`` as in ``stronger``."""
    return Times(lambda data, reading: max(1 / STRONGEST, min(HALF, 1 / max(excess(data, reading), 1.0))))


def longer(unless: Callable[[RunData], bool] = lambda data: False) -> Times:
    """Return a change that at least doubles a limit on lengths, until no more than allowed reach it.

    If what was cut goes on ending at the same rate, a share s at a limit is a share s^k at k times the limit.
    """

    def factor(data: RunData, reading: Reading) -> float:
        share = min(reading.seen, 1 - 1e-9)
        return min(LONGEST, max(2.0, math.log(_limit(reading)) / math.log(share)))

    return Times(factor, unless=unless)


def _has_no_reference(data: RunData) -> bool:
    return bool(data.setting("config.reference.kind") == "none")


def fitting(value: float, data: RunData, reading: Reading) -> float:
    """Set the KL coefficient to the scale of the reward at the start of the run; without a reference, keep it."""
    if _has_no_reference(data):
        return value
    spread = data.rows.by_step(data.rows["reward"], np.std).first()
    return rounded(PRICE * (1.0 if data.setting("rewards_are_scaled") else spread))
