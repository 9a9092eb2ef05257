"""Rewards that workers on a Ray cluster compute: each gets a part of the rows, and the results are joined in order."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from cavesson.algorithms.settings import RewardWorkerSettings
from cavesson.cluster.connection import actors, check_placed, enter, result
from cavesson.errors import UserCodeError
from cavesson.rewards.arguments import Judged
from cavesson.rewards.base import call_rewards
from cavesson.rewards.settings import RewardSettings
from cavesson.rewards.table import Reward, build_rewards

ROLE = "reward-worker"
Parts = dict[str, list[Any]]
"""The parts of a reward, by the last component of their names; a reward that returns plain numbers has one, ""."""


class RewardWorker:
    """An actor that calls rewards.

    Args:
        settings: settings of the rewards.
        uses_gpu: whether rewards that are models run on a GPU.
        folder: working directory.
    """

    def __init__(self, settings: Sequence[RewardSettings], uses_gpu: bool, folder: str) -> None:
        self._settings, self._device = settings, torch.device("cuda" if uses_gpu else "cpu")
        self._folder = folder

    @cached_property
    def _rewards(self) -> tuple[Reward, ...]:
        enter(self._folder)
        return build_rewards(self._settings, self._device)

    def is_placed(self) -> bool:
        """Return True, as soon as Ray has started this worker."""
        return True

    def call(
        self, number: int, prompts: Sequence[str], responses: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> Parts:
        """Return the parts of the reward with this number for each row.

        Raises:
            UserError: the reward cannot be built, or it failed.
        """
        reward = self._rewards[number]
        parts = call_rewards({reward.name: reward.function}, Judged(prompts, responses, columns))[reward.name]
        return {name.removeprefix(reward.name).removeprefix("/"): part.returned() for name, part in parts.items()}


def remote_rewards(
    settings: Sequence[RewardSettings], role: RewardWorkerSettings, timeout: float
) -> tuple[Reward, ...]:
    """Return the rewards of a recipe as functions that call the reward workers of the run.

    Args:
        settings: settings of the rewards.
        role: settings of the workers.
        timeout: longest wait in seconds for the workers to start.

    Raises:
        UserError: no node had room for a worker.
    """
    workers = dict(enumerate(actors(ROLE, role.count)))
    check_placed(
        "reward workers", "reward_workers", role, [one.is_placed.remote() for one in workers.values()], timeout
    )
    return tuple(
        Reward(one.label, _RemoteReward(one.label, number, workers), one.weight) for number, one in enumerate(settings)
    )


@dataclass(frozen=True)
class _RemoteReward:
    """A reward that workers compute. If a worker dies, another one gets its rows."""

    name: str
    number: int
    workers: dict[int, Any]
    """workers that have not died; all rewards of the run share this dict"""

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
        from ray.exceptions import RayActorError

        while alive := list(self.workers.items()):
            number, worker = alive[place % len(alive)]
            try:
                answer: Parts = result(worker.call.remote(self.number, prompts, responses, columns))
                return answer
            except RayActorError:
                self.workers.pop(number, None)
        raise UserCodeError(f"the reward {self.name}: all reward workers, or their nodes, have died")


def split(rows: int, count: int) -> list[range]:
    """Divide rows into 1 to `count` contiguous parts, whose sizes differ by at most 1."""
    parts = np.array_split(np.arange(rows), max(1, min(rows, count)))
    return [range(int(part[0]), int(part[-1]) + 1) if len(part) else range(0) for part in parts]


def joined(name: str, parts: Sequence[Parts]) -> Parts:
    """Join the results for contiguous parts of the rows.

    Raises:
        UserCodeError: a reward returned other parts for some rows than for others.
    """
    names = list(parts[0])
    if any(part.keys() != parts[0].keys() for part in parts):
        raise UserCodeError(f"the reward {name} must return the same parts for all responses")
    return {key: [value for part in parts for value in part[key]] for key in names}
