"""The choice of a key-value cache: decoding is compared with a full forward pass before it is used.

A preallocated cache is faster, on a GPU its steps can be replayed as a CUDA graph, and rows that have ended can give
their places to others. But some architectures compute different results with it, and some handle padding or the end of
a sliding window correctly only in a full pass.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PretrainedConfig

from cavesson.data.prompts import padded_prompts
from cavesson.errors import UserError, first_line
from cavesson.models.compiled import NOT_COMPILED, Compile, Compiled, Failure, cause
from cavesson.models.compiled_steps import compile_steps, plain_steps
from cavesson.models.layers import forwards
from cavesson.models.parts import UNSUPPORTED, causal, close, output_head, probe_ids, tolerance, trunk
from cavesson.models.policy import Policy
from cavesson.models.quantized import without_rounding
from cavesson.ops.head import head_logits
from cavesson.rollout.engines.decoder import CacheKind, Decoder, can_replace, keeps_tokens_only, new_cache, unchanged
from cavesson.rollout.engines.distribution import Filters, NextTokens, next_tokens
from cavesson.rollout.engines.kept import ReadRow
from cavesson.rollout.engines.memory_check import spare_columns

_WINDOWS = ("sliding_window", "window_size", "attention_window_size", "attention_chunk_size")
"""Fields of configs that say how far attention reaches back."""
_COMPARED = 3
"""Tokens whose distributions are compared: that after the prompt, and those of two decoding steps."""
_KEPT = torch.tensor([2, 0])
"""The rows that are left before the last of these steps."""
_FILTERS = Filters(temperature=1.0, top_k=0, top_p=1.0, min_new_tokens=0)
"""Of the draws that are compared."""


class Compared(NamedTuple):
    """What decoding has computed of N tokens."""

    logits: Tensor
    """decoded, `[N, V]`"""
    expected: Tensor
    """of full passes, `[N, V]`"""
    drawn: Sequence[Tensor] = ()
    """token and log-probability of each draw, `[B, 2]`, if there were draws in the steps"""
    redrawn: Sequence[Tensor] = ()
    """the same, drawn from these logits after the steps"""

    @property
    def draws_agree(self) -> bool:
        pairs = zip(self.drawn, self.redrawn, strict=True)
        return all(torch.allclose(one, other, rtol=0, atol=1e-3) for one, other in pairs)


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
    If the model has a limited attention window shorter than `size`, the tokens of the longest prompt and response
    together, the longest prompt fills it, as far as `size` allows.
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
    replaces: bool = False
    """whether other prompts can replace rows that have ended"""
    continues: bool = False
    """whether rows go on in another batch with what they have read"""
    draw: NextTokens = next_tokens
    """draws the tokens; compiled if steps are"""
    uncompiled: str | None = None
    """if steps should have been compiled, why they are not"""


@torch.no_grad()
def choose_decoding(
    model: nn.Module, size: int, expected: FullPasses, has_turns: bool = False, compile: Compile | None = None
) -> Decoding:
    """Return the fastest decoding of up to `size` tokens that agrees with what full forward passes give.

    The model is in evaluation mode. With `has_turns`, rows are sampled again after what came after their responses;
    `compile` compiles the steps that are recorded.

    Raises:
        UserError: decoding agrees with neither kind of cache.
    """
    kind, unrecorded = causal(model).config.model_type, None
    if causal(model).device.type == "cuda":
        decoding = _recorded(model, size, expected, compile)
        if decoding.unrecorded is None:
            return _extended(decoding, model, size, expected, has_turns)
        unrecorded = decoding.unrecorded
    caches: tuple[CacheKind, ...] = ("static", "growing")
    for cache in caches:
        reason = _disagreement(model, cache, size, expected, _decoded)
        if reason is None:
            return _extended(Decoding(cache, unrecorded), model, size, expected, has_turns)
    raise UserError(f"{kind} cannot be sampled from: decoding with a cache {reason}; choose another architecture")


@torch.no_grad()
def check_scoring(policy: Policy, expected: FullPasses) -> None:
    """Compare the log-probabilities of padded rows with those of a full forward pass of each row alone.

    Raises:
        UserError: they differ by more than the tolerance.
    """
    prompts, answers, logits = expected
    every = torch.ones(answers.shape)
    batch = padded_prompts(prompts).with_columns(response_ids=answers, attended=every, learned=every)
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


def _recorded(model: nn.Module, size: int, expected: FullPasses, compile: Compile | None = None) -> Decoding:
    """Return decoding in which steps are replayed as a CUDA graph, compiled if that works, or why they cannot be."""
    if any(isinstance(weight, DTensor) for weight in model.parameters()):
        return Decoding("recorded", "the weights are sharded")
    if not keeps_tokens_only(new_cache(model, "recorded", size)):
        return Decoding("recorded", "the cache keeps more than keys and values of all tokens")
    uncompiled = None
    plain_steps(model)
    if compile is not None and not forwards(model):
        uncompiled = f"goes through layers that are not known here, those of {causal(model).config.model_type}"
    elif compile is not None:
        failure = Failure("decoding steps are")
        compile_steps(model, compile, failure)
        draw = Compiled(next_tokens, compile(next_tokens), failure)
        uncompiled = _disagreement(model, "recorded", size, expected, partial(_drawn, draw))
        failure.has_worked = uncompiled is None
        if uncompiled is None:
            return Decoding("recorded", draw=draw)
        plain_steps(model)
    reason = _disagreement(model, "recorded", size, expected, partial(_drawn, next_tokens))
    return Decoding("recorded", None if reason is None else f"decoding {reason}", uncompiled=uncompiled)


def _extended(decoding: Decoding, model: nn.Module, size: int, expected: FullPasses, has_turns: bool) -> Decoding:
    """Return a decoding with what else its cache allows: prompts replace rows, or another batch continues them."""
    kind = decoding.cache
    if not can_replace(model, new_cache(model, kind, size)):
        return decoding
    replaces = _disagreement(model, kind, size + spare_columns(size), expected, _replaced) is None
    continues = replaces and has_turns and _disagreement(model, kind, size, expected, _continued) is None
    return decoding._replace(replaces=replaces, continues=continues)


def _disagreement(
    model: nn.Module,
    kind: CacheKind,
    size: int,
    expected: FullPasses,
    decode: Callable[[nn.Module, CacheKind, int, FullPasses], Compared],
) -> str | None:
    """Return what is wrong with decoding with this cache, or None if it agrees with the full forward pass."""
    # A run's sequences may be shorter than those compared.
    size = max(size, max(map(len, expected.prompts)) + _COMPARED)
    try:
        with without_rounding(model):
            seen = decode(model, kind, size, expected)
        if kind == "recorded":  # the kernels of quantized layers too, some of which wait for the GPU
            decode(model, kind, size, expected)
    except torch.OutOfMemoryError:
        raise
    except (*UNSUPPORTED, *NOT_COMPILED) as error:
        return f"raises {cause(error)}"
    if bool(close(seen.logits, seen.expected, causal(model).dtype).all()):
        return None if seen.draws_agree else "draws other tokens than those of its logits"
    difference = (seen.logits.log_softmax(-1) - seen.expected.log_softmax(-1)).abs().max()
    return f"differs from a full forward pass by up to {float(difference):.2g} nats"


def _begun(
    model: nn.Module, kind: CacheKind, size: int, prompts: list[list[int]], read_rows: Sequence[ReadRow] = ()
) -> Decoder:
    batch = padded_prompts(prompts).to(causal(model).device)
    cache = new_cache(model, kind, size)
    return Decoder(model, batch["prompt_ids"], batch["prompt_mask"], cache, kind == "recorded", read_rows=read_rows)


def _decoded(model: nn.Module, kind: CacheKind, size: int, expected: FullPasses) -> Compared:
    """Compare the tokens after the prompts, before and after some rows are dropped."""
    return _steps(_begun(model, kind, size, expected.prompts), expected)


def _drawn(draw: NextTokens, model: nn.Module, kind: CacheKind, size: int, expected: FullPasses) -> Compared:
    """Compare the same tokens, and those that are drawn in the steps with those drawn from the logits afterwards."""
    return _steps(_begun(model, kind, size, expected.prompts), expected, draw)


def _steps(decoder: Decoder, expected: FullPasses, draw: NextTokens | None = None) -> Compared:
    device = expected.logits.device
    answers, kept = expected.answers.to(device), _KEPT.to(device)
    then = unchanged if draw is None else partial(_with_draw, draw)
    first = decoder.read()
    steps = [decoder.append(answers[:, 0], then).clone()]  # a graph's next step overwrites it
    decoder.keep(kept)
    steps.append(decoder.append(answers[kept, 1], then).clone())
    vocabulary = first.shape[1]
    logits, drawn = ([*each] for each in zip(*(step.tensor_split([vocabulary], 1) for step in steps), strict=True))
    redrawn = drawn if draw is None else [_with_draw(next_tokens, one)[:, vocabulary:] for one in logits]
    wanted = torch.cat([expected.logits[:, 0], expected.logits[:, 1], expected.logits[kept, 2]])
    return Compared(torch.cat([first, *logits]), wanted, drawn, redrawn)


def _with_draw(draw: NextTokens, logits: Tensor) -> Tensor:
    """Append a drawn token and its log-probability to each row of logits, `[B, V]` -> `[B, V + 2]`."""
    rows = torch.arange(len(logits), device=logits.device)
    uniforms = torch.linspace(0.2, 0.7, 2 * len(rows), dtype=torch.float64, device=logits.device).view(-1, 2)
    token, logprob = draw(logits, uniforms, rows, rows * 0, rows[:1], _FILTERS)
    return torch.cat([logits, token[:, None].float(), logprob[:, None]], dim=1)


def _replaced(model: nn.Module, kind: CacheKind, size: int, expected: FullPasses) -> Compared:
    """Compare the same tokens, and those of a row that begins again: of rows 2 and 0, the second."""
    decoder, device = _begun(model, kind, size, expected.prompts), expected.logits.device
    compared = _steps(decoder, expected)
    batch, answers = padded_prompts(expected.prompts).to(device), expected.answers.to(device)
    again = decoder.replace(torch.tensor([1], device=device), batch["prompt_ids"][:1], batch["prompt_mask"][:1])
    then = decoder.append(torch.stack([answers[2, 2], answers[0, 0]]))[1:]
    logits = torch.cat([compared.logits, again, then])
    return Compared(logits, torch.cat([compared.expected, expected.logits[:1, 0], expected.logits[:1, 1]]))


def _continued(model: nn.Module, kind: CacheKind, size: int, expected: FullPasses) -> Compared:
    """Compare the tokens after prompts and first answers, if another batch goes on with what one has read."""
    answers = expected.answers.to(expected.logits.device)
    first = _begun(model, kind, size, expected.prompts)
    first.read()
    first.append(answers[:, 0])
    longer = [[*prompt, answer[0]] for prompt, answer in zip(expected.prompts, expected.answers.tolist(), strict=True)]
    read_rows = [first.row(row, prompt[:-1]) for row, prompt in enumerate(expected.prompts)]
    decoder = _begun(model, kind, size, longer, read_rows)
    logits = [decoder.read(), decoder.append(answers[:, 1])]
    return Compared(torch.cat(logits), torch.cat([expected.logits[:, 1], expected.logits[:, 2]]))
