"""The tools and the environment of a chat in the terminal, whose user is at the keyboard."""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from cavesson.data.chat import Chat, Tools
from cavesson.errors import UserError
from cavesson.functions import line_of
from cavesson.rollout import contract
from cavesson.rollout.answering import Said, answered, as_message
from cavesson.rollout.calling import Caller
from cavesson.rollout.calls import CallFormat
from cavesson.rollout.environments import Environments, Instance
from cavesson.rollout.loading import load_environments
from cavesson.rollout.rewards.concurrent import event_loop
from cavesson.rollout.settings import EnvironmentSettings


class Reply(NamedTuple):
    """A turn of the model, and the results of its calls."""

    message: dict[str, Any]
    results: Sequence[Said]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The turn and the results, as messages."""
        return [self.message, *(one.message for one in self.results)]


class ChatTools:
    """The tools and the environment of a chat, which settings name.

    Raises:
        UserError: they cannot be loaded or used in a chat.
    """

    def __init__(self, settings: EnvironmentSettings, chat: Chat) -> None:
        environments = load_environments(settings)
        self._instance = _the_only(environments)
        self._caller = Caller(settings.concurrency, settings.timeout)
        self.schemas: Tools = [tool.schema for tool in self._instance.tools.values()]
        self._format = CallFormat.of(chat, self.schemas, settings.call_format) if self.schemas else None

    @property
    def is_done(self) -> bool:
        """Whether the environment says that the episode is over."""
        return contract.is_done(self._instance)

    def begin(self) -> str | None:
        """Reset the environment, and return the text that joins the first line of the user."""
        return contract.reset(self._caller, self._instance, {}).result()

    def reward(self) -> float | None:
        """Return what the environment says that the conversation earned, if it says so."""
        return contract.get_reward(self._caller, self._instance).result() if self._instance.kind.scores else None

    def reply(self, ids: Sequence[int], text: str) -> Reply:
        """Make the calls of a turn of the model, given by its tokens and as text."""
        content, calls = (text, []) if self._format is None else self._format.parse(ids)
        # The user is at the keyboard: the environment does not speak for them.
        answering = answered(self._caller, self._instance, content, calls, is_last=True)
        results = asyncio.run_coroutine_threadsafe(answering, event_loop()).result()
        return Reply(as_message(content, calls), results)


def _the_only(environments: Environments) -> Instance:
    """Return an instance of the only environment, which needs no column of data."""
    if len(environments.kinds) > 1:
        raise UserError(
            f"a chat has one environment, and environment.use has {', '.join(map(str, environments.kinds))}; name one"
        )
    (kind,) = environments.kinds.values()
    if kind.wanted:
        raise UserError(
            f"the environment {kind.label}: reset{line_of(kind.probe.reset)} wants the column {kind.wanted[0]!r}, and "
            "a chat has no data; use `cavesson generate MODEL --data.path FILE`"
        )
    return environments.take(kind)
