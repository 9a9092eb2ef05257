"""Decoding with a key-value cache: one pass over the prompts, then one token at a time.

All rows append to the same column of the cache, so prompts are padded on the left. A row that has ended can leave the
batch. Or another prompt takes its place, aligned so that it ends in the current column.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

from cavesson.models.layers import layers_for
from cavesson.models.parts import causal, output_head, trunk
from cavesson.models.policy import positions
from cavesson.models.shared_prompts import distinct
from cavesson.ops.head import head_logits
from cavesson.rollout.engines.kept import ReadRow, load, read_row
from cavesson.rollout.engines.recorded import RecordedStep

CacheKind = Literal["recorded", "static", "growing"]
"""Preallocated, with steps replayed as a CUDA graph; preallocated; or what the model makes by itself."""

_WHOLE_BATCH = ("dynamic", "longrope")
"""Kinds of rope whose frequencies depend on the longest row of a batch: what one batch has read is wrong in another."""


class ReadPrompts(NamedTuple):
    """P different prompts that a model has read."""

    ids: Tensor
    """`[P, S]`"""
    mask: Tensor
    """`[P, S]`, 0 on the padding"""
    logits: Tensor
    """`[P, V]` of the first tokens after them"""
    cache: Any
    """their keys and values"""

    def find(self, ids: Tensor, mask: Tensor) -> Tensor | None:
        """Return which of these the prompts `[K, S]` are, `[K]`; None if one of them is not among these."""
        equal = ((ids[:, None] == self.ids) & (mask[:, None] == self.mask)).all(-1)
        return equal.int().argmax(1) if bool(equal.any(1).all()) else None


def unchanged(logits: Tensor) -> Tensor:
    """Return the logits."""
    return logits


class Decoder:
    """Computes the logits of each next token of a batch of rows.

    Args:
        model: a causal language model.
        ids: prompts `[B, S]`, padded on the left.
        mask: 0 on the padding.
        cache: an empty cache; None = the model creates one.
        recorded: whether to replay steps as a CUDA graph; `keeps_tokens_only` must hold for the cache.
        spare: extra columns of the cache, for rows that begin late. When the cache is full, everything moves left by
            `spare + 1` columns. 0 = no row will be replaced.
        read_rows: what was read of each row in another batch; `can_replace` must hold for the cache. Default: nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        ids: Tensor,
        mask: Tensor,
        cache: Any,
        recorded: bool = False,
        spare: int = 0,
        read_rows: Sequence[ReadRow | None] = (),
    ) -> None:
        self._model, self._trunk, self._head = model, trunk(model), output_head(model).float()
        self._ids, self._mask, self._position = ids, mask, positions(mask)[:, -1:]
        self._cache, self._recorded, self._spare = cache, recorded, spare
        self._columns, self._read_rows = ids.shape[1], read_rows
        self._step: RecordedStep | None = None
        self._last: ReadPrompts | None = None

    def read(self) -> Tensor:
        """Read the prompts and return the logits `[B, V]` of their first tokens."""
        prompts, which = self._read(self._ids, self._mask, self._cache, self._read_rows)
        self._read_rows = ()  # its memory is needed for what follows
        prompts.cache.reorder_cache(which)
        self._cache = prompts.cache
        if self._recorded:  # a mask of fixed shape; what is not there yet is masked as the future
            self._mask = pad(self._mask, (0, self._cache.layers[0].max_cache_len - self._columns), value=1)
        return prompts.logits[which]

    def append(self, token: Tensor, then: Callable[[Tensor], Tensor] = unchanged) -> Tensor:
        """Append one token `[B]` to each row, and return what `then` returns of the logits `[B, V]` of the next ones.

        A CUDA graph includes it, so it must always be the same, and must read and write the same tensors in place.
        """
        if self._spare:
            self._make_room(self._cache.layers[0].max_cache_len)
        ids, self._position, self._columns = token[:, None], self._position + 1, self._columns + 1
        if not self._recorded:
            self._mask = pad(self._mask, (0, 1), value=1)
            return then(self._next(ids, self._mask, self._position))
        if self._step is None:
            self._step = RecordedStep(
                lambda *inputs: then(self._next(*inputs)), (ids, self._mask, self._position), self._cache
            )
        return self._step(ids, self._mask, self._position)

    def row(self, row: int, ids: Sequence[int]) -> ReadRow:
        """Return what was read of a row that begins with the tokens `ids`; no row may have been replaced."""
        start = int(self._mask[row].argmax())
        return read_row(self._cache, row, start, [*ids[: self._columns - start]])

    def keep(self, rows: Tensor) -> None:
        """Drop all rows of the batch but these `[K]`."""
        self._step = self._last = None
        self._mask, self._position = self._mask[rows], self._position[rows]
        self._cache.reorder_cache(rows)

    def replace(self, rows: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """Put prompts `[K, S]` in the place of rows `[K]` that have ended; return the logits `[K, V]` after them.

        `can_replace` must hold for the cache, and the prompts, padded on the left, must be as wide as those that were
        read first. If all of them are among the prompts of the last call that read any, nothing is read.
        """
        which = None if self._last is None else self._last.find(ids, mask)
        if self._last is None or which is None:
            self._last = None  # before others are read: there is room for one of them
            width = int(mask.sum(1).max())
            last, which = self._read(ids[:, -width:], mask[:, -width:], new_cache(self._model, "static", width))
            self._last = last._replace(ids=pad(last.ids, fill := (ids.shape[1] - width, 0)), mask=pad(last.mask, fill))
        width = self._last.cache.layers[0].max_cache_len
        columns = slice(self._columns - width, self._columns)
        for mine, theirs in zip(self._cache.layers, self._last.cache.layers, strict=True):
            mine.keys[rows, :, columns], mine.values[rows, :, columns] = theirs.keys[which], theirs.values[which]
        self._mask = self._mask.clone()  # after `read`, it is still the caller's
        self._mask[rows, : columns.start], self._mask[rows, columns] = 0, mask[:, -width:]
        self._position = self._position.index_copy(0, rows, positions(mask)[:, -1:])
        return self._last.logits[which]

    def _make_room(self, size: int) -> None:
        """Move what all rows have read to the left if the cache is full; no row that runs loses a token by it."""
        # What rows that have ended still append is not used, but its position must exist.
        self._position = self._position.clamp_max(size - self._spare - 2)
        if self._columns < size:
            return
        by = self._spare + 1
        for layer in self._cache.layers:
            for kept in (layer.keys, layer.values):
                kept[:, :, :-by] = kept[:, :, by:].clone()
            layer.cumulative_length.sub_(by)
        self._columns -= by
        self._mask = pad(self._mask[:, by:], (0, by if self._recorded else 0), value=1)

    def _read(
        self, ids: Tensor, mask: Tensor, cache: Any, read_rows: Sequence[ReadRow | None] = ()
    ) -> tuple[ReadPrompts, Tensor]:
        """Read prompts `[B, W]` into an empty cache, equal ones once; return them, and which of them each is, `[B]`."""
        among = distinct(ids, mask)
        ids, mask = ids[among.first], mask[among.first]
        start = load(cache, ids, mask, [read_rows[row] for row in among.first.tolist()]) if read_rows else 0
        logits, cache = self._logits(ids[:, start:], mask, positions(mask)[:, start:], cache)
        return ReadPrompts(ids, mask, logits, cache), among.prompt

    def _next(self, ids: Tensor, mask: Tensor, position: Tensor) -> Tensor:
        with layers_for("decoding"):
            logits, self._cache = self._logits(ids, mask, position, self._cache)
        return logits

    def _logits(self, ids: Tensor, mask: Tensor, position: Tensor, cache: Any) -> tuple[Tensor, Any]:
        output = self._trunk(
            input_ids=ids, attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True
        )
        cache = output.get("past_key_values", cache)
        if cache is None:
            raise TypeError("the model returns no key-value cache")
        return head_logits(output.last_hidden_state[:, -1].float(), self._head, 1.0), cache


def new_cache(model: nn.Module, kind: CacheKind, size: int) -> StaticCache | None:
    """Return an empty cache for sequences of `size` tokens, or None if the model creates the cache."""
    return None if kind == "growing" else StaticCache(config=causal(model).config, max_cache_len=size)


def keeps_tokens_only(cache: object) -> bool:
    """Return whether all that a cache keeps are keys and values of all tokens, and their number in a tensor.

    A CUDA graph can then be recorded, which repeats nothing that Python does.
    """
    return isinstance(cache, StaticCache) and all(
        type(layer) is StaticLayer and isinstance(getattr(layer, "cumulative_length", None), Tensor)
        for layer in cache.layers
    )


def can_replace(model: nn.Module, cache: object) -> bool:
    """Return whether other prompts can replace rows of this cache."""
    rope: dict[str, Any] = getattr(causal(model).config.get_text_config(), "rope_parameters", None) or {}
    kinds = {rope.get("rope_type"), *(each.get("rope_type") for each in rope.values() if isinstance(each, dict))}
    return keeps_tokens_only(cache) and kinds.isdisjoint(_WHOLE_BATCH)
