"""Scoring of responses by rewards, and confidence intervals of mean scores."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import field_validator

from cavesson.config import Settings
from cavesson.data.prompts import PromptSet
from cavesson.errors import UserError
from cavesson.ops.intervals import Interval, mean_interval, share_interval
from cavesson.processes import Processes
from cavesson.rewards import FUNCTIONS, Reward, Scored, build_rewards, rehearse, score
from cavesson.rewards.settings import RewardSettings


class ScorerSettings(Settings):
    """What responses are scored by."""

    rewards: tuple[RewardSettings, ...] = ()
    """rewards as in a recipe, or short: a name such as "exact_match", a function as file.py:function, the URL
    of a server, or a reward model's run, folder or Hub name; several in a list"""

    @field_validator("rewards", mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        several = [given] if isinstance(given, str | dict) else given
        return [_written_out(one) if isinstance(one, str) else one for one in several]


def check_scorers(settings: ScorerSettings, device: str | None, prompts: PromptSet) -> None:
    """Build the rewards and call them on the first prompts, before any response is sampled.

    Raises:
        UserError: one of them cannot be built or called.
    """
    rehearse(_build(settings, device), prompts.texts, prompts.columns)


def score_by_length(
    settings: ScorerSettings,
    device: str | None,
    prompts: Sequence[str],
    responses: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
) -> Scored:
    """Score responses, sorted from long to short, so that reward models read little padding.

    Raises:
        UserError: there is no reward, or one of them cannot be built.
    """
    order = sorted(range(len(responses)), key=lambda row: -len(prompts[row]) - len(responses[row]))
    scored = score(
        _build(settings, device),
        [prompts[row] for row in order],
        [responses[row] for row in order],
        {name: [values[row] for row in order] for name, values in columns.items()},
    )
    back = sorted(range(len(order)), key=order.__getitem__)
    parts = {name: [values[row] for row in back] for name, values in scored.parts.items()}
    return Scored(parts, [scored.total[row] for row in back])


def parts_of(scored: Scored) -> dict[str, list[float]]:
    """Return the weighted sum as `reward` together with every part, or just the part if it equals the sum."""
    several = len(scored.parts) > 1 or list(scored.parts.values()) != [scored.total]
    return {"reward": scored.total} | scored.parts if several else dict(scored.parts)


def estimate(values: Sequence[float], groups: Sequence[int]) -> Interval:
    """Estimate the mean and its 95 % interval, treating prompts as independent.

    With one response per prompt, values that are all 0 or 1 form a proportion and get Wilson's interval, which stays
    within 0 and 1. Everything else gets a normal interval over the means of the prompts.
    """
    if set(values) <= {0.0, 1.0} and len(set(groups)) == len(groups):
        return share_interval(float(sum(values)), len(values))
    return mean_interval(values, groups)


def shown(interval: Interval) -> str:
    """Format an interval as text."""
    return f"{interval.mean:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def _build(settings: ScorerSettings, device: str | None) -> tuple[Reward, ...]:
    if not settings.rewards:
        raise UserError('name what scores the responses: --rewards FOLDER, --rewards exact_match or --rewards "[…]"')
    return build_rewards(settings.rewards, torch.device(Processes(device).device))


def _written_out(scorer: str) -> dict[str, Any]:
    if scorer.startswith(("http://", "https://")):
        return {"use": "http", "options": {"url": scorer}}
    if scorer in FUNCTIONS or ":" in scorer:
        return {"use": scorer}
    return {"use": "classifier", "name": Path(scorer).name, "options": {"path": scorer}}
