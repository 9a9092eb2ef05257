"""The tools and the environment of a chat in the terminal, whose user is at the keyboard."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from cavesson.data.chat import Chat, Tools
from cavesson.errors import UserError
from cavesson.rewards.arguments import line_of
from cavesson.rollout import contract
from cavesson.rollout.calling import Caller
from cavesson.rollout.calls import CallFormat
from cavesson.rollout.conversation import assistant_message, tool_message
from cavesson.rollout.environments import Environments, Instance
from cavesson.rollout.loading import load_environments
from cavesson.rollout.settings import EnvironmentSettings
from cavesson.rollout.types import Answered, Call


class Reply(NamedTuple):
    """What a turn of the model is as a message, and what its calls gave."""

    message: dict[str, Any]
    calls: Sequence[Call]
    results: Sequence[Answered]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The turn and the results, as messages."""
        return [self.message, *map(tool_message, self.calls, self.results)]


class ChatTools:
    """The tools and the environment of a chat.

    Args:
        settings: name them.
        chat: renders the conversation.

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
        """Make the calls of a turn of the model.

        Args:
            ids: the tokens of the turn.
            text: the turn as text.
        """
        if self._format is None:
            return Reply(assistant_message(text, ()), (), ())
        content, calls = self._format.parse(ids)
        return Reply(
            assistant_message(content, calls), calls, self._caller.answer(self._instance.tools, calls).result()
        )


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
