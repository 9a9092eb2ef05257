"""The first half of a step: sample responses, and score them with the rewards, the policy and the reference."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cavesson.data.prompts import PromptSet, padded_prompts
from cavesson.errors import UserCodeError
from cavesson.models.policy import Policy, after_responses
from cavesson.ops import kl
from cavesson.ops.groups import standardised
from cavesson.processes import Processes
from cavesson.rollout.conversation import Conversation
from cavesson.rollout.engines.responses import Engine
from cavesson.rollout.engines.teacher import TeacherServers
from cavesson.rollout.episodes import Episode, play
from cavesson.rollout.rewards.cleaning import CleaningSettings, discard, is_discarded
from cavesson.rollout.rewards.table import Reward, score
from cavesson.train.given import Mix
from cavesson.train.prompts import is_rewarded
from cavesson.types import Batch, Rollouts, Scores

T = TypeVar("T")


@dataclass(frozen=True)
class Collector:
    """Makes rollouts from prompts: generates responses and rewards them."""

    prompts: PromptSet
    sampler: Engine
    rewards: tuple[Reward, ...]
    tokenizer: PreTrainedTokenizerBase
    cleaning: CleaningSettings = field(default_factory=CleaningSettings)
    subtract_query: bool = False
    """whether every prompt is also rewarded with an empty response"""
    conversation: Conversation | None = None
    """what answers the policy, if anything does"""
    teacher: TeacherServers | None = None
    """a teacher on servers, which score responses together with the rewards"""
    mix: Mix | None = None
    """which responses the data give instead; None = the policy samples all of them"""

    def generate(self, indices: Sequence[int], step: int, sample: range, temperature: float | None = None) -> Rollouts:
        """Sample one response to each of the prompts with these indices, except where the data give it.

        The training step and the positions `sample` in its global batch determine the random numbers.

        Returns:
            Rollouts with the columns `prompt_ids`, `prompt_mask` `[B, S]`, `response_ids`, `attended`, `learned`,
            `sampler_logprob` and `sampler_version` `[B, T]`, and `ended` `[B]`: 1 unless the response was cut at the
            length limit.
        """
        episodes = self._begun(indices, sample)
        if self.mix is not None:
            self.mix.answer(episodes, self.prompts, step)
        columns = play(self.sampler, episodes, step, temperature, self.conversation)
        answered = [] if self.conversation is None else episodes
        return Rollouts(
            prompt=[one.text for one in episodes],
            prompt_index=list(indices),
            sample=list(sample),
            response=[self.text(one.prompt, one.ids) for one in episodes],
            finish_reason=[one.reason for one in episodes],
            batch=padded_prompts([one.prompt for one in episodes]).with_columns(**columns._asdict()),
            ground_truth=[None if answer is None else str(answer) for answer in self._truths(indices)],
            turns=[one.turns for one in answered],
            messages=[one.messages for one in answered],
            worlds=[one.world for one in answered],
        )

    def _begun(self, indices: Sequence[int], rows: Sequence[int]) -> list[Episode]:
        """Return the episodes of prompts, at their beginnings."""
        prompts = self.prompts
        if self.conversation is not None:
            return self.conversation.begin(prompts, indices, rows)
        return [Episode(i, row, prompts.ids[i], prompts.texts[i]) for i, row in zip(indices, rows, strict=True)]

    def reward(self, rollouts: Rollouts) -> Rollouts:
        """Add the rewards of rollouts, their parts, weights and reasons, and what a teacher on servers says of them.

        They are `reward` `[B]` float64, NaN for a response that no part judges; `discarded` `[B]` bool; if configured,
        `query_reward` `[B]`; of episodes, `turn_reward` `[B, T]` float64, which the reward contains, on the last token
        of each turn and 0 elsewhere; and the lists `reward_parts`, `reward_weights` and `reward_reasons`.

        If nothing rewards responses, none of these is added. What the teacher says is `teacher_logprob` `[B, T]`.

        Raises:
            UserCodeError: a reward failed.
            ServerError: a server of the teacher failed.
        """
        if self.teacher is not None:
            rollouts = rollouts.with_columns(teacher_logprob=self.teacher.logprob(rollouts))
        if not is_rewarded(self.rewards, self.conversation):
            if self.conversation is not None:
                self.conversation.release(rollouts.worlds)
            return replace(rollouts, worlds=[])
        columns = self._columns(rollouts.prompt_index) | _of_episodes(rollouts)
        ids = _unpadded(rollouts["response_ids"], rollouts["attended"])
        scored = score(self.rewards, rollouts.prompt, last_answers(rollouts), columns, ids)
        if self.conversation is not None:
            scored = scored.with_parts(self.conversation.rewards(rollouts.worlds, rollouts.turns))
            self.conversation.release(rollouts.worlds)
        total, discards = discard(self.cleaning, rollouts.response, scored.total)
        named: dict[str, Sequence[float | None]] = {**scored.parts, **discards}
        parts = _of_rows(named, len(rollouts))
        # In float64, because the record must have the reward exactly as it was given.
        new = {"reward": _column(total), "discarded": torch.tensor([is_discarded(part) for part in parts])}
        if self.conversation is not None:
            new["turn_reward"] = _of_turns(rollouts)
        if self.subtract_query:
            empty = score(self.rewards, rollouts.prompt, [""] * len(rollouts), columns).total
            _check_judged(total, empty, rollouts.prompt)
            new["query_reward"] = _column(empty)
        return replace(
            rollouts.with_columns(**new),
            worlds=[],
            reward_parts=parts,
            reward_weights=[{name: scored.weights[name] for name in part if name in scored.weights} for part in parts],
            reward_reasons=_of_rows(scored.reasons, len(rollouts)) if scored.reasons else [],
        )

    def close(self) -> None:
        """Release the engine, and cancel what a teacher on servers is asked."""
        self.sampler.close()
        if self.teacher is not None:
            self.teacher.close()

    def text(self, prompt: Sequence[int], response: Sequence[int]) -> str:
        """Return the text of a response, decoded together with its prompt.

        If a response is decoded alone, some tokenizers remove its leading space.
        """
        before, whole = self._decode(prompt), self._decode([*prompt, *response])
        return whole[len(before) :] if whole.startswith(before) else self._decode(response)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def _columns(self, indices: Sequence[int]) -> dict[str, list[Any]]:
        return {name: [values[i] for i in indices] for name, values in self.prompts.for_rewards.items()}

    def _truths(self, indices: Sequence[int]) -> list[Any]:
        truths = self.prompts.columns.get("ground_truth", ())
        return [truths[i] for i in indices] if truths else []


class Scoring:
    """Scores rollouts of this process by policy, critic and reference, one micro-batch at a time.

    `estimator` is that of the KL penalty, or None for no penalty.
    """

    def __init__(self, policy: Policy, rollouts: Batch, estimator: str | None) -> None:
        self._policy, self._rollouts, self._estimator = policy, rollouts, estimator
        self.columns: dict[str, Tensor] = {}
        """what has been scored, each `[B, T]`: `logprob` and `entropy`; with a critic, `value`; with a teacher beside
        the policy, `teacher_logprob`; with a reference, `ref_logprob`, and with an estimator as well, `kl_penalty`"""

    def score(self, rows: Sequence[int], has_graph: bool = False) -> tuple[Batch, Scores]:
        """Score a micro-batch; return it with its new columns, and the policy's scores, with their graph if asked for.

        A micro-batch without rows only keeps step with other processes.
        """
        micro = self._rollouts.part(rows).to(self._policy.device)
        with torch.set_grad_enabled(has_graph):
            scores = self._policy(micro)
        columns = dict(_score_columns(self._policy, micro, scores, self._estimator))
        for name, column in columns.items():
            place = self.columns.setdefault(name, torch.zeros_like(self._rollouts["learned"]))
            if len(rows):
                place[rows, : column.shape[1]] = column.cpu()
        return micro.with_columns(**columns), scores


def score_rollouts(
    policy: Policy, rollouts: Batch, estimator: str | None, parts: Sequence[Sequence[int]]
) -> dict[str, Tensor]:
    """Score rollouts in these micro-batches, and return the columns of `Scoring`."""
    scoring = Scoring(policy, rollouts, estimator)
    for rows in parts or [[]]:  # a process without rows has the same columns as the others
        scoring.score(rows)
    return scoring.columns


def next_values(policy: Policy, rollouts: Batch, parts: Sequence[Sequence[int]]) -> Tensor:
    """Return the critic's value `[B]` after each response of these micro-batches, and 0 of all others."""
    values = torch.zeros(len(rollouts))
    for rows in parts:
        found = policy.next_value(after_responses(rollouts.part(rows)).to(policy.device)).cpu()
        values[list(rows)] = found[: len(rows)]
    return values


def _score_columns(policy: Policy, batch: Batch, scores: Scores, estimator: str | None) -> Iterator[tuple[str, Tensor]]:
    logprob = scores.logprob.detach()
    yield from {"logprob": logprob, "entropy": scores.entropy.detach()}.items()
    if scores.value is not None:
        yield "value", scores.value.detach()
    if policy.teacher is not None:
        known = scores.teacher_logprob
        yield "teacher_logprob", policy.teacher_logprob(batch) if known is None else known
    if not policy.has_reference:
        return
    reference = policy.reference_logprob(batch)
    yield "ref_logprob", reference
    if estimator == "full":
        yield "kl_penalty", policy.reference_kl(batch)
    elif estimator is not None:
        yield "kl_penalty", kl.ESTIMATORS[estimator](logprob, reference)


def normalised_parts(rollouts: Rollouts, processes: Processes) -> Tensor:
    """Return the weighted sum of the parts of every reward, each standardised within its group, `[B]` float64.

    All processes call this together. A part that does not judge a response adds nothing to it.
    """
    # A reward may return other parts for other responses, and so in other processes.
    mine = {name for part in rollouts.reward_parts for name in part}
    total = torch.zeros(len(rollouts), dtype=torch.float64)
    for name in sorted(set().union(*processes.of_all(mine))):
        scores = _column([part.get(name) for part in rollouts.reward_parts])
        weights = torch.tensor([weight.get(name, 0.0) for weight in rollouts.reward_weights], dtype=torch.float64)
        total += weights * processes.over_all(standardised, scores, rollouts["group_in_step"])
    return total


def _unpadded(response_ids: Tensor, attended: Tensor) -> list[list[int]]:
    lengths = attended.sum(1).long().tolist()
    return [ids[:length] for ids, length in zip(response_ids.tolist(), lengths, strict=True)]


def last_answers(rollouts: Rollouts) -> list[str]:
    """Return what rewards judge of each rollout: what the policy said last."""
    said = [[turn.text for turn in turns if turn.role == "assistant"] for turns in rollouts.turns]
    return [texts[-1] for texts in said] if said else rollouts.response


def _of_turns(rollouts: Rollouts) -> Tensor:
    """Return [B, T] what the environment gave for turns, on their last tokens."""
    rewards = torch.zeros(rollouts["learned"].shape, dtype=torch.float64)
    for row, turns in enumerate(rollouts.turns):
        for turn in turns:
            if turn.reward is not None and turn.tokens:
                rewards[row, turn.first_token + turn.tokens - 1] = turn.reward
    return rewards


def _of_episodes(rollouts: Rollouts) -> dict[str, list[Any]]:
    """Return the columns that rewards get of episodes: whole conversations, and environments."""
    if not rollouts.turns:
        return {}
    return {"messages": rollouts.messages, "environments": [one.environment for one in rollouts.worlds]}


def _of_rows(columns: Mapping[str, Sequence[T | None]], rows: int) -> list[dict[str, T]]:
    """Return what each of the rows has, by name, without what is None."""
    return [{name: one for name, each in columns.items() if (one := each[row]) is not None} for row in range(rows)]


def _column(rewards: Sequence[float | None]) -> Tensor:
    """Return rewards as float64, with NaN for None; no reward is NaN itself."""
    return torch.tensor([math.nan if one is None else one for one in rewards], dtype=torch.float64)


def _check_judged(rewards: Sequence[float | None], empty: Sequence[float | None], prompts: Sequence[str]) -> None:
    """Raise UserCodeError if a response is judged, but not an empty one to its prompt: there is nothing to subtract."""
    for reward, query, prompt in zip(rewards, empty, prompts, strict=True):
        if reward is not None and query is None:
            raise UserCodeError(
                f"shaping.subtract_query: no reward judges an empty response to {prompt!r}; return a number for it"
            )


# Far from any training step, so that held-out responses never share random numbers with rollouts.
EVALUATION_STEP = 2**32


def evaluate(collector: Collector, samples_per_prompt: int) -> Rollouts:
    """Sample responses to every prompt of the collector and reward them.

    Repeated calls use the same prompts in the same order with the same random numbers, even if the policy has changed.
    """
    indices = [i for i in range(len(collector.prompts)) for _ in range(samples_per_prompt)]
    collector.sampler.update_weights(EVALUATION_STEP)
    rollouts = collector.generate(indices, EVALUATION_STEP, range(len(indices)))
    collector.sampler.sleep()
    return collector.reward(rollouts)
