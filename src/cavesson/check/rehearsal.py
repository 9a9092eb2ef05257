"""A training step on fake tensors, with the run's own functions and its largest batch.

What a run would find out from values, such as which prompts are the same, the rehearsal takes from `largest`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, StaticCache

from cavesson.algorithms.runs import RolloutRun
from cavesson.check.largest import LargestRollouts, LargestSequences
from cavesson.models.parts import UNSUPPORTED, causal, output_head
from cavesson.models.policy import last_states
from cavesson.models.sequences import Layout, hidden_states
from cavesson.models.shared_prompts import growing_cache
from cavesson.ops.head import Head, head_logits
from cavesson.ops.logprobs import token_logprobs
from cavesson.sampling.distribution import draw, sampling_logprobs
from cavesson.sampling.settings import SamplingSettings


@torch.no_grad()
def sample(model: nn.Module, settings: SamplingSettings, largest: LargestRollouts) -> None:
    """Process the prompts and the last token as `Sampler` does, with the cache that it falls back to if one fails."""
    model.eval()
    longest, config = largest.prompt + largest.response, causal(model).config
    try:
        _decode(model, settings, largest, largest.prompt, StaticCache(config=config, max_cache_len=longest))
    except UNSUPPORTED:
        # A growing cache is as long as the tokens read, so a prompt of all tokens but the last stands in for responses.
        _decode(model, settings, largest, longest - 1, DynamicCache(config=config))


def _decode(model: nn.Module, settings: SamplingSettings, largest: LargestRollouts, prompt: int, cache: Cache) -> None:
    rows, longest = largest.sampled, largest.prompt + largest.response
    head = output_head(model).float()
    first = _ones(model, largest.sampled_prompts, prompt)
    spread = torch.zeros(rows, dtype=torch.long, device=first.device)
    last = last_states(model, first, first, cache)[:, -1].float()[spread]
    cache.reorder_cache(spread)  # type: ignore[arg-type]
    draw(sampling_logprobs(head_logits(last, head, 1.0), settings, None), torch.zeros(rows, device=last.device))
    last_states(model, _ones(model, rows, 1), _ones(model, rows, longest), cache)


@torch.no_grad()
def score(models: Sequence[nn.Module], critic: nn.Module | None, largest: LargestRollouts) -> None:
    """Compute log-probabilities of policy and reference, and values, as `score_rollouts` does."""
    policy, *others = models
    _scores(policy, critic, largest)
    for other in others:
        _scores(other, None, largest)


def learn(
    model: nn.Module,
    critic: nn.Module | None,
    reference: nn.Module | None,
    settings: RolloutRun,
    largest: LargestRollouts,
) -> None:
    """Run forward and backward passes of up to two micro-batches, so that the second adds to existing gradients.

    If scoring keeps its graph for the only update, the reference scores while that graph is in memory.
    """
    for _ in range(min(2, largest.passes)):
        total = _scores(model, critic, largest)
        if largest.single_pass and settings.reference.kind != "none":
            score([reference if reference is not None else model], None, largest)
        total.backward()


def learn_sequences(model: nn.Module, largest: LargestSequences, classifier: bool) -> None:
    """Run forward and backward passes of up to two micro-batches of rows, so that the second adds to gradients."""
    for _ in range(min(2, largest.passes)):
        ids = _ones(model, largest.rows, largest.width)
        layout: Any = Layout(ids, ids if largest.packed else None, ids)
        states = hidden_states(model, layout).flatten(0, 1)
        learned = torch.zeros(largest.learned, dtype=torch.long, device=ids.device)
        total = states[:2].float().sum() if classifier else _logprobs(states[learned], output_head(model))
        total.backward()


def _ones(model: nn.Module, rows: int, width: int) -> Tensor:
    return torch.ones(rows, width, dtype=torch.long, device=causal(model).device)


def _scores(model: nn.Module, critic: nn.Module | None, largest: LargestRollouts) -> Tensor:
    """Compute a scalar that depends on every log-probability, entropy and value, as `Policy` computes them."""
    hidden = _hidden(model, largest)
    seen = hidden if critic is None else _hidden(critic, largest)
    tokens = torch.zeros(largest.rows * largest.response, dtype=torch.long, device=hidden.device)
    return _logprobs(hidden.flatten(0, 1)[tokens], output_head(model)) + seen.float().sum()


def _logprobs(hidden: Tensor, head: Head) -> Tensor:
    targets = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
    logprob, entropy = token_logprobs(hidden, head, targets, 1.0)
    return (logprob + entropy).sum()


def _hidden(model: nn.Module, largest: LargestRollouts) -> Tensor:
    """Compute the states before every response token, `[B, T, H]`; a shared prompt is read once."""
    rows, prompt, response = largest.rows, largest.prompt, largest.response
    cache = growing_cache(causal(model).config) if largest.shared else None
    mask = _ones(model, rows, prompt + response - 1)
    if cache is None:
        return last_states(model, mask, mask)[:, prompt - 1 :]
    first = mask[: largest.prompts, :prompt]
    spread = torch.zeros(rows, dtype=torch.long, device=mask.device)
    before = last_states(model, first, first, cache)[spread, -1:]
    if response == 1:
        return before
    cache.reorder_cache(spread)  # type: ignore[arg-type]
    return torch.cat([before, last_states(model, mask[:, prompt:], mask, cache)], dim=1)
