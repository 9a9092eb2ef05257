"""Perplexity of a model on a text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cavesson.data.chat import Chat
from cavesson.data.encode import Asked, Encoder, asked_of
from cavesson.data.load import load
from cavesson.data.notes import Notes
from cavesson.data.prompts import padded_prompts
from cavesson.data.types import Demonstration
from cavesson.errors import UserError, print_error
from cavesson.models.parts import causal, position_limit
from cavesson.models.policy import Policy
from cavesson.text.visible import visible
from cavesson.tools.settings import HeldOutTextSettings

_LONGEST_WINDOW = 1024


@dataclass(frozen=True)
class Likelihood:
    """The likelihood of a text under a model."""

    documents: int
    tokens: int
    """those that were predicted"""
    nll: float
    """mean of −log p per token, in nats"""
    perplexity: float
    """e^nll"""
    context: int
    stride: int


@dataclass(frozen=True)
class Document:
    """Token ids, and which of them count; the first never counts, because no token precedes it."""

    ids: Sequence[int]
    counts: Sequence[bool]


@dataclass(frozen=True)
class Window:
    """A part of a document: the tokens that are read, those that are predicted, and which of these count."""

    context: Sequence[int]
    targets: Sequence[int]
    counts: Sequence[bool]


def read_documents(settings: HeldOutTextSettings, chat: Chat) -> list[Document]:
    """Read and tokenize the rows. In plain text every token counts; in prompts with responses, the learned tokens."""
    loaded = load(settings, Demonstration)
    rows = loaded.train
    for remark in (*loaded.usage(), *loaded.notes()):
        print_error(visible(remark))
    encoder = Encoder(chat)
    alone = Encoder(replace(chat, of_texts=False, system=None))  # a text without a prompt is nobody's turn
    plain = [row.prompt == "" for row in rows]
    asked = [asked_of(row, f"{settings.path}: row {n}") for n, row in enumerate(rows, start=1)]
    texts = [Asked(one.place, one.responses[0]) for one, is_plain in zip(asked, plain, strict=True) if is_plain]
    others = [one for one, is_plain in zip(asked, plain, strict=True) if not is_plain]
    documents = [Document(line.ids, [False] + [True] * (len(line.ids) - 1)) for line in alone.prompts(texts)]
    notes = Notes()
    for one, learned in zip(others, encoder.lines(others), strict=True):
        documents += [Document(line.ids, line.learn) for line in learned.lines]
        notes.add_all(learned.remarks, one.place)
    for remark in notes.lines():
        print_error(visible(remark))
    return documents


def windows(document: Document, context: int, stride: int) -> list[Window]:
    """Split a document into windows of at most `context` tokens, each starting `stride` tokens after the previous one.

    Every token except the first is predicted once: in the first window that contains it, from the tokens before it in
    that window. With one window, this gives the exact likelihood; with several, the approximation of
    huggingface.co/docs/transformers/perplexity. Windows without tokens that count are omitted.
    """
    cut = []
    done = 1
    for begin in range(0, len(document.ids), stride):
        end = min(begin + context, len(document.ids))
        if any(document.counts[done:end]):
            cut.append(Window(document.ids[begin:done], document.ids[done:end], document.counts[done:end]))
        done = end
        if end == len(document.ids):
            break
    return cut


def measure(
    policy: Policy, documents: Sequence[Document], settings: HeldOutTextSettings, batch_size: int
) -> Likelihood:
    """Measure the mean of −log p over all tokens that count, in all documents together.

    Raises:
        UserError: the context is too long for the model, the stride is not smaller than it, or no token counts.
    """
    limit = position_limit(causal(policy.model).config)
    context = settings.context or min(_LONGEST_WINDOW, limit or _LONGEST_WINDOW)
    stride = settings.stride or context // 2
    if limit is not None and context > limit:
        raise UserError(f"text.context {context}: the model reads {limit} tokens at most")
    if stride >= context:
        raise UserError(f"text.stride {stride} must be less than text.context {context}")
    cut = [window for document in documents for window in windows(document, context, stride)]
    cut.sort(key=lambda window: -len(window.context) - len(window.targets))
    count = sum(sum(window.counts) for window in cut)
    if not count:
        raise UserError("text: there is no token to predict; every document needs two")
    total = math.fsum(
        _log_likelihood(policy, cut[start : start + batch_size]) for start in range(0, len(cut), batch_size)
    )
    return Likelihood(len(documents), count, -total / count, math.exp(-total / count), context, stride)


@torch.no_grad()
def _log_likelihood(policy: Policy, part: Sequence[Window]) -> float:
    """Return the sum of log p over the tokens that count in some windows."""
    batch = padded_prompts([window.context for window in part]).with_columns(
        response_ids=_padded([torch.tensor(window.targets) for window in part]),
        attended=_padded([torch.ones(len(window.targets)) for window in part]),
        learned=_padded([torch.tensor(window.counts, dtype=torch.float32) for window in part]),
    )
    return float(policy(batch.to(policy.device)).logprob.double().sum())


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(rows), batch_first=True)
