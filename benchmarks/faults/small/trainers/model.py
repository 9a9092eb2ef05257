"""A small transformer, and how the trainers sample from it and score with it."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PAD, BOS, EOS = 0, 1, 2
SPECIAL = ("<pad>", "<bos>", "<eos>")
PLACES = 64
"""Longest sequence, in tokens."""


class Transformer(nn.Module):
    """Pre-norm transformer with learned positions and tied embeddings; ``heads`` columns of output if it is a critic.

    Args:
        vocabulary: Number of tokens.
        width: Of the hidden states.
        layers: Number of blocks.
        outputs: 0 = logits over the vocabulary; 1 = one value per token.
    """

    def __init__(self, vocabulary: int, width: int = 64, layers: int = 2, outputs: int = 0) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(PLACES, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.0)
        self.head = nn.Linear(width, outputs) if outputs else None
        nn.init.normal_(self.tokens.weight, std=0.05)
        nn.init.normal_(self.places.weight, std=0.05)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return [B, T, V] logits or [B, T] values; ``mask`` [B, T] is False on padding, left or right."""
        place = (mask.cumsum(1) - 1).clamp(min=0)
        hidden = self.dropout(self.tokens(ids) + self.places(place))
        length = ids.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool).tril() & mask[:, None, :]
        seen = seen | torch.eye(length, dtype=torch.bool)  # padding looks at itself: a row of nothing would be NaN
        for block in self.blocks:
            hidden = self.dropout(block(hidden, seen[:, None]))
        hidden = self.norm(hidden)
        return hidden @ self.tokens.weight.T if self.head is None else self.head(hidden).squeeze(-1)


class Block(nn.Module):
    """Attention with four heads, then two layers of four times the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor, seen: Tensor) -> Tensor:
        """Return [B, T, W] new hidden states; ``seen`` [B, 1, T, T] says what each token may look at."""
        size, length, width = hidden.shape
        parts = self.attend(self.first(hidden)).view(size, length, 3, 4, width // 4)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        hidden = hidden + self.project(found.transpose(1, 2).reshape(size, length, width))
        return hidden + self.inner(self.second(hidden))


class Sampled(NamedTuple):
    """Responses [B, T] to prompts [B, P]; padding follows the end token."""

    ids: Tensor
    """[B, P + T] prompts and responses"""
    attended: Tensor
    """[B, P + T] False on padding"""
    answers: Tensor
    """[B, T]"""
    mask: Tensor
    """[B, T] False behind the end token"""
    logprobs: Tensor
    """[B, T] under the distribution that was sampled from"""


@torch.no_grad()
def generate(model: nn.Module, prompts: Tensor, attended: Tensor, limit: int, temperature: float = 1.0) -> Sampled:
    """Sample one response of at most ``limit`` tokens to each prompt."""
    model.eval()
    ids, start = prompts, prompts.shape[1]
    running = torch.ones(len(ids), dtype=torch.bool)
    columns, masks = [], []
    for _position in range(limit):
        logits = model(ids, attended)[:, -1] / temperature
        logits[:, [PAD, BOS]] = -torch.inf
        every = logits.log_softmax(-1)
        token = torch.multinomial(every.exp(), 1)
        columns.append(every.gather(1, token).squeeze(1))
        masks.append(running)
        token = torch.where(running, token.squeeze(1), PAD)
        ids = torch.cat([ids, token[:, None]], 1)
        attended = torch.cat([attended, running[:, None]], 1)
        running = running & (token != EOS)
        if not running.any():
            break
    mask = torch.stack(masks, 1)
    return Sampled(ids, attended, ids[:, start:], mask, torch.stack(columns, 1) * mask)


def score(model: nn.Module, sampled: Sampled, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return [B, T] the log-probabilities of the sampled tokens, and [B, T] the entropies where they were sampled."""
    length = sampled.answers.shape[1]
    logits = model(sampled.ids, sampled.attended)[:, -length - 1 : -1] / temperature
    logits = logits.index_fill(2, torch.tensor([PAD, BOS]), -1e9)
    every = logits.log_softmax(-1)
    logprobs = every.gather(2, sampled.answers[:, :, None]).squeeze(2)
    entropy = -(every.exp() * every).sum(-1)
    return logprobs * sampled.mask, entropy * sampled.mask


def rows(sampled: Sampled, index: Tensor) -> Sampled:
    """Return some of the responses."""
    return Sampled(*(each[index] for each in sampled))
