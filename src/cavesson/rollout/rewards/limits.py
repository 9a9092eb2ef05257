"""How much of a text a classifier reads."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cavesson.models.parts import position_limit

T = TypeVar("T")
_LOGGER = logging.getLogger(__name__)
_NO_LIMIT = 10**9
"""What transformers gives for a tokenizer without a longest text is longer than this."""


def longest_text(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the most tokens, special ones included, that a classifier reads of a text, or None if nothing limits them.

    A tokenizer need not say how many positions its model has. Those of the RoBERTa family begin after that of padding.
    """
    limits = [tokenizer.model_max_length] if tokenizer.model_max_length < _NO_LIMIT else []
    positions = position_limit(model.config)
    if positions is not None:
        tables = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
        padding = (table.padding_idx for table in tables if isinstance(table, nn.Embedding))
        limits.append(positions - next((index + 1 for index in padding if index is not None), 0))
    return min(limits, default=None)


class CutNotice:
    """Says once that a reward model does not read texts to their end."""

    def __init__(self, path: str) -> None:
        self.path, self.is_given = path, False

    def __call__(self, longest: int | None, texts: Sequence[T], sizes: Callable[[Sequence[T]], Iterable[int]]) -> None:
        """Say it if one of these texts, which may be too long, has more than `longest` tokens."""
        if longest is None or self.is_given or not texts:
            return
        self.is_given = any(size > longest for size in sizes(texts))
        if self.is_given:
            _LOGGER.warning(
                "the reward model %s reads at most %d tokens of a prompt with its response; the rest has no effect",
                self.path,
                longest,
            )
