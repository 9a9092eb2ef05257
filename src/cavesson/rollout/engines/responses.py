"""What every engine samples: responses, and the tokens, texts and limits at which they end."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from cavesson.errors import UserError
from cavesson.models.parts import causal
from cavesson.models.policy import Policy
from cavesson.randomness import Purpose, generator
from cavesson.rollout.engines.settings import DecodingSettings
from cavesson.types import Batch

_BROKEN = "\ufffd"
"""What bytes that are not a character are decoded to."""


class StopTexts:
    """Finds stop texts in growing responses and determines at which token to cut.

    Stop texts may be special tokens, which are otherwise omitted from the text; without any, no response is ever cut.

    Raises:
        UserError: a stop text contains a special token, and is not one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        special = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        for text in stop:
            if text not in special and any(name in text for name in special if name):
                raise UserError(
                    f"the stop text {text!r} has a special token beside other text, and is never found, because "
                    "the text of a response has no special tokens; stop at the token, or at the text without it"
                )
        # Special tokens are not part of the decoded text, so they are found by their ids.
        self.special = {special[text] for text in stop if text in special}
        self._silent = set(special.values())
        self._spaces: dict[int, str] = {}
        self.stop = tuple(text for text in stop if text not in special)
        # A stop text of n bytes spans at most n tokens; a few more complete a character that is split between tokens.
        self._tail = max((len(text.encode()) for text in self.stop), default=0) + 4

    def cut(self, ids: Sequence[int]) -> int | None:
        """Return the number of tokens that lie entirely before the earliest stop text, or None if there is none.

        A stop text counts if the response, as it continues the prompt, contains it. Call this after every new token: a
        stop text that does not reach into the most recent tokens is not found.
        """
        if ids and ids[-1] in self.special:
            return len(ids) - 1
        if not self.stop or not self._may_end(ids):
            return None
        text = self._decode(ids)
        start = self._find(text)
        if start is None:
            return None
        # Not by lengths: where several tokens are the bytes of a character, an incomplete one can be longer text.
        return next(n for n in range(len(ids), -1, -1) if text[:start].startswith(self._decode(ids[:n])))

    def _may_end(self, ids: Sequence[int]) -> bool:
        """Return whether a stop text may reach into the most recent tokens, without decoding much more than these."""
        start, left = len(ids), self._tail
        while start and left:
            start -= 1
            left -= ids[start] not in self._silent
        text = self._decode(ids[start:])
        # One byte too many or too few at the beginning can break all characters that consist of byte tokens.
        while start and _BROKEN in text:
            start = max(0, 2 * start - len(ids))
            text = self._decode(ids[start:])
        return self._find(text) is not None

    def _find(self, text: str) -> int | None:
        return min((at for at in (text.find(stop) for stop in self.stop) if at >= 0), default=None)

    def _decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids that continue others, with the first space, which some tokenizers remove."""
        first = next((token for token in ids if token not in self._silent), None)
        if first is not None and first not in self._spaces:
            once, twice = self._decoded([first]), self._decoded([first, first])
            self._spaces[first] = " " if twice == f"{once} {once}" else ""
        return (self._spaces[first] if first is not None else "") + self._decoded(ids)

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


class Responses(NamedTuple):
    """Sampled responses, padded on the right."""

    response_ids: Tensor
    """`[B, T]`"""
    mask: Tensor
    """`[B, T]` float32, 1 on the tokens of the response, its end token included"""
    sampler_logprob: Tensor
    """`[B, T]` log-probability under the distribution that was sampled from, filters included"""
    finish_reasons: list[str]
    """eos, stop or length for each response"""
    versions: Tensor
    """`[B, T]` int64, number of training steps of the weights that sampled each token"""


class Turns(NamedTuple):
    """Where responses stand in their episodes, which have tokens before them already."""

    starts: Sequence[int]
    """`[B]` tokens between the first prompt of the episode and this response; with step and row they determine the
    draws"""
    room: Sequence[int]
    """`[B]` most tokens that the response may have, if it is less than the limit of the settings"""


class Engine(Protocol):
    """Samples responses from a policy."""

    eos: Tensor
    """the tokens that end a response"""

    def update_weights(self, step: int) -> None:
        """Sample from the policy's weights after `step` steps from here on; all processes must call this together."""

    def sample(
        self,
        prompts: Batch,
        step: int,
        rows: Sequence[int],
        temperature: float | None = None,
        turns: Turns | None = None,
    ) -> Responses:
        """Sample one response to each of the prompts, `[B, S]` in `prompt_ids` and `prompt_mask`, padded on the left.

        A step and a row, which is the position of a prompt in the step's global batch, determine the draws.
        `temperature` overrides that of the settings. `turns` say where the responses stand in their episodes; by
        default they are the first turns.
        """

    def sampling(self) -> AbstractContextManager[None]:
        """Hold what calls of `sample` need; all processes must enter it together, and may then sample on their own."""

    def remarks(self) -> list[str]:
        """Return notes for the user, such as on what makes sampling slower than it could be."""

    def auto_values(self) -> dict[str, Any]:
        """Return what it has chosen for settings that are "auto", by their dotted names; the run keeps these values."""

    def sleep(self) -> None:
        """Leave memory to others until `update_weights` is called again; all processes must call this together."""

    def close(self) -> None:
        """Release what the engine holds besides memory."""


class Growing:
    """Responses that are being sampled: their tokens so far, and the finish reasons of rows that have ended."""

    def __init__(self, size: int, limits: NDArray[np.int64], eos: Sequence[int], stop: StopTexts) -> None:
        self.ids: list[list[int]] = [[] for _ in range(size)]
        self.reasons = [""] * size
        self.limits, self.eos, self.stop = limits, set(eos), stop

    @property
    def all_done(self) -> bool:
        return all(self.reasons)

    def longest_left(self, rows: Iterable[int]) -> int:
        """Return how many tokens those of some rows that have not ended still get, at most."""
        return max(int(self.limits[row]) - len(self.ids[row]) for row in rows if not self.reasons[row])

    def append(self, rows: Iterable[int], tokens: Iterable[int]) -> None:
        """Append a token to each of some rows; rows that have ended stay as they are."""
        for row, token in zip(rows, tokens, strict=True):
            if self.reasons[row]:
                continue
            ids = self.ids[row]
            ids.append(token)
            cut = self.stop.cut(ids)
            if token in self.eos:
                self.reasons[row] = "eos"
            elif cut is not None:
                self.reasons[row] = "stop"
                del ids[cut:]
            elif len(ids) == self.limits[row]:
                self.reasons[row] = "length"

    def responses(self, logprobs: Tensor, versions: Tensor) -> Responses:
        """Return the responses; of the other columns, which have all tokens, only what belongs to these is kept."""
        width = max(2, max(map(len, self.ids)))  # the least that a batch keeps (`Batch._cut`)
        padded = torch.tensor([ids + [0] * (width - len(ids)) for ids in self.ids])
        lengths = torch.tensor([len(ids) for ids in self.ids])
        mask = (torch.arange(width) < lengths[:, None]).float()
        logprobs, versions = (pad_to(column, width) for column in (logprobs, versions))
        kept = logprobs.float().cpu().masked_fill(mask == 0, 0.0)
        return Responses(padded, mask, kept, self.reasons, versions)


def pad_to(column: Tensor, width: int) -> Tensor:
    """Return `[B, width]`: the first columns of `[B, T]`, or all of them and zeros."""
    return functional.pad(column[:, :width], (0, max(0, width - column.shape[1])))


def length_limits(
    settings: DecodingSettings, seed: int, step: int, rows: Sequence[int], turns: Turns | None = None
) -> NDArray[np.int64]:
    """Return the longest response allowed in each of these rows of a step, in tokens."""
    if settings.random_length is None:
        limits = np.full(len(rows), settings.max_new_tokens)
    else:
        low, high = settings.random_length
        draws = (generator(seed, Purpose.LENGTHS, step, row) for row in rows)
        limits = np.array([int(numbers.integers(low, high, endpoint=True)) for numbers in draws])
    return limits if turns is None else np.minimum(limits, turns.room)


def eos_token_ids(policy: Policy, tokenizer: PreTrainedTokenizerBase, settings: DecodingSettings) -> list[int]:
    """Return the end tokens: those of the settings if set, else those of the generation config and the tokenizer."""
    if settings.eos_token_ids:
        return list(settings.eos_token_ids)
    config = causal(policy.model).generation_config
    end_ids = config.eos_token_id if config is not None else None
    ids = end_ids if isinstance(end_ids, list) else [end_ids]
    return sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})


def joined(parts: Sequence[Responses]) -> Responses:
    """Join parts of a batch, padded to the longest response."""
    width = max(part.mask.shape[1] for part in parts)

    def stack(name: str) -> Tensor:
        return torch.cat([pad_to(getattr(part, name), width) for part in parts])

    reasons = [reason for part in parts for reason in part.finish_reasons]
    columns = stack("response_ids"), stack("mask"), stack("sampler_logprob")
    return Responses(*columns, reasons, stack("versions"))
