"""Sampling with a Hugging Face model: a key-value cache, and one draw per row and token."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cavesson.models.parts import causal
from cavesson.models.policy import Policy
from cavesson.models.sharding import gathered
from cavesson.randomness import Purpose, generator, token_uniforms
from cavesson.sampling.decoding import CacheKind, check_scoring, choose_cache, decode, full_passes, new_cache
from cavesson.sampling.distribution import draw, sampling_logprobs
from cavesson.sampling.room import check_room
from cavesson.sampling.settings import SamplingSettings
from cavesson.types import Batch


class StopTexts:
    """Finds stop texts in growing responses and determines at which token to cut.

    Args:
        tokenizer: decodes ids to text, from which special tokens are omitted.
        stop: the stop texts, which may be special tokens; if empty, no response is ever cut.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        special = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        # Special tokens are not part of the decoded text, so they are found by their ids.
        self.special = {special[text] for text in stop if text in special}
        self.stop = tuple(text for text in stop if text not in special)
        # A stop text of n bytes spans at most n tokens; a few more complete a character that is split between tokens.
        self._tail = max((len(text.encode()) for text in self.stop), default=0) + 4

    def cut(self, ids: Sequence[int]) -> int | None:
        """Return the number of tokens that lie entirely before the earliest stop text, or None if there is none.

        Call this after every new token: a stop text that does not reach into the most recent tokens is not found.
        """
        if ids and ids[-1] in self.special:
            return len(ids) - 1
        if not self.stop or self._find(ids[-self._tail :]) is None:
            return None
        start = self._find(ids)
        assert start is not None
        # Decoded prefixes only grow, so searching from the end finds the longest prefix that ends before the stop text.
        return next(n for n in range(len(ids), -1, -1) if len(self._decode(ids[:n])) <= start)

    def _find(self, ids: Sequence[int]) -> int | None:
        text = self._decode(ids)
        return min((at for at in (text.find(stop) for stop in self.stop) if at >= 0), default=None)

    def _decode(self, ids: Sequence[int]) -> str:
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


class Sampler:
    """Samples responses from a policy.

    Args:
        policy: the policy that samples, with its adapters active.
        tokenizer: its tokenizer.
        settings: how to sample.
        seed: determines every draw, together with step and row.
        is_scored: whether the policy also scores the sampled responses, in padded rows.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        settings: SamplingSettings,
        seed: int,
        is_scored: bool = False,
    ) -> None:
        self.policy = policy
        self.tokenizer = tokenizer
        self.settings = settings
        self.seed = seed
        self.is_scored = is_scored
        self.stop = StopTexts(tokenizer, settings.stop)
        self._cache: CacheKind = "static"
        self._rows = self._size = 0  # the largest sizes prepared for
        self.eos = torch.tensor(eos_token_ids(policy, tokenizer, settings), device=causal(policy.model).device)

    def prepare(self, rows: int, prompt: int) -> None:
        """Check that responses to prompts fit, and that they are sampled and scored correctly.

        Args:
            rows: number of responses.
            prompt: number of tokens of the longest prompt.

        Raises:
            UserError: they do not fit, or decoding or scoring disagrees with the model's full forward pass.
        """
        longest = self.settings.longest
        size = prompt + longest
        if rows > self._rows or size > self._size:
            check_room(self.policy.model, rows, min(rows, self.settings.batch_size or rows), prompt, longest)
        if size > self._size:
            self.policy.eval()
            expected = full_passes(self.policy.model, size)
            self._cache = choose_cache(self.policy.model, size, expected)
            if self.is_scored:
                check_scoring(self.policy, expected)
        self._rows, self._size = max(rows, self._rows), max(size, self._size)

    @torch.no_grad()
    def sample(self, prompts: Batch, step: int, rows: range, temperature: float | None = None) -> Responses:
        """Sample one response to each prompt.

        Args:
            prompts: columns `prompt_ids` and `prompt_mask`, `[B, S]`, padded on the left.
            step: the training step.
            rows: positions of these prompts in the step's global batch; the same row always gets the same draws.
            temperature: overrides the temperature of the settings.
        """
        self.prepare(len(rows), prompts["prompt_ids"].shape[1])
        self.policy.eval()
        settings = (
            self.settings if temperature is None else self.settings.model_copy(update={"temperature": temperature})
        )
        limits = self._limits(step, rows)
        uniforms = token_uniforms(self.seed, step, rows, int(limits.max()))
        size = self.settings.batch_size or len(rows)
        with gathered(self.policy):
            parts = [
                self._sample_part(prompts.take(part), limits[part.numpy()], uniforms[part.numpy()], settings)
                for part in torch.arange(len(rows)).split(size)
            ]
        return _joined(parts, int(self.tokenizer.pad_token_id))

    def _limits(self, step: int, rows: range) -> NDArray[np.int64]:
        if self.settings.random_length is None:
            return np.full(len(rows), self.settings.max_new_tokens)
        low, high = self.settings.random_length
        draws = (generator(self.seed, Purpose.LENGTHS, step, row) for row in rows)
        return np.array([int(numbers.integers(low, high, endpoint=True)) for numbers in draws])

    def _sample_part(
        self, prompts: Batch, limits: NDArray[np.int64], uniforms: NDArray[np.float64], settings: SamplingSettings
    ) -> Responses:
        growing = _Growing(len(prompts), limits, self.eos.tolist(), self.stop)
        logprobs: list[Tensor] = []
        numbers = torch.from_numpy(uniforms).to(self.eos.device)
        longest = int(limits.max())
        ids, mask = (prompts[name].to(self.eos.device) for name in ("prompt_ids", "prompt_mask"))
        model = self.policy.model
        decoder = decode(model, ids, mask, new_cache(model, self._cache, ids.shape[1] + longest))
        logits = next(decoder)
        for t in range(longest):
            banned = self.eos if t < settings.min_new_tokens else None
            if settings.temperature == 0:
                distribution = logits.log_softmax(-1)
                token = (logits if banned is None else logits.index_fill(1, banned, -torch.inf)).argmax(-1)
            else:
                distribution = sampling_logprobs(logits, settings, banned)
                token = draw(distribution, numbers[:, t])
            logprobs.append(distribution.gather(1, token[:, None]).squeeze(1))
            growing.append(token.tolist())
            if growing.all_done:
                break
            logits = decoder.send(token)
        return growing.responses(torch.stack(logprobs, dim=1), int(self.tokenizer.pad_token_id))


class _Growing:
    """Responses that are being sampled: their tokens so far, and the finish reasons of rows that have ended."""

    def __init__(self, size: int, limits: NDArray[np.int64], eos: Sequence[int], stop: StopTexts) -> None:
        self.ids: list[list[int]] = [[] for _ in range(size)]
        self.reasons = [""] * size
        self.limits, self.eos, self.stop = limits, set(eos), stop

    @property
    def all_done(self) -> bool:
        return all(self.reasons)

    def append(self, tokens: Sequence[int]) -> None:
        for row, token in enumerate(tokens):
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

    def responses(self, logprobs: Tensor, pad: int) -> Responses:
        width = max(1, max(map(len, self.ids)))
        padded = torch.tensor([ids + [pad] * (width - len(ids)) for ids in self.ids])
        lengths = torch.tensor([len(ids) for ids in self.ids])
        mask = (torch.arange(width) < lengths[:, None]).float()
        kept = logprobs[:, :width].float().cpu().masked_fill(mask == 0, 0.0)
        return Responses(padded, mask, kept, self.reasons)


def eos_token_ids(policy: Policy, tokenizer: PreTrainedTokenizerBase, settings: SamplingSettings) -> list[int]:
    """Return the end tokens: those of the settings if set, else those of the generation config and the tokenizer."""
    if settings.eos_token_ids:
        return list(settings.eos_token_ids)
    config = causal(policy.model).generation_config
    known = config.eos_token_id if config is not None else None
    ids = known if isinstance(known, list) else [known]
    return sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})


def _joined(parts: Sequence[Responses], pad: int) -> Responses:
    width = max(part.mask.shape[1] for part in parts)

    def stack(name: str, value: int = 0) -> Tensor:
        columns = [getattr(part, name) for part in parts]
        return torch.cat([torch.nn.functional.pad(c, (0, width - c.shape[1]), value=value) for c in columns])

    reasons = [reason for part in parts for reason in part.finish_reasons]
    return Responses(stack("response_ids", pad), stack("mask"), stack("sampler_logprob"), reasons)
