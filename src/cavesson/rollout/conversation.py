"""What answers the policy in an episode: tools, an environment, a user."""

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

from cavesson.data.chat import Chat, Tools
from cavesson.data.encode import Asked, Encoder
from cavesson.data.prompts import PromptSet, content_of
from cavesson.data.types import Prompt
from cavesson.errors import UserError
from cavesson.record.schema import SOURCES
from cavesson.rollout import contract
from cavesson.rollout.answering import answered, as_message, end_of
from cavesson.rollout.calling import Caller
from cavesson.rollout.calls import CallFormat
from cavesson.rollout.continuation import Continuation
from cavesson.rollout.environments import Environments, Instance, Kind
from cavesson.rollout.episodes import Episode
from cavesson.rollout.rewards.concurrent import event_loop
from cavesson.rollout.settings import EnvironmentSettings
from cavesson.rollout.types import Call
from cavesson.types import Turn


class Language(NamedTuple):
    """How a policy and the environment of one kind talk."""

    schemas: Tools
    """of the tools that it offers"""
    calls: CallFormat | None
    """None without tools"""
    continuation: Continuation | None
    """None if nothing ever answers the policy"""


class Conversation:
    """Begins episodes, and answers the turns of the policy.

    An episode has at most `max_tokens` after its first prompt; a prompt, with what `reset` adds to it,
    `max_prompt_tokens`.

    Raises:
        UserError: the chat template, the tokenizer or the settings do not allow it.
    """

    def __init__(
        self,
        settings: EnvironmentSettings,
        environments: Environments,
        chat: Chat,
        max_tokens: int,
        max_prompt_tokens: int,
    ) -> None:
        self.settings, self.environments, self.chat = settings, environments, chat
        self.max_tokens, self.max_prompt_tokens = max_tokens, max_prompt_tokens
        self._caller = Caller(settings.concurrency, settings.timeout)
        self._languages = {name: self._language(kind) for name, kind in environments.kinds.items()}

    @property
    def scored(self) -> list[str]:
        """The names of the rewards that environments give, of episodes and of turns."""
        kinds = self.environments.kinds.values()
        names = [name for kind in kinds for name, gives in _rewards_of(kind).items() if gives]
        return list(dict.fromkeys(names))

    @property
    def notes(self) -> list[str]:
        """What a user should know before the first step."""
        found = [one.continuation.note for one in self._languages.values() if one.continuation is not None]
        return list(dict.fromkeys(note for note in found if note is not None))

    def offer(self, rows: Sequence[Prompt], source: str) -> list[Tools]:
        """Return the schemas of the tools that are offered with each of some rows of the data.

        Raises:
            UserError: a row names no environment, lacks a column, has tools of its own, or is plain text.
        """
        columns = {name: [row.columns.get(name) for row in rows] for name in rows[0].columns}
        self.environments.check({"prompt": [row.prompt for row in rows], **columns})
        if any(row.tools for row in rows):
            raise UserError(
                f"{source}: tools of the data have no effect beside those of [environment]; "
                "set data.ignore to tools, or remove data.tools"
            )
        if any(isinstance(row.prompt, str) for row in rows) and not self.chat.of_texts:
            raise UserError(f"{source}: a prompt is plain text, and tools are for conversations; set data.chat = true")
        return [self._languages[self.environments.of(row.columns).name].schemas for row in rows]

    def begin(self, prompts: PromptSet, indices: Sequence[int], rows: Sequence[int]) -> list[Episode]:
        """Reset environments for prompts, all at the same time, and return their episodes.

        The prompts are those of the data with these `indices`, and `rows` their positions in the step's global batch.

        Raises:
            UserCodeError: an environment failed.
            UserError: what `reset` returned makes a prompt too long, or the template cannot render it.
        """
        columns = {"prompt": prompts.messages or prompts.texts, **prompts.for_rewards}
        data = [{name: values[i] for name, values in columns.items()} for i in indices]
        instances = [self.environments.take(self.environments.of(row)) for row in data]
        said = [contract.reset(self._caller, one, row) for one, row in zip(instances, data, strict=True)]
        return [
            self._begun(prompts, index, row, instance, text.result())
            for index, row, instance, text in zip(indices, rows, instances, said, strict=True)
        ]

    def room(self, episode: Episode) -> int:
        """Return how many tokens the next turn of an episode may have at most."""
        return self.max_tokens - len(episode.ids)

    def answer(self, episode: Episode) -> "Future[bool]":
        """Begin to answer the last turn of an episode; the result is whether the policy has another one."""
        return asyncio.run_coroutine_threadsafe(self._answer(episode), event_loop())

    def rewards(self, instances: Sequence[Instance], turns: Sequence[Sequence[Turn]]) -> dict[str, list[float | None]]:
        """Return what environments say that their episodes earned, by the names of their classes.

        The sum of what they say that the turns earned is the part CLASS.turns.

        Raises:
            UserCodeError: one failed.
        """
        asked = [contract.get_reward(self._caller, one) if one.kind.scores else None for one in instances]
        found: dict[str, list[float | None]] = {name: [None] * len(instances) for name in self.scored}
        for row, (instance, answer) in enumerate(zip(instances, asked, strict=True)):
            episode, of_turns = _rewards_of(instance.kind)
            if answer is not None:
                found[episode][row] = answer.result()
            given = [turn.reward for turn in turns[row] if turn.reward is not None]
            if given:
                found.setdefault(of_turns, [None] * len(instances))[row] = math.fsum(given)
        return found

    @contextmanager
    def tried(self, prompts: PromptSet) -> Iterator[dict[str, list[Any]]]:
        """Begin episodes of the first two prompts, and give the columns that rewards get of them.

        This detects errors in environments before a model is loaded and before anything is written.

        Raises:
            UserError: an environment failed, or a prompt cannot be rendered.
        """
        rows = range(min(2, len(prompts)))
        episodes = self.begin(prompts, rows, rows)
        instances = [one.world for one in episodes]
        try:
            columns = {name: list(values[: len(rows)]) for name, values in prompts.for_rewards.items()}
            worlds = [one.environment for one in instances]
            yield columns | {"messages": [one.messages for one in episodes], "environments": worlds}
            self.rewards(instances, [()] * len(instances))
        finally:
            self.release(instances)

    def release(self, instances: Sequence[Instance]) -> None:
        """Give environments back, except those in which a call is still running."""
        self.environments.release(one for one in instances if not self._caller.is_busy(one.environment))

    def _language(self, kind: Kind) -> Language:
        schemas = [tool.schema for tool in kind.tools.values()]
        if not schemas and not kind.speaks:
            return Language((), None, None)
        calls = CallFormat.of(self.chat, schemas, self.settings.call_format) if schemas else None
        return Language(schemas, calls, Continuation.of(self.chat, schemas, replies=kind.speaks))

    def _begun(self, prompts: PromptSet, index: int, row: int, instance: Instance, text: str | None) -> Episode:
        messages = list(prompts.messages[index] or ()) if prompts.messages else []
        if text is None:
            return Episode(index, row, prompts.ids[index], prompts.texts[index], messages, instance)
        messages = joined(messages, text)
        place = f"the prompt of row {index} with what reset returned"
        asked = Asked(place, content_of(messages, place), (), self._languages[instance.kind.name].schemas)
        (line,) = Encoder(self.chat).prompts([asked])
        if line.problem is not None:
            raise UserError(f"{place}: {line.problem}")
        if len(line.ids) > self.max_prompt_tokens:
            raise UserError(
                f"{place} has {len(line.ids)} tokens; return a shorter text, or raise data.max_prompt_tokens "
                f"({self.max_prompt_tokens})"
            )
        return Episode(index, row, line.ids, line.text, messages, instance)

    async def _answer(self, episode: Episode) -> bool:
        goes_on = await self._goes_on(episode)
        if not goes_on:
            self._reward_turns(episode)
        return goes_on

    async def _goes_on(self, episode: Episode) -> bool:
        instance: Instance = episode.world
        language = self._languages[instance.kind.name]
        start = episode.last
        content = str(self.chat.tokenizer.decode(episode.ids[start:], skip_special_tokens=True))
        calls: list[Call] = []
        if language.calls is not None and episode.reason != "length":
            content, calls = language.calls.parse(episode.ids[start:])
        episode.turns.append(Turn("assistant", content, start, len(episode.ids) - start))
        episode.messages.append(as_message(content, calls))
        if episode.reason == "length" or language.continuation is None:
            return False
        is_last = self._is_last(episode)
        said = await answered(self._caller, instance, content, calls, is_last=is_last)
        episode.messages += [one.message for one in said]
        ends = end_of(instance, said, is_last=is_last)
        if said and ends is None and self._append(episode, language.continuation, [one.turn for one in said]):
            return True
        # What is said last has no tokens: nothing of the policy follows that would read them.
        episode.turns += [one.turn._replace(first_token=len(episode.ids)) for one in said]
        episode.reason = ends or ("length" if said else episode.reason)
        return False

    def _reward_turns(self, episode: Episode) -> None:
        """Add to the policy's turns what the environment says that each of them earned."""
        places = [place for place, turn in enumerate(episode.turns) if turn.role == "assistant"]
        given = contract.turn_rewards(episode.world, len(places)) or ()
        for place, reward in zip(places, given, strict=False):
            episode.turns[place] = episode.turns[place]._replace(reward=reward)

    def _is_last(self, episode: Episode) -> bool:
        spoken = sum(turn.role == "assistant" for turn in episode.turns)
        return self.settings.max_turns is not None and spoken >= self.settings.max_turns

    def _append(self, episode: Episode, continuation: Continuation, said: Sequence[Turn]) -> bool:
        """Append what was said to an episode if there is room for it and another turn; return whether there is."""
        sampled = episode.ids[-1] if episode.reason == "eos" else None
        suffix = continuation.suffix(episode.messages[-len(said) :], end=sampled)
        start = len(episode.ids)
        if start + len(suffix.ids) >= self.max_tokens:
            return False
        for number, turn in enumerate(said):
            places = [place for place, owner in enumerate(suffix.owners) if owner == number]
            first = start + (places[0] if places else 0)
            episode.turns.append(turn._replace(first_token=first, tokens=len(places)))
        episode.append(suffix.ids, [SOURCES.index(source) for source in suffix.sources])
        return True


def _rewards_of(kind: Kind) -> dict[str, bool]:
    """Return the names of the rewards of its episodes and of their turns, and whether it gives these."""
    return {kind.label: kind.scores, f"{kind.label}.turns": kind.rewards_turns}


def joined(messages: Sequence[Mapping[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return a conversation whose last message of the user ends with a text; raise a UserError if the user has said
    nothing.
    """
    found = [dict(message) for message in messages]
    asked = next((message for message in reversed(found) if message["role"] == "user"), None)
    if asked is None:
        raise UserError("reset returned a text, which joins the last message of the user, but the prompt has none")
    content = asked["content"] or ""
    asked["content"] = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return found
