"""The first half of a step: sample responses, and score them with the rewards, the policy and the reference."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cavesson.data.prompts import PromptSet
from cavesson.models.policy import Policy, Scores
from cavesson.ops import kl
from cavesson.processes import Processes
from cavesson.rewards import Reward, score
from cavesson.rewards.cleaning import CleaningSettings, discard, is_discarded
from cavesson.sampling.sampler import Responses, Sampler
from cavesson.types import Batch, stacked

Rows = dict[str, list[Any]]


@dataclass(frozen=True)
class Collector:
    """Makes rollouts from prompts.

    `rows` holds the data with one value per response that are not tensors: texts, names and lists.
    """

    prompts: PromptSet
    sampler: Sampler
    rewards: tuple[Reward, ...]
    tokenizer: PreTrainedTokenizerBase
    cleaning: CleaningSettings = field(default_factory=CleaningSettings)

    def sample(
        self, indices: Sequence[int], step: int, rows: range, temperature: float | None = None
    ) -> tuple[Batch, Rows]:
        """Sample one response to each of the prompts with these indices.

        `rows` are their positions in the step's global batch. `temperature` overrides that of the sampler.
        """
        batch = self.prompts.batch(indices, int(self.tokenizer.pad_token_id))
        responses = self.sampler.sample(batch, step, rows, temperature)
        texts = [self.text(self.prompts.ids[i], ids) for i, ids in zip(indices, _unpadded(responses), strict=True)]
        batch = batch.with_columns(
            response_ids=responses.response_ids, mask=responses.mask, sampler_logprob=responses.sampler_logprob
        )
        known = {"ground_truth": [str(v) for v in self._columns(indices)["ground_truth"]]} if self._has_truth else {}
        return batch, known | {
            "group": list(indices),
            "sample": list(rows),
            "prompt": [self.prompts.texts[i] for i in indices],
            "prompt_ids": [list(self.prompts.ids[i]) for i in indices],
            "response": texts,
            "finish_reason": responses.finish_reasons,
        }

    def reward(self, rows: Rows, subtract_query: bool) -> Rows:
        """Add `reward`, `reward_parts`, `discarded` and, with `subtract_query`, `query_reward`."""
        columns = self._columns(rows["group"])
        scored = score(self.rewards, rows["prompt"], rows["response"], columns)
        total, discards = discard(self.cleaning, rows["response"], scored.total)
        named = scored.parts | discards
        parts = [dict(zip(named, values, strict=True)) for values in zip(*named.values(), strict=True)]
        rows = {**rows, "reward": total, "reward_parts": parts, "discarded": [is_discarded(part) for part in parts]}
        if subtract_query:
            empty = [""] * len(rows["prompt"])
            rows["query_reward"] = score(self.rewards, rows["prompt"], empty, columns).total
        return rows

    def text(self, prompt: Sequence[int], response: Sequence[int]) -> str:
        """Return the text of a response, decoded together with its prompt.

        If a response is decoded alone, some tokenizers remove its leading space.
        """
        before, whole = self._decode(prompt), self._decode([*prompt, *response])
        return whole[len(before) :] if whole.startswith(before) else self._decode(response)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    @property
    def _has_truth(self) -> bool:
        return "ground_truth" in self.prompts.columns

    def _columns(self, indices: Sequence[int]) -> Mapping[str, list[Any]]:
        return {name: [values[i] for i in indices] for name, values in self.prompts.columns.items()}


def score_rollouts(
    policy: Policy,
    batch: Batch,
    estimator: str | None,
    parts: Sequence[Tensor],
    processes: Processes,
    keep_graph: bool = False,
) -> tuple[Batch, Scores | None]:
    """Add the scores of policy, critic and reference to the rollouts.

    The columns are `logprob` and `entropy`; with a critic, `value`; with a reference, `ref_logprob`; and with a
    reference and an estimator, `kl_penalty`. Each is `[B, T]`.

    Args:
        policy: with its reference.
        batch: the rollouts of all processes.
        estimator: of the KL penalty, or None for no penalty.
        parts: the rows that this process scores, in micro-batches; all processes together score all rows.
        processes: the processes that score the rest.
        keep_graph: return the policy's scores of the first part with their graph, for a step that needs no other
            forward pass.

    Returns:
        The rollouts with the new columns, and the scores with their graph, or None without `keep_graph`.
    """
    scored, first = [], None
    for number, rows in enumerate(parts):
        micro = batch.take(rows).to(policy.device)
        keeps = keep_graph and number == 0
        with torch.set_grad_enabled(keeps):
            scores = policy(micro)
        first = scores if keeps else first
        columns = {name: column.cpu() for name, column in _score_columns(policy, micro, scores, estimator)}
        scored.append((rows, columns))
    whole: dict[str, Tensor] = {}
    for rows, columns in chain.from_iterable(processes.of_all(scored)):
        for name, column in columns.items():
            place = whole.setdefault(name, torch.zeros_like(batch["mask"]))
            place[rows, : column.shape[1]] = column
    return batch.with_columns(**whole), first


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


def joined(batches: Sequence[Batch], rows: Sequence[Rows]) -> tuple[Batch, Rows]:
    """Join several batches and their rows; every column is padded to its longest part."""
    if len(batches) == 1:
        return batches[0], rows[0]
    columns = {name: stacked([batch[name] for batch in batches], name) for name in batches[0].columns}
    return Batch(columns), {name: [value for part in rows for value in part[name]] for name in rows[0]}


def _unpadded(responses: Responses) -> list[list[int]]:
    lengths = responses.mask.sum(1).long().tolist()
    return [ids[:length] for ids, length in zip(responses.response_ids.tolist(), lengths, strict=True)]
