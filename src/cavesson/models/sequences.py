"""Models that read whole examples: token scores for fine-tuning, pair scores for DPO, rewards for reward models.

Examples of different lengths can be packed: one row holds several, each with its own positions and attention. The
scores of an example are the same, packed or alone.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from cavesson.errors import UserError
from cavesson.models.layers import as_in_run
from cavesson.models.mapped import is_mapped
from cavesson.models.packed import Packed, pack_rows, packed_states
from cavesson.models.parts import causal, check_head, output_head, probe_ids, row_shape, trunk
from cavesson.ops.logprobs import LogProbs, token_logprobs
from cavesson.ops.masked import spread
from cavesson.ops.packing import RowShape, pack, width_of
from cavesson.types import Batch, PairScores, ResponseScores, Scores, moved, places_of, stacked


class Layout(NamedTuple):
    """Where the tokens of B examples are placed in R rows of W tokens."""

    ids: Tensor
    """`[R, W]`; what no example fills is 0"""
    positions: Tensor | None
    """`[R, W]`, starting again at every example; None where every row holds a single one"""
    place: Tensor
    """`[B, L]`: the index in the flattened rows of every token; 0 on padding"""
    packed: Packed | None = None
    """the row, if there is one without padding that attention takes apart by its bounds, see `packed`"""

    def to(self, device: torch.device) -> "Layout":
        """Return the rows on a device; the places of tokens stay on the host."""
        positions = None if self.positions is None else moved(self.positions, device)
        packed = None if self.packed is None else self.packed.to(device)
        return Layout(moved(self.ids, device), positions, self.place, packed)


def lay_out(ids: Tensor, length: Tensor, shape: RowShape | None) -> Layout:
    """Arrange examples `[B, L]` of the given lengths `[B]`, on the host, in rows of this shape; None = a row each."""
    if shape is None:
        return Layout(ids, None, torch.arange(ids.numel()).view_as(ids))
    lengths = length.tolist()
    rows = pack(lengths, shape)
    width = width_of(lengths, rows)
    flat = torch.zeros(len(rows) * width, dtype=ids.dtype)
    positions = torch.zeros_like(flat)
    place = torch.zeros(ids.shape, dtype=torch.long)
    for row, members in enumerate(rows):
        start = row * width
        for example in members:
            size = lengths[example]
            span = torch.arange(start, start + size)
            place[example, :size] = span
            positions[span] = torch.arange(size)
            start += size
        # Padding gets its own positions, so that it is a separate sequence.
        positions[start : (row + 1) * width] = torch.arange((row + 1) * width - start)
    inside = _inside(place, length)
    flat[place[inside]] = ids[inside]
    several = positions.view(len(rows), width) if len(rows) < len(lengths) else None
    return Layout(flat.view(len(rows), width), several, place)


def lay_in_one_row(ids: Tensor, length: Tensor) -> Layout:
    """Arrange examples `[B, L]` of the given lengths `[B]`, on the host, in a single row without padding."""
    inside = _inside(ids, length)
    packed = pack_rows(ids, inside)
    place = (inside.flatten().cumsum(0) - 1).view_as(ids) * inside
    return Layout(packed.ids, packed.positions, place, packed)


class ExampleModel(nn.Module):
    """A model, possibly with adapters, that reads examples; if `packed`, several of them are in one row."""

    passes: ClassVar[tuple[str, ...]] = ("check",)
    """methods besides `forward` that use the weights and are called from outside"""

    def __init__(self, model: Any, packed: bool) -> None:
        super().__init__()
        self.model = model
        self.shape = row_shape(causal(model).config) if packed else None
        self.packed = False
        """whether all examples are in one row, see `packed`; this takes the place of `shape`"""
        self.eval()  # disables all randomness, see `Policy`
        if not is_mapped(model):
            self.check()

    @property
    def pads(self) -> bool:
        """Whether examples are padded to the longest of a batch."""
        return not self.packed and self.shape is None

    def check(self) -> None:
        """Raise a UserError unless the model is scored correctly."""
        if self.shape is not None:
            check_packing(self.model)

    def laid_out(self, batch: Batch) -> Layout:
        """Arrange the examples of a batch, on the host, in rows."""
        if self.packed:
            return lay_in_one_row(batch["ids"], batch["length"])
        return lay_out(batch["ids"], batch["length"], self.shape)


class SequencePolicy(ExampleModel):
    """A causal language model that scores the learned tokens of examples.

    In training, `disturb` adds noise to the input embeddings, see `neftune`.
    """

    def __init__(
        self, model: nn.Module, packed: bool, disturb: Callable[[Tensor, Layout, Batch], Tensor] | None = None
    ) -> None:
        super().__init__(model, packed)
        self.disturb = disturb
        self.logprobs: LogProbs = token_logprobs

    def check(self) -> None:
        check_head(self.model)
        super().check()

    def forward(self, batch: Batch) -> Scores:
        """Compute log-probability and entropy `[B, L]` of every learned token, 0 elsewhere."""
        inside, device = batch.on_host["learned"] > 0, batch["learned"].device
        layout = self.laid_out(batch.on_host).to(device)
        states = self._states(layout, batch)
        # A token is predicted from the state of the token before it; the first one of an example is never learned.
        states = states.flatten(0, 1)[moved(layout.place[inside] - 1, device)]
        places = places_of(inside, device)
        targets = batch["ids"].flatten()[places]
        logprob, entropy = self.logprobs(states, output_head(self.model), targets, 1.0)
        return Scores(spread(logprob, places, batch["learned"]), spread(entropy, places, batch["learned"]), None)

    def _states(self, layout: Layout, batch: Batch) -> Tensor:
        if self.disturb is None or not torch.is_grad_enabled():
            return hidden_states(self.model, layout)
        disturb = self.disturb
        embeddings = causal(self.model).get_input_embeddings()
        hook = embeddings.register_forward_hook(lambda _module, _inputs, output: disturb(output, layout, batch))
        try:
            return hidden_states(self.model, layout)
        finally:
            hook.remove()


class PairPolicy(SequencePolicy):
    """A causal language model that scores both responses of a pair."""

    def forward(self, batch: Batch) -> PairScores:  # type: ignore[override]
        """Compute the summed log-probability of the learned tokens of each response."""
        scores = super().forward(_both(batch))
        return PairScores(*scores.logprob.sum(1).chunk(2))


class ResponsePolicy(SequencePolicy):
    """A causal language model that scores a response to each prompt."""

    def forward(self, batch: Batch) -> ResponseScores:  # type: ignore[override]
        """Compute the summed log-probability of the learned tokens of each response."""
        return ResponseScores(super().forward(batch).logprob.sum(1))


class RewardModel(ExampleModel):
    """A Hugging Face sequence classifier with one output that rewards both responses of a pair."""

    def check(self) -> None:
        if hasattr(causal(self.model), "score"):
            super().check()

    def forward(self, batch: Batch) -> PairScores:
        """Compute the reward of each response."""
        both = _both(batch)
        classifier = causal(self.model)
        head = getattr(classifier, "score", None)
        if head is None:  # an encoder, with its own pooling and bidirectional attention
            attention = _inside(both["ids"], both["length"]).long()
            rewards = self.model(input_ids=both["ids"], attention_mask=attention).logits
        else:
            layout = self.laid_out(both.on_host)
            states = hidden_states(self.model, layout.to(both["ids"].device)).flatten(0, 1)
            at = last_token(both.on_host, classifier.config.pad_token_id)
            last = layout.place.gather(1, at[:, None]).squeeze(1)
            rewards = head(states[moved(last, states.device)])
        return PairScores(*rewards.float().squeeze(-1).chunk(2))


def hidden_states(model: nn.Module, layout: Layout) -> Tensor:
    """Compute the trunk's last hidden states `[R, W, H]`; no attention mask is needed, because padding comes last."""
    with as_in_run():
        if layout.packed is not None:
            return packed_states(model, layout.packed)
        states: Tensor = trunk(model)(
            input_ids=layout.ids, position_ids=layout.positions, use_cache=False
        ).last_hidden_state
        return states


@torch.no_grad()
def check_packing(model: nn.Module) -> None:
    """Check that the architecture keeps packed examples apart; some ignore the boundaries between them.

    Raises:
        UserError: the hidden states of an example depend on the other examples in its row.
    """
    inner = causal(model)
    ids, length = probe_ids(model, 12).view(3, 4).cpu(), torch.tensor([4, 2, 2])
    inside = _inside(ids, length)
    packed, alone = (lay_out(ids, length, shape).to(inner.device) for shape in (RowShape(0), None))
    seen, expected = (hidden_states(model, x).flatten(0, 1)[x.place[inside]].float() for x in (packed, alone))
    # bfloat16 has 8 significant bits, float32 has 24.
    tolerance = 0.05 if inner.dtype == torch.bfloat16 else 1e-3
    if float((seen - expected).abs().max()) > tolerance * float(expected.abs().max()):
        raise UserError(
            f"{inner.config.model_type} does not keep packed examples apart; set update.layout to grouped or padded"
        )


def last_token(batch: Batch, pad: int | None) -> Tensor:
    """Return the index `[B]` of the last non-pad token, from which Hugging Face classifiers take the score."""
    inside = _inside(batch["ids"], batch["length"])
    if pad is not None:
        inside &= batch["ids"] != pad
    return (inside * torch.arange(inside.shape[1], device=inside.device)).argmax(1)


def _inside(columns: Tensor, length: Tensor) -> Tensor:
    # Counted in the columns, so that a plan, which has real examples and no other real tensors, has real lengths.
    return torch.ones_like(columns, device=length.device).cumsum(1) <= length[:, None]


def _both(batch: Batch) -> Batch:
    """Concatenate the chosen and then the rejected responses of a batch of pairs, as `[2B, …]`."""
    names = ("ids", "learned", "length")
    both = {name: stacked([batch[f"{side}_{name}"] for side in ("chosen", "rejected")], name) for name in names}
    return Batch(both, None if batch.host is None else _both(batch.host))
