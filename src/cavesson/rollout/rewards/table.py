"""Rewards. To add one, write a function in a separate file and add a line to the table below."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cavesson.errors import UserCodeError, UserError
from cavesson.functions import load_function
from cavesson.rollout.rewards.answers import Part
from cavesson.rollout.rewards.arguments import Judged
from cavesson.rollout.rewards.base import Remote, RewardFunction, call_rewards
from cavesson.rollout.rewards.classifier import ClassifierReward
from cavesson.rollout.rewards.code import CodeReward, tests_of
from cavesson.rollout.rewards.concurrent import LIMIT, EachResponse, judges_one
from cavesson.rollout.rewards.exact_match import exact_match, right_answers
from cavesson.rollout.rewards.http import HttpReward
from cavesson.rollout.rewards.lowercase import lowercase
from cavesson.rollout.rewards.pipeline import PipelineReward
from cavesson.rollout.rewards.sentiment import sentiment
from cavesson.rollout.rewards.settings import RewardSettings

FUNCTIONS: dict[str, RewardFunction] = {"exact_match": exact_match, "lowercase": lowercase, "sentiment": sentiment}
MODELS: dict[str, type[ClassifierReward] | type[PipelineReward]] = {
    "classifier": ClassifierReward,
    "pipeline": PipelineReward,
}
"""Made of their options and a device."""
SERVICES: dict[str, type[CodeReward] | type[HttpReward]] = {"code": CodeReward, "http": HttpReward}
"""Made of their options."""
_TWICE = "two rewards are called {!r}; give one of them another name (rewards.name)"


@dataclass(frozen=True)
class Reward:
    """A named, weighted reward function."""

    name: str
    function: RewardFunction | Remote
    weight: float = 1.0


@dataclass(frozen=True)
class Scored:
    """Rewards of B responses: all parts by name, and the weighted sum of those that judge a response, `[B]`."""

    parts: dict[str, list[float | None]]
    """None for responses that a part does not judge"""
    total: list[float | None]
    """None for responses that no part judges"""
    weights: dict[str, float] = field(default_factory=dict)
    """of the parts in the sum"""
    reasons: dict[str, list[str | None]] = field(default_factory=dict)
    """of the parts that gave any"""

    def with_parts(self, parts: Mapping[str, list[float | None]]) -> "Scored":
        """Return these rewards with further parts, of weight 1; raise a UserCodeError if there is one of that name."""
        if twice := [name for name in parts if name in self.parts]:
            raise UserCodeError(_TWICE.format(twice[0]))
        known = [[one for one in row if one is not None] for row in zip(self.total, *parts.values(), strict=True)]
        total = [sum(row) if row else None for row in known]
        weights = self.weights | dict.fromkeys(parts, 1.0)
        return replace(self, parts={**self.parts, **parts}, total=total, weights=weights)


def build_rewards(settings: Sequence[RewardSettings], device: torch.device) -> tuple[Reward, ...]:
    """Build the rewards of a recipe.

    Raises:
        UserError: a reward cannot be built, or two have the same name.
    """
    names = [one.label for one in settings]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(_TWICE.format(twice[0]))
    return tuple(Reward(one.label, _limited(_build(one, device), one), one.weight) for one in settings)


def _limited(function: RewardFunction, settings: RewardSettings) -> RewardFunction:
    if judges_one(function):
        return EachResponse(function, settings.label, settings.concurrency or LIMIT)
    if settings.concurrency is not None:
        raise UserError(
            f"reward {settings.use!r}: concurrency has no effect: it is for async functions (prompt, response, …), "
            "which judge one response per call"
        )
    return function


def rehearse(rewards: Sequence[Reward], prompts: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> None:
    """Call every reward once, with an empty and a short response to the first two prompts of the data.

    This detects errors in rewards before a model is loaded and before anything is written. Built-in rewards also check
    their columns in all rows.

    Raises:
        UserError: a reward takes other arguments, needs a column that the data does not have, raises an exception, or
            does not return one number per response.
    """
    check_columns(rewards, prompts, columns)
    responses = ["", "Yes."][: len(prompts)]
    rows = {name: list(values[: len(responses)]) for name, values in columns.items()}
    score(rewards, prompts[: len(responses)], responses, rows)


def check_columns(rewards: Sequence[Reward], prompts: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> None:
    """Check the columns that built-in rewards need, in every row.

    Raises:
        UserError: a column is missing, or one of its rows cannot be used.
    """
    for reward in rewards:
        if reward.function is exact_match:
            right_answers(prompts, columns.get("ground_truth"))
        elif isinstance(reward.function, CodeReward):
            tests_of(prompts, columns.get("tests"))


def score(
    rewards: Sequence[Reward],
    prompts: Sequence[str],
    responses: Sequence[str],
    columns: Mapping[str, Any],
    ids: Sequence[Sequence[int]] | None = None,
) -> Scored:
    """Call every reward and add up all parts that judge a response, each multiplied by the weight of its reward.

    There are B prompts, responses (with their token ids, if these are known), and values in each column.

    Raises:
        UserCodeError: two rewards return parts with the same name, or a reward fails.
    """
    parts: dict[str, Part] = {}
    weights: dict[str, float] = {}
    functions = {reward.name: reward.function for reward in rewards}
    if len(functions) < len(rewards):
        names = [reward.name for reward in rewards]
        raise UserCodeError(_TWICE.format(next(name for name in names if names.count(name) > 1)))
    answers = call_rewards(functions, Judged(prompts, responses, columns, ids))
    for reward in rewards:
        for name, part in answers[reward.name].items():
            if name in parts:
                raise UserCodeError(_TWICE.format(name))
            parts[name], weights[name] = part, reward.weight
    values = {name: part.values for name, part in parts.items()}
    total = [_sum({name: one[row] for name, one in values.items()}, weights) for row in range(len(prompts))]
    reasons = {name: part.reasons for name, part in parts.items() if any(part.reasons)}
    return Scored(values, total, weights, reasons)


def _sum(parts: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    known = [weights[name] * value for name, value in parts.items() if value is not None]
    return sum(known, 0.0) if known else None


def _build(settings: RewardSettings, device: torch.device) -> RewardFunction:
    if settings.use in SERVICES:
        return SERVICES[settings.use](**settings.options)
    if settings.use in MODELS:
        try:
            chat = {"chat": settings.chat} if settings.use == "classifier" else {}
            return MODELS[settings.use](**{"device": device, **chat, **settings.options})
        except TypeError as error:
            raise UserError(f"reward {settings.use!r}: options: {error}") from None
    if settings.options:
        raise UserError(f"reward {settings.use!r} takes no options")
    if settings.use in FUNCTIONS:
        return FUNCTIONS[settings.use]
    if ":" not in settings.use:
        known = ", ".join([*FUNCTIONS, *MODELS, *SERVICES])
        raise UserError(f"there is no reward {settings.use!r}; use {known}, file.py:function or module:function")
    return load_function(settings.use)
