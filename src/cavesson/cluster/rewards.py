"""Rewards that are called in workers of a Ray cluster: each gets a part of the rows, and answers are put in order."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from ray.exceptions import RayActorError
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from cavesson.cluster.connection import actors, result
from cavesson.errors import UserCodeError, first_line
from cavesson.rewards import Reward, build_rewards
from cavesson.rewards.base import call_reward
from cavesson.rewards.settings import RewardSettings
from cavesson.text.counting import counted

ROLE = "reward-worker"
_ATTEMPTS = 6
"""Workers that get a part, one after the other, if all of them die over it: rows that kill workers end the run."""
_WAIT = wait_exponential(multiplier=0.5, max=8)

Parts = dict[str, list[float]]
"""The parts of a reward, by the ends of their names; a reward that returns plain numbers has one, called ""."""


class RewardWorker:
    """Calls rewards; an actor.

    Args:
        settings: of the rewards.
        uses_gpu: whether models among them use a GPU.
    """

    def __init__(self, settings: Sequence[RewardSettings], uses_gpu: bool) -> None:
        self._settings, self._device = settings, torch.device("cuda" if uses_gpu else "cpu")

    @cached_property
    def _rewards(self) -> tuple[Reward, ...]:
        return build_rewards(self._settings, self._device)

    def call(
        self, number: int, prompts: Sequence[str], responses: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> Parts:
        """Return the parts of the reward with this number for each row.

        Raises:
            UserError: the reward cannot be built, or failed.
        """
        reward = self._rewards[number]
        parts = call_reward(reward.function, reward.name, prompts, responses, columns)
        return {name.removeprefix(reward.name).removeprefix("/"): values for name, values in parts.items()}


def remote_rewards(settings: Sequence[RewardSettings], count: int) -> tuple[Reward, ...]:
    """Return the rewards of a recipe, called in the `count` workers of the run."""
    workers = actors(ROLE, count)
    return tuple(
        Reward(one.label, _RemoteReward(one.label, number, workers), one.weight) for number, one in enumerate(settings)
    )


@dataclass(frozen=True)
class _RemoteReward:
    """A reward that workers call.

    A part whose worker dies goes to the next one, until `_ATTEMPTS` of them have died over it.
    """

    name: str
    number: int
    workers: Sequence[Any]

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], **columns: Sequence[Any]) -> Parts:
        parts = split(len(responses), len(self.workers))
        with ThreadPoolExecutor(len(parts)) as pool:
            calls = [
                pool.submit(
                    self._call,
                    place,
                    prompts[rows.start : rows.stop],
                    responses[rows.start : rows.stop],
                    {name: values[rows.start : rows.stop] for name, values in columns.items()},
                )
                for place, rows in enumerate(parts)
            ]
            return joined(self.name, [call.result() for call in calls])

    def _call(
        self, place: int, prompts: Sequence[str], responses: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> Parts:
        retrying = Retrying(
            retry=retry_if_exception_type(RayActorError), stop=stop_after_attempt(_ATTEMPTS), wait=_WAIT, reraise=True
        )
        try:
            for attempt in retrying:
                with attempt:
                    worker = self.workers[(place + attempt.retry_state.attempt_number - 1) % len(self.workers)]
                    answer: Parts = result(worker.call.remote(self.number, prompts, responses, columns))
        except RayActorError as error:
            raise UserCodeError(
                f"the reward {self.name}: {_ATTEMPTS} reward workers died over the same "
                f"{counted(len(responses), 'response')} ({first_line(error)})"
            ) from error
        return answer


def split(rows: int, count: int) -> list[range]:
    """Return contiguous parts of rows, at most `count` and at least one, whose sizes differ by at most 1."""
    parts = np.array_split(np.arange(rows), max(1, min(rows, count)))
    return [range(int(part[0]), int(part[-1]) + 1) if len(part) else range(0) for part in parts]


def joined(name: str, parts: Sequence[Parts]) -> Parts:
    """Join the answers to the parts of the rows.

    Raises:
        UserCodeError: a reward has returned different parts for different rows.
    """
    names = list(parts[0])
    if any(part.keys() != parts[0].keys() for part in parts):
        raise UserCodeError(f"the reward {name} must return the same parts for all responses")
    return {key: [value for part in parts for value in part[key]] for key in names}
