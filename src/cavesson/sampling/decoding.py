"""Decoding with a key-value cache: one pass over the prompt, then one token at a time.

A preallocated cache is faster, and on a GPU its steps can be replayed as a CUDA graph. But some architectures compute
different results with it, and some handle padding or the end of a sliding window correctly only in a full pass. So
decoding is compared with a full forward pass before it is used.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from transformers import GenerationConfig, PretrainedConfig, StaticCache

from cavesson.data.prompts import padded_prompts
from cavesson.errors import UserError, first_line
from cavesson.models.parts import UNSUPPORTED, causal, close, output_head, probe_ids, tolerance, trunk
from cavesson.models.policy import Policy, positions
from cavesson.models.quantized import without_rounding
from cavesson.models.shared_prompts import distinct
from cavesson.ops.head import head_logits
from cavesson.sampling.recorded import RecordedStep, can_record

CacheKind = Literal["recorded", "static", "growing"]
"""Preallocated, with steps replayed as a CUDA graph; preallocated; or what the model makes by itself."""

_WINDOWS = ("sliding_window", "window_size", "attention_window_size", "attention_chunk_size")
"""Fields of configs that say how far attention reaches back."""
_COMPARED = 3
"""Tokens whose distributions are compared: that after the prompt, and those of two decoding steps."""
_KEPT = torch.tensor([2, 0])
"""The rows that are left before the last of these steps."""


class Decoder:
    """Computes the logits of each next token of a batch of rows; rows can leave the batch.

    Args:
        model: a causal language model.
        ids: prompts `[B, S]`, padded on the left.
        mask: 0 on the padding.
        cache: an empty cache; None = the model creates one.
        recorded: whether to replay steps as a CUDA graph; `can_record` must hold for the cache.
    """

    def __init__(self, model: nn.Module, ids: Tensor, mask: Tensor, cache: Any, recorded: bool = False) -> None:
        self._trunk, self._head = trunk(model), output_head(model).float()
        self._ids, self._mask, self._position = ids, mask, positions(mask)
        self._cache, self._recorded = cache, recorded
        self._step: RecordedStep | None = None

    def read(self) -> Tensor:
        """Read the prompts and return the logits `[B, V]` of their first tokens."""
        among = distinct(self._ids, self._mask)
        prompts = self._ids[among.first], self._mask[among.first], self._position[among.first]
        logits = self._logits(*prompts)[among.prompt]
        among.spread(self._cache)
        self._position = self._position[:, -1:]
        if self._recorded:  # a mask of fixed shape; what is not there yet is masked as the future
            self._mask = pad(self._mask, (0, self._cache.layers[0].max_cache_len - self._mask.shape[1]), value=1)
        return logits

    def append(self, token: Tensor) -> Tensor:
        """Append one token `[B]` to each row and return the logits `[B, V]` of the next ones."""
        ids, self._position = token[:, None], self._position + 1
        if not self._recorded:
            self._mask = pad(self._mask, (0, 1), value=1)
            return self._logits(ids, self._mask, self._position)
        if self._step is None:
            self._step = RecordedStep(self._logits, (ids, self._mask, self._position), self._cache)
        return self._step(ids, self._mask, self._position)

    def keep(self, rows: Tensor) -> None:
        """Drop all rows of the batch but these `[K]`."""
        self._step = None
        self._mask, self._position = self._mask[rows], self._position[rows]
        self._cache.reorder_cache(rows)

    def _logits(self, ids: Tensor, mask: Tensor, position: Tensor) -> Tensor:
        output = self._trunk(
            input_ids=ids, attention_mask=mask, position_ids=position, past_key_values=self._cache, use_cache=True
        )
        self._cache = output.get("past_key_values", self._cache)
        if self._cache is None:
            raise TypeError("the model keeps none")
        return head_logits(output.last_hidden_state[:, -1].float(), self._head, 1.0)


def new_cache(model: nn.Module, kind: CacheKind, size: int) -> StaticCache | None:
    """Return an empty cache for sequences of `size` tokens, or None if the model creates the cache."""
    return None if kind == "growing" else StaticCache(config=causal(model).config, max_cache_len=size)


class FullPasses(NamedTuple):
    """A model's logits on a few rows, each computed in a separate forward pass without padding or cache."""

    prompts: list[list[int]]
    answers: Tensor
    """tokens `[3, 3]` that follow the prompts"""
    logits: Tensor
    """`[3, 3, V]` of the answers' tokens"""


@torch.no_grad()
def full_passes(model: nn.Module, size: int) -> FullPasses:
    """Compute logits of a few rows, to compare decoding and scoring with. No random numbers are drawn.

    The rows have different lengths, and one prompt occurs twice, so that padding and shared prompts are compared too.
    If the model has a limited attention window shorter than `size`, the longest prompt fills it, as far as `size`
    allows.

    Args:
        model: a causal language model in evaluation mode.
        size: number of tokens of the longest sequence, prompt and response together.
    """
    prompts, answers = _rows(causal(model).config, size)
    head, rows = output_head(model).float(), []
    with without_rounding(model):
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = torch.cat([torch.tensor(prompt), answer[:-1]]).to(causal(model).device)
            states = trunk(model)(input_ids=ids[None], use_cache=False).last_hidden_state
            rows.append(head_logits(states[0, -_COMPARED:].float(), head, 1.0))
    return FullPasses(prompts, answers, torch.stack(rows))


class Decoding(NamedTuple):
    """How a model is decoded."""

    cache: CacheKind
    unrecorded: str | None = None
    """on a GPU, why its steps are not replayed as a CUDA graph"""


@torch.no_grad()
def choose_decoding(model: nn.Module, size: int, expected: FullPasses) -> Decoding:
    """Return the fastest decoding of up to `size` tokens that agrees with full forward passes.

    Raises:
        UserError: decoding agrees with neither kind of cache.
    """
    kind, unrecorded = causal(model).config.model_type, None
    if causal(model).device.type == "cuda":
        unrecorded = _unrecorded(model, size, expected)
        if unrecorded is None:
            return Decoding("recorded")
    caches: tuple[CacheKind, ...] = ("static", "growing")
    for cache in caches:
        reason = _disagreement(model, cache, size, expected)
        if reason is None:
            return Decoding(cache, unrecorded)
    raise UserError(f"{kind} cannot be sampled from: decoding with a cache {reason}; choose another architecture")


@torch.no_grad()
def check_scoring(policy: Policy, expected: FullPasses) -> None:
    """Compare the log-probabilities of padded rows with those of a full forward pass of each row alone.

    Raises:
        UserError: they differ by more than the tolerance.
    """
    prompts, answers, logits = expected
    batch = padded_prompts(prompts).with_columns(response_ids=answers, mask=torch.ones(answers.shape))
    batch = batch.to(policy.device)
    with without_rounding(policy):
        seen = policy(batch).logprob
    logprob = (logits / policy.temperature).log_softmax(-1).gather(2, batch["response_ids"][:, :, None]).squeeze(2)
    difference = float((seen - logprob).abs().max())
    spread = float((logits - logits.mean(-1, keepdim=True)).abs().max()) / policy.temperature
    if not difference <= tolerance(policy.dtype) * max(1, spread):
        raise UserError(
            f"{causal(policy.model).config.model_type} cannot be scored: padding changes its log-probabilities by up "
            f"to {difference:.2g} nats; choose another architecture"
        )


@torch.no_grad()
def check_generate(model: Any) -> None:
    """Compare the logits that transformers' own `generate` computes for a few tokens with a full forward pass.

    Raises:
        UserError: they differ by more than the tolerance, or the model cannot generate.
    """
    kind = causal(model).config.model_type
    ids = probe_ids(model, 4)[None]
    wanted = {"max_new_tokens": _COMPARED, "min_new_tokens": _COMPARED, "do_sample": False, "output_logits": True}
    config = GenerationConfig(**wanted, return_dict_in_generate=True, pad_token_id=0)
    try:
        with without_rounding(model):
            output = causal(model).generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)  # type: ignore[operator]
            expected = causal(model)(input_ids=output.sequences[:, :-1], use_cache=False).logits[:, ids.shape[1] - 1 :]
    except UNSUPPORTED as error:
        raise UserError(f"{kind} cannot generate: {type(error).__name__} ({first_line(error)})") from error
    if not bool(close(torch.stack(output.logits, dim=1), expected, causal(model).dtype).all()):
        raise UserError(f"{kind} samples from different distributions than its full forward pass; choose another model")


def reach(config: PretrainedConfig, size: int) -> int | None:
    """Return the largest limited attention window below `size` tokens, or None if there is none."""
    text = config.get_text_config()
    found = (getattr(text, name, None) for name in _WINDOWS)
    return max((window for window in found if isinstance(window, int) and 0 < window < size), default=None)


def _rows(config: PretrainedConfig, size: int) -> tuple[list[list[int]], Tensor]:
    """Return prompts of different lengths, and the tokens `[3, 3]` that follow them."""
    longest = max(1, min(max(4, reach(config, size) or 0), size - _COMPARED))
    tokens = min(config.get_text_config().vocab_size, 1000)
    long = [(5 * n + 2) % tokens for n in range(longest)]
    return [long, long[:1], long], torch.arange(7, 16).view(3, _COMPARED) % tokens


def _unrecorded(model: nn.Module, size: int, expected: FullPasses) -> str | None:
    """Return why steps cannot be replayed as a CUDA graph, or None if they can."""
    if any(isinstance(weight, DTensor) for weight in model.parameters()):
        return "the weights are sharded"
    if not can_record(new_cache(model, "recorded", size)):
        return "the cache keeps more than keys and values of all tokens"
    reason = _disagreement(model, "recorded", size, expected)
    return None if reason is None else f"decoding {reason}"


def _disagreement(model: nn.Module, kind: CacheKind, size: int, expected: FullPasses) -> str | None:
    """Return what is wrong with decoding with this cache, or None if it agrees with the full forward pass."""
    try:
        with without_rounding(model):
            seen = _decoded(model, kind, size, expected)
        if kind == "recorded":  # the kernels of quantized layers too, some of which wait for the GPU
            _decoded(model, kind, size, expected)
    except torch.OutOfMemoryError:
        raise
    except UNSUPPORTED as error:
        return f"raises {type(error).__name__} ({first_line(error)})"
    kept = _KEPT.to(seen.device)
    wanted = torch.cat([expected.logits[:, 0], expected.logits[:, 1], expected.logits[kept, 2]])
    if bool(close(seen, wanted, causal(model).dtype).all()):
        return None
    difference = (seen.log_softmax(-1) - wanted.log_softmax(-1)).abs().max()
    return f"differs from a full forward pass by up to {float(difference):.2g} nats"


def _decoded(model: nn.Module, kind: CacheKind, size: int, expected: FullPasses) -> Tensor:
    """Return the logits of the tokens that are compared, those of each step after those of the one before."""
    device = causal(model).device
    batch, answers, kept = padded_prompts(expected.prompts), expected.answers.to(device), _KEPT.to(device)
    ids, mask = batch["prompt_ids"].to(device), batch["prompt_mask"].to(device)
    decoder = Decoder(model, ids, mask, new_cache(model, kind, size), kind == "recorded")
    logits = [decoder.read(), decoder.append(answers[:, 0])]
    decoder.keep(kept)
    return torch.cat([*logits, decoder.append(answers[kept, 1])])
