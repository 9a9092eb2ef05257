"""Pairs of responses as reward models learn from them: as text, the way rewards read responses."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from cavesson.data.examples import Examples, PairTokens, Tokens, collate_pairs, load_pairs
from cavesson.data.order import InMemory, Mixed
from cavesson.data.settings import PairSettings
from cavesson.data.special_tokens import Around
from cavesson.models.classifier import ADDS_START
from cavesson.models.parts import causal
from cavesson.types import Batch

_LOOKED_AT = 64
"""Pairs of a stream that are looked at to see how texts begin."""


def load_pair_texts(settings: PairSettings, tokenizer: PreTrainedTokenizerBase, seed: int) -> Examples[PairTokens]:
    """Read pairs as `load_pairs`; every response is followed by the tokenizer's end tokens, and by nothing else."""
    read = partial(_as_text, special=set(tokenizer.all_special_ids), tail=Around.of(tokenizer).end)

    def as_texts(pairs: Sequence[PairTokens]) -> Batch:
        return collate_pairs([replace(p, chosen=read(p.chosen), rejected=read(p.rejected)) for p in pairs])

    return replace(load_pairs(settings, tokenizer, seed), collate=as_texts)


def record_start(model: Any, tokenizer: PreTrainedTokenizerBase, examples: Examples[PairTokens]) -> None:
    """Record in the config of a model whether the texts that it has learned from begin with start tokens."""
    setattr(causal(model).config, ADDS_START, _begins(tokenizer, examples))


def _begins(tokenizer: PreTrainedTokenizerBase, examples: Examples[PairTokens]) -> bool | None:
    """Return whether texts begin with the tokenizer's start tokens, or None if only some of them do.

    Rewards must read texts in the same way. Plain texts begin with start tokens; conversations do if the chat template
    writes them.
    """
    around, train = Around.of(tokenizer), examples.train
    items = train.items if isinstance(train, InMemory | Mixed) else train.take(0, _LOOKED_AT)
    seen = {around.begins(tokens.ids) for pair in items for tokens in (pair.chosen, pair.rejected)}
    return seen.pop() if len(seen) == 1 else None


def _as_text(tokens: Tokens, special: set[int], tail: tuple[int, ...]) -> Tokens:
    """Replace the end token, and everything that a chat template writes after it, by `tail`."""
    size = len(tokens.ids)
    while any(tokens.learn[:size]) and (not tokens.learn[size - 1] or tokens.ids[size - 1] in special):
        size -= 1
    return Tokens(tokens.ids[:size] + tail, tokens.learn[:size] + (False,) * len(tail))
