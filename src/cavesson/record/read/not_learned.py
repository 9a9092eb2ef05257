"""Tell padding from other tokens that were not learned, such as what a tool wrote."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from cavesson.record.precision import Array
from cavesson.record.read.reader import Run

_PAD = re.compile(r"[<\[][^\w<>\[\]]*(\w+_)?pad(ding)?(_\w+)?[^\w<>\[\]]*[>\]]", re.IGNORECASE)
"""The name of a padding token, such as ``<PAD>``, ``[PAD]``, ``<|finetune_right_pad_id|>``, ``<｜▁pad▁｜>``."""
_SPECIAL = re.compile(r"<[^<>\s\d][^<>\s]*>")
"""The name of another special token; not an id without a text, such as ``<17>``."""


def learned(tokens: pa.Table) -> Array:
    """Return [T] whether training learned from each token; all were where the record does not say."""
    return np.asarray(tokens["learned"].fill_null(True).to_numpy(), np.bool_)


def padding_at_end(run: Run, tokens: pa.Table) -> int:
    """Return how many tokens at the end of a response are padding.

    These are tokens that were not learned and that have the id of the run's padding token, or the name of one. Where
    the end token pads, they are those that repeat it.
    """
    kept = np.flatnonzero(learned(tokens))
    masked = tokens.num_rows - (int(kept[-1]) + 1 if len(kept) else 0)
    tail = tokens.slice(max(tokens.num_rows - masked - 1, 0)) if masked else tokens.slice(0, 0)
    ids = tail["token_id"].to_pylist()
    known = zip(tail["token"].to_pylist(), run.token_texts(ids), strict=True)
    texts = [text if token is None else token for token, text in known]
    pad = _padding_id(run.info)
    count = 0
    while count < masked and _pads(texts, ids, len(ids) - 1 - count, pad):
        count += 1
    return count


def _pads(texts: Sequence[str], ids: Sequence[int | None], index: int, pad: int | None) -> bool:
    text = texts[index]
    repeats = index > 0 and texts[index - 1] == text and _SPECIAL.fullmatch(text) is not None
    return repeats or _PAD.fullmatch(text) is not None or (pad is not None and ids[index] == pad)


def _padding_id(info: Mapping[str, Any]) -> int | None:
    """Return the id of the token that only pads; None if the end token pads."""
    tokenizer, ends = info.get("tokenizer"), info.get("eos_token_ids")
    pad = tokenizer.get("pad") if isinstance(tokenizer, dict) else None
    return pad if isinstance(pad, int) and not (isinstance(ends, list) and pad in ends) else None
