"""Prompt sharing: a prompt with several rollouts is read once, and its keys and values are used for all of them."""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import Cache, PretrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer


class Distinct(NamedTuple):
    """The P distinct prompts of B rollouts."""

    first: Tensor
    """`[P]`: the first rollout that answers each of them"""
    prompt: Tensor
    """`[B]`: which of them a rollout answers"""

    @property
    def shared(self) -> bool:
        """Whether any two rollouts have the same prompt."""
        return len(self.first) < len(self.prompt)

    def spread(self, cache: Cache) -> None:
        """Expand the cache of the P prompts to the B rollouts."""
        cache.reorder_cache(self.prompt)  # type: ignore[arg-type]


def distinct(ids: Tensor, mask: Tensor) -> Distinct:
    """Find equal rows among prompts `ids` and `mask`, both `[B, S]`."""
    _, prompt = torch.unique(torch.cat([ids, mask.to(ids.dtype)], dim=1), dim=0, return_inverse=True)
    rows = torch.arange(len(ids), device=ids.device)
    count = int(prompt.max()) + 1
    first = rows.new_zeros(count).scatter_reduce(0, prompt, rows, "amin", include_self=False)
    return Distinct(first, prompt)


def growing_cache(config: PretrainedConfig) -> DynamicCache | None:
    """Return a cache that supports gradients, or None if a layer stores anything but keys and values."""
    cache = DynamicCache(config=config)
    plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
    return cache if plain else None
