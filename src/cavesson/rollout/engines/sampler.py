"""Sampling with a Hugging Face model: a key-value cache, and one draw per row and token."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from cavesson.models.compiled import Compile
from cavesson.models.policy import Policy
from cavesson.models.sharding import gathered
from cavesson.randomness import token_uniforms
from cavesson.rollout.engines.decoder import CacheKind, Decoder, new_cache
from cavesson.rollout.engines.decoding import Decoding, check_scoring, choose_decoding, full_passes
from cavesson.rollout.engines.kept import ReadRow, unpadded
from cavesson.rollout.engines.memory_check import check_room, kept_bytes, replaced_together, spare_columns
from cavesson.rollout.engines.merged import Merging
from cavesson.rollout.engines.responses import (
    Growing,
    Responses,
    StopTexts,
    Turns,
    eos_token_ids,
    joined,
    length_limits,
)
from cavesson.rollout.engines.running import Running
from cavesson.rollout.engines.settings import DecodingSettings, MergesAdapters
from cavesson.types import Batch

DROP_AT: dict[CacheKind, float] = {"recorded": 0.25, "static": 0.75, "growing": 0.75}
"""Rows that have ended leave the batch when at most this share of the rows still runs. Dropping each at once would cost
more: the cache is copied, and a CUDA graph is recorded again."""
SMALLEST: dict[CacheKind, float] = {"recorded": 0.25, "static": 0.0, "growing": 0.0}
"""The share of the rows from which on none leave: a step of so few takes hardly longer than one of fewer."""
STEPS: dict[CacheKind, int] = {"recorded": 8, "static": 1, "growing": 1}
"""Tokens that are drawn for each row before the host looks at them, so that a GPU need not wait for it after each."""


class Sampler:
    """Samples responses from a policy.

    Args:
        policy: the policy that samples, with its adapters active.
        tokenizer: its tokenizer.
        settings: how to sample.
        seed: determines every draw, together with step and row.
        is_scored: whether the policy also scores the sampled responses, in padded rows.
        has_turns: whether rows are sampled again inside `sampling()`, with what came after their responses. If at most
            as many rows as are sampled at the same time have turns, what they have read is kept in between.
        merges: whether to merge adapters inside `sampling()`.
        compile: what compiles decoding steps on a GPU, if anything does.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        settings: DecodingSettings,
        seed: int,
        is_scored: bool = False,
        has_turns: bool = False,
        merges: MergesAdapters = "auto",
        compile: Compile | None = None,
    ) -> None:
        self.policy = policy
        self.settings = settings
        self.seed = seed
        self.is_scored, self.has_turns = is_scored, has_turns
        self._merges, self.merging = merges, Merging(policy.model, merges, seed)
        self._compile = compile
        self.stop = StopTexts(tokenizer, settings.stop)
        self.decoding = Decoding("static")
        self._rows = self._size = 0  # the largest sizes prepared for
        self._version = 0
        self._keeps = False  # inside `sampling()`
        self._kept: dict[int, ReadRow] = {}  # by the rows of the step
        self.eos = torch.tensor(eos_token_ids(policy, tokenizer, settings), dtype=torch.int64, device=policy.device)

    def prepare(self, rows: int, prompt: int) -> None:
        """Check that `rows` responses to prompts of up to `prompt` tokens fit, and are sampled and scored correctly.

        Raises:
            UserError: they do not fit, or decoding or scoring disagrees with the model's full forward pass.
        """
        longest = self.settings.longest
        size = prompt + longest
        at_once, is_more = min(rows, self.settings.batch_size or rows), rows > self._rows or size > self._size
        room = partial(check_room, self.policy.model, rows, at_once, prompt, longest, has_turns=self.has_turns)
        if is_more:
            self.policy.during(room)
        if size > self._size:
            self.policy.eval()
            used = partial(kept_bytes, self.policy.model, rows, at_once, prompt, longest, True, self.has_turns)
            self.merging.choose(used)
            expected = self.policy.during(lambda: full_passes(self.policy.model, size))
            with self.merging.merged(self._version):
                self.decoding = self.policy.during(
                    lambda: choose_decoding(self.policy.model, size, expected, self.has_turns, self._compile)
                )
            if self.is_scored:
                check_scoring(self.policy, expected)
        if is_more and self.decoding.replaces:
            self.policy.during(partial(room, replaces=True))
        self._rows, self._size = max(rows, self._rows), max(size, self._size)

    def update_weights(self, step: int) -> None:
        """Note the number of training steps of the weights, which engine and trainer share."""
        self._version = step

    @torch.no_grad()
    def sample(
        self,
        prompts: Batch,
        step: int,
        rows: Sequence[int],
        temperature: float | None = None,
        turns: Turns | None = None,
    ) -> Responses:
        """Sample one response to each prompt, as `Engine` says."""
        self.prepare(len(rows), prompts["prompt_ids"].shape[1])
        self.policy.eval()
        settings = (
            self.settings if temperature is None else self.settings.model_copy(update={"temperature": temperature})
        )
        limits = length_limits(self.settings, self.seed, step, rows, turns)
        uniforms = token_uniforms(self.seed, step, rows, int(limits.max()), turns.starts if turns else None)
        at_once = self.settings.batch_size or len(rows)
        kept = rows if self._are_kept(rows) else ()
        parts = [
            self._sample_part(prompts.take(part), limits[part.numpy()], uniforms[part.numpy()], settings, at_once, kept)
            for part in torch.arange(len(rows)).split(len(rows) if self.decoding.replaces else at_once)
        ]
        return joined(parts)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Keep what rows have read, merged adapters, and all sharded weights of the policy on every process."""
        with gathered(self.policy), self.merging.merged(self._version):
            self._keeps = self.has_turns
            try:
                yield
            finally:
                self._keeps = False
                self._kept.clear()

    def remarks(self) -> list[str]:
        """Return notes for the user: what makes sampling on a GPU slower than it could be, and what it keeps."""
        slow = {
            "sampling does not use a CUDA graph, which would be faster: ": self.decoding.unrecorded,
            "decoding steps are not compiled, because decoding ": self.decoding.uncompiled,
        }
        return [note + why for note, why in slow.items() if why is not None] + self.merging.remarks()

    def auto_values(self) -> dict[str, Any]:
        """Return whether adapters are merged, if that was left to the sampler."""
        if self._merges != "auto" or self.merging.merges is None:
            return {}
        return {"sampling.merge_adapters": "always" if self.merging.merges else "never"}

    def sleep(self) -> None:
        """Do nothing, as the engine holds no memory between calls."""

    def close(self) -> None:
        """Do nothing, as the engine holds only memory."""

    def _are_kept(self, rows: Sequence[int]) -> bool:
        """Return whether what these rows read is kept for their next turns."""
        most = self.settings.batch_size or self._rows
        return self._keeps and self.decoding.continues and len({*self._kept, *rows}) <= most

    def _sample_part(
        self,
        prompts: Batch,
        limits: NDArray[np.int64],
        uniforms: NDArray[np.float64],
        settings: DecodingSettings,
        at_once: int,
        kept: Sequence[int],
    ) -> Responses:
        """Sample responses to some prompts: `at_once` of them together, while the others wait.

        `kept` are the rows of the prompts in the step if what they read is kept, in which case none waits, or else
        nothing.
        """
        kind, together = self.decoding.cache, replaced_together(at_once)
        ids, mask = (prompts[name].to(self.eos.device) for name in ("prompt_ids", "prompt_mask"))
        longest = ids.shape[1] + int(limits.max())
        spare = spare_columns(longest) if at_once < len(ids) else 0
        cache = new_cache(self.policy.model, kind, longest + spare)
        first = ids[:at_once], mask[:at_once]
        read_rows = [self._kept.pop(row, None) for row in kept]
        decoder = Decoder(self.policy.model, *first, cache, kind == "recorded", spare, read_rows)
        del read_rows  # the decoder needs it for a moment only
        growing = Growing(len(ids), limits, self.eos.tolist(), self.stop)
        everyone = list(range(len(ids)))
        draw = self.decoding.draw
        running = Running(decoder, growing, torch.from_numpy(uniforms), self.eos, settings, everyone[:at_once], draw)
        waiting = everyone[at_once:]
        texts = unpadded(ids, mask) if kept else []
        while (left := running.left()) or waiting:
            if waiting and len(ended := running.ended()) >= together:
                new, waiting = waiting[:together], waiting[together:]
                running.replace(ended[: len(new)], new, ids[new], mask[new])
                continue
            size = len(running.responses)
            if size > SMALLEST[kind] * at_once and len(left) <= DROP_AT[kind] * size:
                self._kept |= running.read(texts, kept)
                running.keep(left)
            running.step(min(STEPS[kind], growing.longest_left(running.responses)))
        self._kept |= running.read(texts, kept)
        return growing.responses(running.logprobs, torch.full(running.logprobs.shape, self._version))
