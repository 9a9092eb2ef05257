"""The prompts of a run, and what answers its policy, as training and all that looks ahead of it read them."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from transformers import PreTrainedTokenizerBase

from cavesson.algorithms.runs import RolloutRun
from cavesson.data.chat import Chat
from cavesson.data.prompts import PromptSet, given_prompts, load_prompts
from cavesson.rollout.conversation import Conversation
from cavesson.rollout.loading import Given, load_environments

Columns = Mapping[str, Sequence[Any]]
NOTHING = Given()


def conversation_of(
    settings: RolloutRun, tokenizer: PreTrainedTokenizerBase, given: Given = NOTHING
) -> Conversation | None:
    """Load the tools and environments that answer the policy, if there are any.

    Raises:
        UserError: one cannot be loaded or used, or the chat template or a setting does not allow it.
    """
    environments = load_environments(settings.environment, given)
    if given == NOTHING and settings.environment.use is None and not settings.environment.tools:
        return None
    chat = Chat.of(settings.data, tokenizer)
    return Conversation(
        settings.environment, environments, chat, settings.longest_episode, settings.data.max_prompt_tokens
    )


def prompts_of(
    settings: RolloutRun,
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation | None,
    given: Sequence[str] | Mapping[str, Sequence[Any]] | None = None,
) -> PromptSet:
    """Read the prompts of a run, or those that a program gives, with the tools that are offered.

    Raises:
        UserError: there is no usable prompt, or a row does not fit the environments.
    """
    offer = None if conversation is None else conversation.offer
    if given is None:
        return load_prompts(settings.data, tokenizer, offer)
    return given_prompts(given, settings.data, tokenizer, offer)


def tried(conversation: Conversation | None, prompts: PromptSet) -> AbstractContextManager[Columns]:
    """Give the columns that rewards get of prompts; with a conversation, of its first episodes, which begin."""
    return nullcontext(prompts.for_rewards) if conversation is None else conversation.tried(prompts)
