"""From logits to a sampled token: scaling, filters and the draw. Pure functions of tensors."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from cavesson.rollout.engines.settings import DecodingSettings

_PIECE = 512
"""Tokens whose probabilities are summed before they are looked at one by one."""


class Filters(NamedTuple):
    """What changes the distribution to sample from, as in `DecodingSettings`."""

    temperature: float
    top_k: int
    top_p: float
    min_new_tokens: int


def filters_of(settings: DecodingSettings) -> Filters:
    return Filters(*(getattr(settings, name) for name in Filters._fields))


def next_tokens(
    logits: Tensor, uniforms: Tensor, index: Tensor, count: Tensor, eos: Tensor, filters: Filters
) -> tuple[Tensor, Tensor]:
    """Return the token that is drawn in each row, and its log-probability, both `[B]`, from logits `[B, V]`, float32.

    `uniforms` are the random numbers of all responses, `[N, T]`; `index` has the response of each row, `[B]`, and
    `count` the tokens drawn before, less than T.
    """
    allowed = without(logits, eos, count < filters.min_new_tokens) if filters.min_new_tokens else logits
    if filters.temperature == 0:
        distribution, token = logits.log_softmax(-1), allowed.argmax(-1)
    else:
        distribution = sampling_logprobs(allowed, filters)
        token = draw(distribution, uniforms[index, count])
    return token, distribution.gather(1, token[:, None]).squeeze(1)


NextTokens = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Filters], tuple[Tensor, Tensor]]
"""`next_tokens`, or another function that computes the same."""


def without(logits: Tensor, tokens: Tensor, where: Tensor) -> Tensor:
    """Return logits `[B, V]` with which some tokens cannot be drawn in the rows for which `where` `[B]` is true."""
    found = logits.clone()
    found[:, tokens] = found[:, tokens].masked_fill(where[:, None], -torch.inf)
    return found


def sampling_logprobs(logits: Tensor, filters: Filters | DecodingSettings) -> Tensor:
    """Return the log-probabilities `[B, V]` of the distribution to sample from; -inf = the token cannot be drawn."""
    logits = logits / filters.temperature
    if filters.top_k:
        kth = logits.topk(min(filters.top_k, logits.shape[1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if filters.top_p < 1:
        logits = _nucleus(logits, filters.top_p)
    return logits.log_softmax(-1)


def draw(logprobs: Tensor, uniforms: Tensor) -> Tensor:
    """Return the tokens at which the cumulative probability passes the uniform number: `[B, V]`, `[B]` -> `[B]`.

    This needs one random number per row instead of one per row and token, and the draw of a row depends only on its own
    number. The cumulative sums are in float64, so that rounding does not remove the rarest of 100,000 tokens. They are
    made in two levels, of pieces and within one piece, so that most tokens are read once and nothing of their size is
    written.
    """
    pieces = _pieces(logprobs)
    before = pieces.sum(-1, dtype=torch.float64).cumsum(-1)
    threshold = uniforms[:, None] * before[:, -1:]
    piece = _first_above(before, threshold)
    inside = pieces.gather(1, piece[:, :, None].expand(-1, -1, pieces.shape[2])).squeeze(1)
    start = pad(before, (1, 0)).gather(1, piece)
    within = _first_above(start + inside.cumsum(-1, dtype=torch.float64), threshold)
    return (piece * pieces.shape[2] + within).squeeze(1).clamp_max(logprobs.shape[1] - 1)


def _pieces(logprobs: Tensor) -> Tensor:
    """Return probabilities `[B, P, W]` of tokens `[B, V]` in pieces; the last one is filled with zeros."""
    width = min(_PIECE, logprobs.shape[1])
    return pad(logprobs, (0, -logprobs.shape[1] % width), value=-torch.inf).exp_().view(len(logprobs), -1, width)


def _first_above(cumulated: Tensor, threshold: Tensor) -> Tensor:
    """Return where growing numbers `[B, N]` pass a threshold `[B, 1]`, or where they reach their end before it.

    For NaN, an arbitrary index is returned: broken weights are reported later.
    """
    below = torch.nextafter(cumulated[:, -1:], torch.zeros_like(threshold))
    found = torch.searchsorted(cumulated, threshold.minimum(below), right=True)
    return found.clamp_max(cumulated.shape[1] - 1)


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Keep the most likely tokens up to and including the one that reaches `top_p` (arXiv:1904.09751)."""
    ordered, order = logits.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(-1)
    outside = probabilities.cumsum(-1) - probabilities >= top_p
    return logits.masked_fill(outside.gather(1, order.argsort(1)), -torch.inf)
