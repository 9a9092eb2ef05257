"""The first half of a step: sample responses, and score them with the rewards, the policy and the reference."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cavesson.data.prompts import PromptSet
from cavesson.models.policy import Policy
from cavesson.ops import kl
from cavesson.rewards.cleaning import CleaningSettings, discard, is_discarded
from cavesson.rewards.table import Reward, score
from cavesson.sampling.responses import Engine, Responses
from cavesson.types import Batch, Rollouts, Scores


@dataclass(frozen=True)
class Collector:
    """Makes rollouts from prompts: generates responses and rewards them.

    Attributes:
        prompts: the prompts.
        sampler: generates the responses.
        rewards: score them.
        tokenizer: turns token ids into text.
        cleaning: where responses are cut, and which are discarded.
        subtract_query: whether every prompt is also rewarded with an empty response.
    """

    prompts: PromptSet
    sampler: Engine
    rewards: tuple[Reward, ...]
    tokenizer: PreTrainedTokenizerBase
    cleaning: CleaningSettings = field(default_factory=CleaningSettings)
    subtract_query: bool = False

    def generate(self, indices: Sequence[int], step: int, sample: range, temperature: float | None = None) -> Rollouts:
        """Sample one response to each of the prompts with these indices.

        Args:
            indices: of the prompts.
            step: training step; with `sample` it determines the random numbers.
            sample: positions of the responses in the step's global batch.
            temperature: overrides that of the sampler.

        Returns:
            Rollouts with the columns `prompt_ids`, `prompt_mask` `[B, S]`, `response_ids`, `mask`, `sampler_logprob`
            and `sampler_version` `[B, T]`, and `ended` `[B]`: 1 unless the response was cut at the length limit.
        """
        batch = self.prompts.batch(indices)
        responses = self.sampler.sample(batch, step, sample, temperature)
        texts = [self.text(self.prompts.ids[i], ids) for i, ids in zip(indices, _unpadded(responses), strict=True)]
        batch = batch.with_columns(
            response_ids=responses.response_ids,
            mask=responses.mask,
            sampler_logprob=responses.sampler_logprob,
            sampler_version=responses.versions,
            ended=torch.tensor([float(reason != "length") for reason in responses.finish_reasons]),
        )
        return Rollouts(
            prompt=[self.prompts.texts[i] for i in indices],
            prompt_index=list(indices),
            sample=list(sample),
            response=texts,
            finish_reason=responses.finish_reasons,
            batch=batch,
            ground_truth=[None if answer is None else str(answer) for answer in self._truths(indices)],
        )

    def reward(self, rollouts: Rollouts) -> Rollouts:
        """Add `reward_parts`, `reward` `[B]` float64, `discarded` `[B]` bool and, if configured, `query_reward` `[B]`.

        Raises:
            UserCodeError: a reward failed.
        """
        columns = self._columns(rollouts.prompt_index)
        scored = score(self.rewards, rollouts.prompt, rollouts.response, columns)
        total, discards = discard(self.cleaning, rollouts.response, scored.total)
        named = scored.parts | discards
        parts = [dict(zip(named, values, strict=True)) for values in zip(*named.values(), strict=True)]
        # In float64, because the record must have the reward exactly as it was given.
        new = {"reward": torch.tensor(total, dtype=torch.float64)}
        new["discarded"] = torch.tensor([is_discarded(part) for part in parts])
        if self.subtract_query:
            empty = score(self.rewards, rollouts.prompt, [""] * len(rollouts), columns).total
            new["query_reward"] = torch.tensor(empty, dtype=torch.float64)
        return replace(rollouts.with_columns(**new), reward_parts=parts)

    def text(self, prompt: Sequence[int], response: Sequence[int]) -> str:
        """Return the text of a response, decoded together with its prompt.

        If a response is decoded alone, some tokenizers remove its leading space.
        """
        before, whole = self._decode(prompt), self._decode([*prompt, *response])
        return whole[len(before) :] if whole.startswith(before) else self._decode(response)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def _columns(self, indices: Sequence[int]) -> Mapping[str, list[Any]]:
        return {name: [values[i] for i in indices] for name, values in self.prompts.for_rewards.items()}

    def _truths(self, indices: Sequence[int]) -> list[Any]:
        truths = self.prompts.columns.get("ground_truth", ())
        return [truths[i] for i in indices] if truths else []


Use = Callable[[Sequence[int], Batch, Scores], None]
"""Called with the rows of a micro-batch, the micro-batch with its new columns, and the policy's scores."""


def score_rollouts(
    policy: Policy,
    rollouts: Batch,
    estimator: str | None,
    parts: Sequence[Sequence[int]],
    *,
    learned: int = 0,
    use: Use | None = None,
) -> dict[str, Tensor]:
    """Score rollouts by policy, critic and reference, and return the new columns.

    They are `logprob` and `entropy`; with a critic, `value`; with a reference, `ref_logprob`; and with a reference and
    an estimator, `kl_penalty`. Each is `[B, T]`.

    Args:
        policy: with its reference.
        rollouts: of this process.
        estimator: of the KL penalty, or None for no penalty.
        parts: all their rows, in micro-batches; empty ones only keep step with other processes.
        learned: how many of the parts, from the first one on, are scored with their graph.
        use: called with each of these, so that a step needs no other forward pass to learn from them.
    """
    scored: dict[str, Tensor] = {}
    for number, rows in enumerate(parts):
        micro = rollouts.part(rows).to(policy.device)
        with torch.set_grad_enabled(number < learned):
            scores = policy(micro)
        columns = dict(_score_columns(policy, micro, scores, estimator))
        if use is not None and number < learned:
            use(rows, micro.with_columns(**columns), scores)
        for name, column in columns.items():
            place = scored.setdefault(name, torch.zeros_like(rollouts["mask"]))
            if len(rows):
                place[rows, : column.shape[1]] = column.cpu()
    return scored


def _score_columns(policy: Policy, batch: Batch, scores: Scores, estimator: str | None) -> Iterator[tuple[str, Tensor]]:
    logprob = scores.logprob.detach()
    yield from {"logprob": logprob, "entropy": scores.entropy.detach()}.items()
    if scores.value is not None:
        yield "value", scores.value.detach()
    if not policy.has_reference:
        return
    reference = policy.reference_logprob(batch)
    yield "ref_logprob", reference
    if estimator == "full":
        yield "kl_penalty", policy.reference_kl(batch)
    elif estimator is not None:
        yield "kl_penalty", kl.ESTIMATORS[estimator](logprob, reference)


def _unpadded(responses: Responses) -> list[list[int]]:
    lengths = responses.mask.sum(1).long().tolist()
    return [ids[:length] for ids, length in zip(responses.response_ids.tolist(), lengths, strict=True)]


# Far from any training step, so that held-out responses never share random numbers with rollouts.
EVALUATION_STEP = 2**32


def evaluate(collector: Collector, samples_per_prompt: int) -> Rollouts:
    """Sample responses to every prompt of the collector and reward them.

    Repeated calls use the same prompts in the same order with the same random numbers, even if the policy has changed.
    """
    indices = [i for i in range(len(collector.prompts)) for _ in range(samples_per_prompt)]
    collector.sampler.synchronise(EVALUATION_STEP)
    rollouts = collector.generate(indices, EVALUATION_STEP, range(len(indices)))
    collector.sampler.rest()
    return collector.reward(rollouts)
