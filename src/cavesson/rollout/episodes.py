"""Episodes: the policy and what answers it take turns. A single response is the episode of one turn."""

from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cavesson.data.prompts import padded_prompts
from cavesson.record.schema import SOURCE_CODES
from cavesson.rollout.engines.responses import Engine, Turns
from cavesson.types import Turn

CUT = ("length", "turns")
"""Finish reasons of episodes that a limit has ended."""
_PATIENCE = 1.0
"""Seconds for which an episode that is answered waits for the others, so that rounds do not depend on how fast tools
are: in another company, the log-probabilities of a row are rounded differently."""
_LEARNED = torch.tensor([SOURCE_CODES["sampled"], SOURCE_CODES["data"]], dtype=torch.int8)
_LEAST = 2
"""columns of a batch (`Batch._cut`)"""


@dataclass
class Episode:
    """An episode that is being played: its tokens after the first prompt, and its turns.

    Attributes:
        index: of its prompt in the data.
        row: position in the step's global batch.
        prompt: tokens of the first prompt.
        text: what the sampler sees first.
        messages: of the conversation so far, if something answers the policy.
        world: the instance of the environment, if there is one.
    """

    index: int
    row: int
    prompt: Sequence[int]
    text: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    world: Any = None
    ids: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    version: int = 0
    """number of training steps of the weights that sample its first token"""
    last: int = 0
    """place of the first token of the policy's last turn"""
    reason: str = ""
    """why its last response ended: eos, stop or length; or why the episode did"""

    def sampled(self, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], reason: str) -> None:
        """Append a turn that the policy sampled."""
        self.last, self.reason = len(self.ids), reason
        self.ids += ids
        self.sources += [0] * len(ids)
        self.logprobs += logprobs
        self.versions += versions

    def answered(self, prompt: Sequence[int], ids: Sequence[int], learn: Sequence[bool], reason: str) -> None:
        """End with a response that the data give, whose prompt may be tokenized in another way."""
        self.prompt, self.reason = prompt, reason
        self.append(ids, [SOURCE_CODES["data" if one else "template"] for one in learn])

    def append(self, ids: Sequence[int], sources: Sequence[int]) -> None:
        """Append tokens that the policy did not sample; their log-probability is not known, and 0 stands for it."""
        self.ids += ids
        self.sources += sources
        self.logprobs += [0.0] * len(ids)
        self.versions += [self.version] * len(ids)


class Partner(Protocol):
    """What answers the policy; see `rollout.conversation.Conversation`."""

    def room(self, episode: Episode) -> int:
        """Return how many tokens the next turn of an episode may have at most."""

    def answer(self, episode: Episode) -> "Future[bool]":
        """Begin to answer the last turn of an episode; the result is whether the policy has another one."""


class Played(NamedTuple):
    """Columns of episodes, `[B, T]`, padded on the right."""

    response_ids: Tensor
    attended: Tensor
    """float32, 1 on all tokens"""
    learned: Tensor
    """float32, 1 on those that the policy sampled or the data give"""
    source: Tensor
    """int8, see `record.schema.SOURCES`; 0 on padding too"""
    sampler_logprob: Tensor
    sampler_version: Tensor
    ended: Tensor
    """`[B]`: 1 unless a limit has ended the episode"""


def play(
    engine: Engine,
    episodes: Sequence[Episode],
    step: int,
    temperature: float | None = None,
    conversation: Partner | None = None,
) -> Played:
    """Play episodes to their ends, and return their columns; the episodes get their tokens and turns.

    Episodes that have ended before stay as they are.

    The engine samples the policy's turns, and the conversation answers; without one, an episode is one turn. Episodes
    that are answered go on together; one whose answer takes long does not hold up the others. The step, with the row of
    an episode and the position in it, determines the draws. `temperature` overrides that of the engine.
    """
    answers: dict[Future[bool], Episode] = {}
    ready = [one for one in episodes if not one.reason]
    with engine.sampling():
        while ready or answers:
            if ready:
                _sample(engine, ready, step, temperature, conversation)
            if conversation is None:
                break
            answers |= {conversation.answer(episode): episode for episode in ready}
            done, _ = wait(answers, timeout=_PATIENCE)
            done = done or wait(answers, return_when=FIRST_COMPLETED).done
            # In order of their rows, so that the company of a row in a batch does not depend on who was first.
            ready = sorted((answers[one] for one in done if one.result()), key=lambda one: one.row)
            answers = {one: episode for one, episode in answers.items() if one not in done}
    return _columns(episodes)


def _sample(
    engine: Engine,
    episodes: Sequence[Episode],
    step: int,
    temperature: float | None,
    conversation: Partner | None,
) -> None:
    """Append the next turn of the policy to each of some episodes."""
    turns = None
    if conversation is not None:
        turns = Turns([len(one.ids) for one in episodes], [conversation.room(one) for one in episodes])
    batch = padded_prompts([[*one.prompt, *one.ids] for one in episodes])
    responses = engine.sample(batch, step, [one.row for one in episodes], temperature, turns)
    columns = (responses.response_ids, responses.sampler_logprob, responses.versions)
    lengths = responses.mask.sum(1).long().tolist()
    for row, (episode, length, reason) in enumerate(zip(episodes, lengths, responses.finish_reasons, strict=True)):
        ids, logprobs, versions = (column[row, :length].tolist() for column in columns)
        if not episode.ids:
            episode.version = int(responses.versions[row, 0])
        episode.sampled(ids, logprobs, versions, reason)


def _columns(episodes: Sequence[Episode]) -> Played:
    width = max(_LEAST, *(len(one.ids) for one in episodes))

    def padded(rows: Iterable[Sequence[Any]], dtype: torch.dtype) -> Tensor:
        return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=dtype)

    versions = [[*one.versions, *[one.version] * (width - len(one.ids))] for one in episodes]
    source = padded((one.sources for one in episodes), torch.int8)
    attended = padded(([1.0] * len(one.ids) for one in episodes), torch.float32)
    return Played(
        padded((one.ids for one in episodes), torch.long),
        attended,
        attended * torch.isin(source, _LEARNED),
        source,
        padded((one.logprobs for one in episodes), torch.float32),
        padded(versions, torch.long),
        torch.tensor([float(one.reason not in CUT) for one in episodes]),
    )
