"""The prompts of a run, and what answers its policy, as training and all that looks ahead of it read them."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from cavesson.data.chat import Chat
from cavesson.data.prompts import PromptSet, given_prompts, load_prompts
from cavesson.data.settings import PromptSettings
from cavesson.data.types import Answered, Prompt
from cavesson.errors import UserError
from cavesson.models.parts import causal, position_limit
from cavesson.models.policy import Policy
from cavesson.rollout.conversation import Conversation
from cavesson.rollout.engines.settings import DecodingSettings
from cavesson.rollout.loading import Given, load_environments
from cavesson.rollout.rewards.table import Reward
from cavesson.rollout.settings import EnvironmentSettings
from cavesson.text.counting import some_of

Columns = Mapping[str, Sequence[Any]]
NOTHING = Given()


class Asking(Protocol):
    """The settings of whatever asks a policy: a run, or a tool that uses a trained model."""

    @property
    def data(self) -> PromptSettings:
        """Where the prompts come from."""

    @property
    def environment(self) -> EnvironmentSettings:
        """What answers the policy."""

    @property
    def sampling(self) -> DecodingSettings:
        """How a turn of the policy is sampled."""

    @property
    def longest_episode(self) -> int:
        """The most tokens of an episode after its first prompt; without an environment, of a response."""


def conversation_of(
    settings: Asking, tokenizer: PreTrainedTokenizerBase, given: Given = NOTHING
) -> Conversation | None:
    """Load the tools and environments that answer the policy, if there are any.

    Raises:
        UserError: one cannot be loaded or used, or the chat template or a setting does not allow it.
    """
    environments = load_environments(settings.environment, given)
    if given == NOTHING and not settings.environment.is_named:
        return None
    chat = Chat.of(settings.data, tokenizer)
    return Conversation(
        settings.environment, environments, chat, settings.longest_episode, settings.data.max_prompt_tokens
    )


def prompts_of(
    settings: Asking,
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation | None,
    given: Sequence[str] | Mapping[str, Sequence[Any]] | None = None,
    kind: type[Prompt] = Prompt,
) -> PromptSet:
    """Read the prompts of a run, or those that a program gives, with the tools that are offered.

    Of the kind `Answered`, they have responses.

    Raises:
        UserError: there is no usable prompt, or a row does not fit the environments or lacks a response.
    """
    if kind is Answered and conversation is not None:
        raise UserError("responses of the data cannot be given where tools or environments answer: give one of the two")
    offer = None if conversation is None else conversation.offer
    if given is None:
        return load_prompts(settings.data, tokenizer, offer, kind)
    return given_prompts(given, settings.data, tokenizer, offer, kind)


def tried(conversation: Conversation | None, prompts: PromptSet) -> AbstractContextManager[Columns]:
    """Give the columns that rewards get of prompts; with a conversation, of its first episodes, which begin."""
    return nullcontext(prompts.for_rewards) if conversation is None else conversation.tried(prompts)


def is_rewarded(rewards: Sequence[Reward], conversation: Conversation | None) -> bool:
    """Return whether something scores responses, rewards or environments; their names must differ.

    Raises:
        UserError: a reward and an environment have the same name.
    """
    scored = () if conversation is None else conversation.scored
    if twice := [one.name for one in rewards if one.name in scored]:
        raise UserError(f"a reward and an environment are called {twice[0]!r}; give the reward another name")
    return bool(rewards or scored)


def longest_read(settings: Asking, policy: Policy) -> int:
    """Return the most tokens before a turn: those of all turns before it, and of a prompt that `reset` made longer.

    Raises:
        UserError: an episode does not fit into the model's positions.
    """
    parts = {
        "data.max_prompt_tokens": settings.data.max_prompt_tokens,
        "environment.max_tokens": settings.longest_episode,
    }
    limit, turn = position_limit(causal(policy.model).config), settings.sampling.longest
    if limit is not None and sum(parts.values()) + turn > limit:
        named = {**parts, "sampling.max_new_tokens": turn}
        said = " + ".join(f"{name} {value:,}" for name, value in named.items())
        raise UserError(
            f"episodes of {said} tokens do not fit into the model's {limit:,} positions; reduce one of them"
        )
    return sum(parts.values())


def dropped_prompts(prompts: PromptSet) -> list[str]:
    """Return notes for the user on prompts, and held-out ones, that are left out."""
    notes: list[str] = []
    for some, name in ((prompts, "prompts"), (prompts.held_out, "held-out prompts")):
        notes += [] if some is None else some.notes
        if some is not None and (overlong := some.overlong):
            rows = some_of((str(row + 1) for row in overlong), 10)
            of = f"{len(overlong)} of {len(some.dropped) + len(some)} {name}"
            notes.append(f"{of} are longer than data.max_prompt_tokens and were dropped: rows {rows}")
    return notes
