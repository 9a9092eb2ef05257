"""Sampling with a Hugging Face model: a key-value cache, and one draw per row and token."""

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from cavesson.models.policy import Policy
from cavesson.models.sharding import gathered
from cavesson.randomness import token_uniforms
from cavesson.sampling.decoder import CacheKind, Decoder, new_cache
from cavesson.sampling.decoding import Decoding, check_scoring, choose_decoding, full_passes
from cavesson.sampling.distribution import draw, sampling_logprobs, without
from cavesson.sampling.responses import Growing, Responses, StopTexts, eos_token_ids, joined, length_limits
from cavesson.sampling.room import check_room, replaced_together, spare_columns
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
        at_once, is_more = min(rows, self.settings.batch_size or rows), rows > self._rows or size > self._size
        room = partial(check_room, self.policy.model, rows, at_once, prompt, longest)
        if is_more:
            self.policy.during(room)
        if size > self._size:
            self.policy.eval()
            expected = self.policy.during(lambda: full_passes(self.policy.model, size))
            self.decoding = self.policy.during(lambda: choose_decoding(self.policy.model, size, expected))
            if self.is_scored:
                check_scoring(self.policy, expected)
        if is_more and self.decoding.replaces:
            self.policy.during(partial(room, replaces=True))
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
        at_once = self.settings.batch_size or len(rows)
        with gathered(self.policy):
            parts = [
                self._sample_part(prompts.take(part), limits[part.numpy()], uniforms[part.numpy()], settings, at_once)
                for part in torch.arange(len(rows)).split(len(rows) if self.decoding.replaces else at_once)
            ]
        return joined(parts)

    def rest(self) -> None:
        """Do nothing, as the engine holds no memory between calls."""

    def close(self) -> None:
        """Do nothing, as the engine holds only memory."""

    def _sample_part(
        self,
        prompts: Batch,
        limits: NDArray[np.int64],
        uniforms: NDArray[np.float64],
        settings: DecodingSettings,
        at_once: int,
    ) -> Responses:
        """Sample responses to some prompts, the first ones at once; the others wait for their places."""
        kind, model, longest = self.decoding.cache, self.policy.model, int(limits.max())
        ids, mask = (prompts[name].to(self.eos.device) for name in ("prompt_ids", "prompt_mask"))
        size = ids.shape[1] + longest
        spare = spare_columns(size) if at_once < len(ids) else 0
        cache = new_cache(model, kind, size + spare)
        decoder = Decoder(model, ids[:at_once], mask[:at_once], cache, kind == "recorded", spare)
        draws = _Draws(Growing(len(ids), limits, self.eos.tolist(), self.stop), torch.from_numpy(uniforms), self.eos)
        everyone = torch.arange(len(ids), device=ids.device)
        rows, waiting, count = everyone[:at_once], everyone[at_once:], torch.zeros_like(everyone[:at_once])
        token = draws(rows, count, decoder.read(), settings)
        while len(left := draws.growing.left(rows.tolist())) or len(waiting):
            if len(waiting) and len(rows) - len(left) >= replaced_together(at_once):
                ended = sorted({*range(len(rows))} - {*left})[: min(replaced_together(at_once), len(waiting))]
                places, new, waiting = ids.new_tensor(ended), waiting[: len(ended)], waiting[len(ended) :]
                rows[places], count[places] = new, 0
                token[places] = draws(new, count[places], decoder.replace(places, ids[new], mask[new]), settings)
                continue
            if len(left) <= KEPT[kind] * len(rows):
                kept = ids.new_tensor(left)
                rows, count, token = rows[kept], count[kept], token[kept]
                decoder.keep(kept)
            count += 1
            token = draws(rows, count, decoder.append(token), settings)
        return draws.growing.responses(draws.logprobs, torch.full(draws.logprobs.shape, self._version))


class _Draws:
    """Draws tokens, each with the random number of its row and place, and keeps them and their log-probabilities.

    Args:
        growing: the responses to append to.
        uniforms: random numbers `[N, T]`.
        eos: the end tokens.
    """

    def __init__(self, growing: Growing, uniforms: Tensor, eos: Tensor) -> None:
        self.growing = growing
        # One more column than a response has tokens, for what is drawn in rows that have ended and are still there.
        self._uniforms, self._eos = pad(uniforms, (0, 1)).to(eos.device), eos
        self.logprobs = torch.zeros(self._uniforms.shape, device=eos.device)

    def __call__(self, rows: Tensor, count: Tensor, logits: Tensor, settings: DecodingSettings) -> Tensor:
        """Draw the next token `[B]` of rows that have `count` tokens, and append it to their responses.

        Args:
            rows: `[B]`
            count: `[B]`
            logits: `[B, V]`
            settings: how to sample.
        """
        at = count.clamp_max(self._uniforms.shape[1] - 1)
        allowed = without(logits, self._eos, at < settings.min_new_tokens) if settings.min_new_tokens else logits
        if settings.temperature == 0:
            distribution, token = logits.log_softmax(-1), allowed.argmax(-1)
        else:
            distribution = sampling_logprobs(allowed, settings)
            token = draw(distribution, self._uniforms[rows, at])
        self.logprobs[rows, at] = distribution.gather(1, token[:, None]).squeeze(1)
        self.growing.append(rows.tolist(), token.tolist())
        return token
