"""Scores of answers that a check writes: of single responses, and of episodes that it plays."""

import asyncio
import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cavesson.check.answers import Answer, Task
from cavesson.check.swallowed import Raised, exceptions_of_user
from cavesson.data.prompts import PromptSet
from cavesson.rollout import contract
from cavesson.rollout.answering import answered, as_message, end_of
from cavesson.rollout.calling import Caller
from cavesson.rollout.conversation import Conversation, joined
from cavesson.rollout.environments import Instance, Kind
from cavesson.rollout.rewards.concurrent import event_loop
from cavesson.rollout.rewards.table import Reward, Scored
from cavesson.rollout.rewards.table import score as score_responses
from cavesson.types import Turn

Numbers = NDArray[np.float64]
TASKS = 20
"""Rows of the data that a reward, or an environment, is tried with."""


class Scores(NamedTuple):
    """What a reward gives to answers."""

    values: Numbers
    """`[B]`, NaN for those that it does not judge"""
    raised: Sequence[Raised] = ()
    """exceptions that it caught itself"""


Score = Callable[[Sequence[Task], Sequence[Answer]], Scores]


def tasks_of(prompts: PromptSet, rows: Sequence[int]) -> list[Task]:
    """Return rows of the data as tasks."""
    columns = prompts.for_rewards
    return [Task(prompts.texts[row], {name: values[row] for name, values in columns.items()}) for row in rows]


def of_responses(rewards: Sequence[Reward]) -> Score:
    """Return what scores the texts of answers, without calling tools."""

    def score(tasks: Sequence[Task], answers: Sequence[Answer]) -> Scores:
        with exceptions_of_user() as raised:
            scored = _judged(rewards, tasks, [one.text for one in answers], {})
        return Scores(_numbers(scored), raised)

    return score


def of_episodes(rewards: Sequence[Reward], conversation: Conversation, kind: Kind) -> Score:
    """Return what plays an episode of an environment with each answer, and scores it as training does."""
    caller = Caller(conversation.settings.concurrency, conversation.settings.timeout)
    environments = conversation.environments

    def score(tasks: Sequence[Task], answers: Sequence[Answer]) -> Scores:
        worlds = [environments.take(kind) for _ in tasks]
        try:
            episodes = [
                _Episode(world, task, answer) for world, task, answer in zip(worlds, tasks, answers, strict=True)
            ]
            _play(caller, episodes, conversation.settings.max_turns)
            columns = {
                "messages": [one.messages for one in episodes],
                "environments": [one.environment for one in worlds],
            }
            with exceptions_of_user() as raised:
                scored = _judged(rewards, tasks, [one.said[-1] for one in episodes], columns)
                turns = [one.turns for one in episodes]
                scored = scored.with_parts(conversation.rewards(worlds, turns))
            return Scores(_numbers(scored), raised)
        finally:
            environments.release(one for one in worlds if not caller.is_busy(one.environment))

    return score


@dataclass
class _Episode:
    """An episode in which the policy says what an answer says, whatever it is told."""

    world: Instance
    task: Task
    answer: Answer
    messages: list[dict[str, Any]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    @property
    def row(self) -> dict[str, Any]:
        messages = self.task.columns.get("messages")
        return {"prompt": messages or self.task.prompt, **self.task.columns}

    @property
    def turns(self) -> list[Turn]:
        rewards = contract.turn_rewards(self.world, len(self.said)) or [None] * len(self.said)
        return [Turn("assistant", text, 0, 0, reward=one) for text, one in zip(self.said, rewards, strict=True)]


def _play(caller: Caller, episodes: Sequence[_Episode], max_turns: int | None) -> None:
    """Play episodes to their ends, all at the same time."""
    playing = [
        asyncio.run_coroutine_threadsafe(_played(caller, one, max_turns or sys.maxsize), event_loop())
        for one in episodes
    ]
    wait(playing)  # also if one fails: the environments of the others are in use until they end
    for one in playing:
        one.result()


async def _played(caller: Caller, one: _Episode, max_turns: int) -> None:
    before = one.task.columns.get("messages") or [{"role": "user", "content": one.task.prompt}]
    added = await asyncio.wrap_future(contract.reset(caller, one.world, one.row))
    one.messages = [dict(message) for message in before] if added is None else joined(before, added)
    text, calls = ("", one.answer.calls) if one.answer.calls else (one.answer.text, ())
    goes_on = True
    while goes_on:
        one.said.append(text)
        one.messages.append(as_message(text, calls))
        is_last = len(one.said) >= max_turns
        replies = await answered(caller, one.world, text, calls, is_last=is_last)
        one.messages += [reply.message for reply in replies]
        goes_on = bool(replies) and end_of(one.world, replies, is_last=is_last) is None
        text, calls = one.answer.text, ()


def _judged(
    rewards: Sequence[Reward], tasks: Sequence[Task], responses: Sequence[str], columns: dict[str, Any]
) -> Scored:
    names = dict.fromkeys(name for task in tasks for name in task.columns)
    of_rows = {name: [task.columns.get(name) for task in tasks] for name in names}
    return score_responses(rewards, [task.prompt for task in tasks], responses, of_rows | columns)


def _numbers(scored: Scored) -> Numbers:
    return np.array([math.nan if one is None else one for one in scored.total], float)
