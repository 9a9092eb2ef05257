"""Rewards that workers on a Ray cluster compute: each gets a part of the rows, and the results are joined in order."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
import torch

from cavesson.algorithms.settings import RewardWorkerSettings
from cavesson.cluster.connection import actors, check_placed, enter, result
from cavesson.cluster.worlds import load_classes, packed, unpacked
from cavesson.errors import UserCodeError, user_code
from cavesson.rollout.rewards.answers import Answers, Part
from cavesson.rollout.rewards.arguments import Judged
from cavesson.rollout.rewards.base import Remote, call_rewards
from cavesson.rollout.rewards.settings import RewardSettings
from cavesson.rollout.rewards.surroundings import still_running
from cavesson.rollout.rewards.table import Reward, build_rewards
from cavesson.rollout.settings import EnvironmentSettings

ROLE = "reward-worker"


class RewardWorker:
    """An actor that calls rewards in a working directory; with `uses_gpu`, those that are models run on a GPU."""

    def __init__(
        self, settings: Sequence[RewardSettings], environment: EnvironmentSettings, uses_gpu: bool, folder: str
    ) -> None:
        self._settings, self._environment, self._folder = settings, environment, folder
        self._device = torch.device("cuda" if uses_gpu else "cpu")

    @cached_property
    def _rewards(self) -> dict[str, Reward]:
        enter(self._folder)
        load_classes(self._environment)
        return {reward.name: reward for reward in build_rewards(self._settings, self._device)}

    def is_placed(self) -> bool:
        """Return True, as soon as Ray has started this worker."""
        return True

    def call(self, names: Sequence[str], judged: Judged) -> Answers:
        """Call the rewards with these names, as a learner without workers calls its own.

        Raises:
            UserError: a reward cannot be built, or it failed.
        """
        functions = {name: self._rewards[name].function for name in names}
        return call_rewards(functions, _with_environments(judged, unpacked))


def remote_rewards(
    settings: Sequence[RewardSettings], role: RewardWorkerSettings, timeout: float
) -> tuple[Reward, ...]:
    """Return the rewards of a recipe, which the reward workers call; these must start within `timeout` seconds.

    Raises:
        UserError: no node had room for a worker.
    """
    workers = dict(enumerate(actors(ROLE, role.count)))
    check_placed(
        "reward workers", "reward_workers", role, [one.is_placed.remote() for one in workers.values()], timeout
    )
    remote = Remote(_Workers(workers).call)
    return tuple(Reward(one.label, remote, one.weight) for one in settings)


class _Workers:
    """The reward workers of a run. If one dies, another one gets its rows."""

    def __init__(self, alive: dict[int, Any]) -> None:
        self._alive = alive

    def call(self, names: Sequence[str], judged: Judged) -> Answers:
        """Divide the rows among the workers, and join their answers; raise a UserCodeError if a reward failed, or all
        have died.
        """
        parts, what = split(len(judged.responses), len(self._alive)), f"the reward {', '.join(names)}"
        with still_running(what), user_code(what), ThreadPoolExecutor(len(parts)) as pool:
            calls = [pool.submit(self._call, place, names, _part(judged, rows)) for place, rows in enumerate(parts)]
            answers = [call.result() for call in calls]
        return {name: joined(name, [answer[name] for answer in answers]) for name in names}

    def _call(self, place: int, names: Sequence[str], judged: Judged) -> Answers:
        from ray.exceptions import RayActorError

        while alive := list(self._alive.items()):
            number, worker = alive[place % len(alive)]
            try:
                answers: Answers = result(worker.call.remote(names, judged))
                return answers
            except RayActorError:
                self._alive.pop(number, None)
        raise UserCodeError(f"the reward {', '.join(names)}: all reward workers, or their nodes, have died")


def _part(judged: Judged, rows: range) -> Judged:
    part = slice(rows.start, rows.stop)
    own = Judged(
        judged.prompts[part],
        judged.responses[part],
        {name: values[part] for name, values in judged.columns.items()},
        None if judged.ids is None else judged.ids[part],
    )
    return _with_environments(own, packed)


def _with_environments(judged: Judged, change: Callable[[Any], list[Any]]) -> Judged:
    """Return the same, with environments that are changed, if there are any."""
    if "environments" not in judged.columns:
        return judged
    return judged._replace(columns={**judged.columns, "environments": change(judged.columns["environments"])})


def split(rows: int, count: int) -> list[range]:
    """Divide rows into 1 to `count` contiguous parts, whose sizes differ by at most 1."""
    parts = np.array_split(np.arange(rows), max(1, min(rows, count)))
    return [range(int(part[0]), int(part[-1]) + 1) if len(part) else range(0) for part in parts]


def joined(name: str, parts: Sequence[dict[str, Part]]) -> dict[str, Part]:
    """Join what a reward returned for contiguous parts of the rows.

    Raises:
        UserCodeError: it returned other parts for some rows than for others.
    """
    if any(part.keys() != parts[0].keys() for part in parts):
        raise UserCodeError(f"the reward {name} must return the same parts for all responses")
    return {
        label: Part(
            [value for part in parts for value in part[label].values],
            [reason for part in parts for reason in part[label].reasons],
        )
        for label in parts[0]
    }
