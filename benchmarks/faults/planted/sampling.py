"""Faults of sampling: responses are not drawn from the distribution that is scored."""

from typing import Any

import torch

from benchmarks.faults.fault import fault
from benchmarks.faults.setup import Setup
from cavesson.algorithms.runs import RolloutRun
from cavesson.rollout.engines import sampler as sampler_module
from cavesson.rollout.engines.responses import Responses


@fault(causes=["filtered-sampling"], levels=(20, 8, 3))
def top_k(setup: Setup, level: int) -> None:
    setup.set("sampling.top_k", level)


@fault(causes=["filtered-sampling"], levels=(0.95, 0.85, 0.6))
def top_p(setup: Setup, level: float) -> None:
    setup.set("sampling.top_p", level)


def _score_at_one(setup: Setup, temperature: float) -> None:
    from unittest.mock import patch

    setup.set("sampling.temperature", temperature)
    setup.patches.append(patch.object(RolloutRun, "scoring_temperature", property(lambda self: 1.0)))
    setup.built.append(lambda training: setattr(training.trainer.policy, "temperature", 1.0))


@fault(causes=["temperature-missing"], levels=(0.9, 0.75, 0.5))
def temperature_low(setup: Setup, level: float) -> None:
    _score_at_one(setup, level)


@fault(causes=["temperature-missing"], levels=(1.1, 1.25, 1.5))
def temperature_high(setup: Setup, level: float) -> None:
    _score_at_one(setup, level)


@fault(causes=["end-forbidden"], levels=(8, 12, 16))
def min_length(setup: Setup, level: int) -> None:
    setup.set("sampling.min_new_tokens", level)


@fault(causes=["same-seed"], levels=(2, 3, 4), algorithms=["grpo", "rloo"])
def same_seed(setup: Setup, level: int) -> None:
    """So many of four siblings draw the same random numbers."""

    def uniforms(original: Any, seed: int, step: int, rows: range, length: int, *more: Any) -> Any:
        found = original(seed, step, rows, length, *more)
        for place, row in enumerate(rows):
            if row % 4 < level:
                found[place] = found[place - row % 4]
        return found

    setup.wrap(sampler_module, "token_uniforms", uniforms)


@fault(causes=["rollouts-fail"], levels=(0.1, 0.25, 0.5))
def empty_responses(setup: Setup, level: float) -> None:
    """The engine times out on a share of the requests, which come back empty."""
    generator = torch.Generator().manual_seed(setup.seed)

    def sample(original: Any, self: Any, prompts: Any, step: int, rows: Any, *more: Any) -> Responses:
        found = original(self, prompts, step, rows, *more)
        lost = torch.rand(len(rows), generator=generator) < level
        mask = found.mask.clone()
        mask[lost] = 0
        reasons = [
            "abort" if gone else reason for gone, reason in zip(lost.tolist(), found.finish_reasons, strict=True)
        ]
        return found._replace(mask=mask, finish_reasons=reasons)

    setup.wrap(sampler_module.Sampler, "sample", sample)


@fault(causes=["false-truncation"], levels=(0.4, 0.7, 1.0))
def wrong_end_set(setup: Setup, level: float) -> None:
    """The model has two end tokens and the trainer knows one: a share of the ends counts as cut."""

    def joined(original: Any, parts: Any) -> Responses:
        found = original(parts)
        reasons = [
            "length" if reason == "eos" and (7 * row) % 10 < 10 * level else reason
            for row, reason in enumerate(found.finish_reasons)
        ]
        return found._replace(finish_reasons=reasons)

    setup.wrap(sampler_module, "joined", joined)


@fault(causes=["trained-behind-end"], levels=(1, 3, 8))
def padding_trained(setup: Setup, level: int) -> None:
    """The padding token is the end token, and the mask keeps so many of them."""

    def joined(original: Any, parts: Any) -> Responses:
        found = original(parts)
        width = found.mask.shape[1]
        length = found.mask.sum(1, keepdim=True)
        mask = (torch.arange(width) < length + level).float()
        ids = torch.where(found.mask == 0, 0, found.response_ids)
        return found._replace(mask=mask, response_ids=ids)

    setup.wrap(sampler_module, "joined", joined)


@fault(causes=["end-not-trained"], levels=(0.3, 0.6, 1.0))
def end_masked(setup: Setup, level: float) -> None:
    """The mask drops the end token of a share of the responses, as where it equals the padding token."""

    def joined(original: Any, parts: Any) -> Responses:
        found = original(parts)
        mask = found.mask.clone()
        for row, reason in enumerate(found.finish_reasons):
            if reason == "eos" and (7 * row) % 10 < 10 * level:
                mask[row, int(found.mask[row].sum()) - 1] = 0
        return found._replace(mask=mask)

    setup.wrap(sampler_module, "joined", joined)
