"""The settings that a finding proposes to change, with values computed from those of the run."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cavesson.command_line import is_trained_here
from cavesson.doctor.data import RunData
from cavesson.doctor.reading import Reading
from cavesson.doctor.rule import Rule
from cavesson.findings.fixes import has_effect, in_run

MOVED = 0.03
"""½·mean((log π − log π_old)²) per token and step to aim for: the middle of what is usual (0.01 to 0.05)."""
PRICE = 0.05
"""Price of one nat of KL to aim for, in standard deviations of the reward (Secrets of RLHF 2307.04964)."""
_MISSING = object()


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


def calmer(value: float, data: RunData, reading: Reading) -> float:
    """Lower a learning rate by what the largest steps of the run are too large; at least to half of it."""
    moved = data.metric("policy/approx_kl").value
    # A step's KL grows with the square of the learning rate.
    factor = (MOVED / max(float(np.quantile(moved, 0.9)), 1e-9)) ** 0.5 if len(moved) else 0.25
    return rounded(value * min(0.5, max(0.01, factor)))


def stronger(value: float, data: RunData, reading: Reading) -> float:
    """Double a constant KL coefficient; a run with a target or without a reference keeps its own."""
    if data.setting("config.kl.target") is not None or data.setting("config.reference.kind") == "none":
        return value
    return 2 * value or PRICE


def tighter(value: float | None, data: RunData, reading: Reading) -> float | None:
    """Halve the target of an adaptive KL coefficient."""
    return None if value is None else value / 2


def fitting(value: float, data: RunData, reading: Reading) -> float:
    """Set the KL coefficient to the scale of the reward at the start of the run; without a reference, keep it."""
    if data.setting("config.reference.kind") == "none":
        return value
    spread = data.rows.by_step(data.rows["reward"], np.std).first()
    return rounded(PRICE * (1.0 if data.setting("rewards_are_scaled") else spread))
