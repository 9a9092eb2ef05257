"""Sampling with a Hugging Face model: a key-value cache, and one draw per row and token."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cavesson.models.policy import Policy
from cavesson.models.sharding import gathered
from cavesson.randomness import token_uniforms
from cavesson.sampling.decoding import (
    CacheKind,
    Decoder,
    Decoding,
    check_scoring,
    choose_decoding,
    full_passes,
    new_cache,
)
from cavesson.sampling.distribution import draw, sampling_logprobs
from cavesson.sampling.responses import Growing, Responses, StopTexts, eos_token_ids, joined, length_limits
from cavesson.sampling.room import check_room
from cavesson.sampling.settings import DecodingSettings
from cavesson.types import Batch

KEPT: dict[CacheKind, float] = {"recorded": 0.5, "static": 0.75, "growing": 0.75}
"""Share of running rows at which those that have ended leave the batch; not at each end, as the cache is copied, and a
CUDA graph is recorded again."""


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
        settings: DecodingSettings,
        seed: int,
        is_scored: bool = False,
    ) -> None:
        self.policy = policy
        self.settings = settings
        self.seed = seed
        self.is_scored = is_scored
        self.stop = StopTexts(tokenizer, settings.stop)
        self.decoding = Decoding("static")
        self._rows = self._size = 0  # the largest sizes prepared for
        self._version = 0
        self.eos = torch.tensor(eos_token_ids(policy, tokenizer, settings), device=policy.device)

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
            at_once = min(rows, self.settings.batch_size or rows)
            self.policy.during(lambda: check_room(self.policy.model, rows, at_once, prompt, longest))
        if size > self._size:
            self.policy.eval()
            expected = self.policy.during(lambda: full_passes(self.policy.model, size))
            self.decoding = self.policy.during(lambda: choose_decoding(self.policy.model, size, expected))
            if self.is_scored:
                check_scoring(self.policy, expected)
        self._rows, self._size = max(rows, self._rows), max(size, self._size)

    def synchronise(self, step: int) -> None:
        """Note the number of training steps of the weights, which engine and trainer share."""
        self._version = step

    @torch.no_grad()
    def sample(self, prompts: Batch, step: int, rows: range, temperature: float | None = None) -> Responses:
        """Sample one response to each prompt, as `Engine` says."""
        self.prepare(len(rows), prompts["prompt_ids"].shape[1])
        self.policy.eval()
        settings = (
            self.settings if temperature is None else self.settings.model_copy(update={"temperature": temperature})
        )
        limits = length_limits(self.settings, self.seed, step, rows)
        uniforms = token_uniforms(self.seed, step, rows, int(limits.max()))
        size = self.settings.batch_size or len(rows)
        with gathered(self.policy):
            parts = [
                self._sample_part(prompts.take(part), limits[part.numpy()], uniforms[part.numpy()], settings)
                for part in torch.arange(len(rows)).split(size)
            ]
        return joined(parts)

    def rest(self) -> None:
        """Do nothing, as the engine holds no memory between calls."""

    def close(self) -> None:
        """Do nothing, as the engine holds only memory."""

    def _sample_part(
        self, prompts: Batch, limits: NDArray[np.int64], uniforms: NDArray[np.float64], settings: DecodingSettings
    ) -> Responses:
        growing = Growing(len(prompts), limits, self.eos.tolist(), self.stop)
        device, model = self.eos.device, self.policy.model
        numbers, rows = torch.from_numpy(uniforms).to(device), torch.arange(len(prompts), device=device)
        logprobs = torch.zeros(len(prompts), longest := int(limits.max()), device=device)
        ids, mask = (prompts[name].to(device) for name in ("prompt_ids", "prompt_mask"))
        kind = self.decoding.cache
        decoder = Decoder(model, ids, mask, new_cache(model, kind, ids.shape[1] + longest), kind == "recorded")
        logits = decoder.read()
        for t in range(longest):
            token, logprobs[rows, t] = self._next(logits, settings, t, numbers[rows, t])
            growing.append(numbered := rows.tolist(), token.tolist())
            if growing.all_done:
                break
            if len(left := growing.left(numbered)) <= KEPT[kind] * len(rows):
                kept = torch.tensor(left, device=device)
                rows, token = rows[kept], token[kept]
                decoder.keep(kept)
            logits = decoder.append(token)
        versions = torch.full(logprobs.shape, self._version)
        return growing.responses(logprobs, versions)

    def _next(self, logits: Tensor, settings: DecodingSettings, t: int, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens `[B]` at position t, and their log-probabilities under the distribution sampled from."""
        banned = self.eos if t < settings.min_new_tokens else None
        if settings.temperature == 0:
            distribution = logits.log_softmax(-1)
            token = (logits if banned is None else logits.index_fill(1, banned, -torch.inf)).argmax(-1)
        else:
            distribution = sampling_logprobs(logits, settings, banned)
            token = draw(distribution, numbers)
        return token, distribution.gather(1, token[:, None]).squeeze(1)
