"""How long a response is, and whether a limit cut it, where only its text was recorded."""

import re
import unicodedata
from collections.abc import Iterable

import numpy as np

from cavesson.doctor.derivation import DerivedValues, derivation, of_sample
from cavesson.doctor.recorded import RecordedData
from cavesson.doctor.series import Array

MIN_RESPONSES = 20
"""Responses from which a length is a pile, and the signs that responses end in are known."""
ENDED, CUT = 0.9, 0.5
"""Smallest share of the responses that end in a sign if no limit cuts them, and largest share if one does."""
LAST_MARK = re.compile(r"(<[^<>\s]{1,40}>|\[[A-Z]{2,10}\])\s*$")
"""What looks like the text of a special token, such as ``<|endoftext|>`` or ``[PAD]``, at the end of a text."""


@derivation(
    gives=["rows.characters"],
    needs=["rows.prompt", "rows.response"],
    how="the length of the response's text, without padding",
)
def characters(data: RecordedData) -> DerivedValues:
    rows = data.sample.rows
    if not any(rows.texts("prompt")):
        return None  # the texts may begin with their prompts
    texts = rows.texts("response")
    padding = padding_marks(texts)
    length = [np.nan if text is None else text_length(text, padding) for text in texts]
    return {"rows.characters": of_sample(rows, np.array(length, np.float64))}


def padding_marks(texts: Iterable[str | None]) -> tuple[str, ...]:
    """Return the special tokens that stand at the end of a text several times in a row, as padding does."""
    last = {found[1]: found for found in map(LAST_MARK.search, filter(None, texts)) if found and _repeats(found)}
    return tuple(last)


def _repeats(found: re.Match[str]) -> bool:
    return found.string[: found.start()].rstrip().endswith(found[1])


def text_length(text: str, padding: tuple[str, ...]) -> int:
    """Return the number of characters before the padding."""
    end = len(text)
    while padding:
        kept = len(text[:end].rstrip())
        mark = next((mark for mark in padding if text.endswith(mark, 0, kept)), None)
        if mark is None:
            break
        end = kept - len(mark)
    return end


@derivation(
    gives=["rows.cut_text"],
    needs=["rows.characters", "rows.response"],
    how="many texts have the greatest length in characters and stop there without a closing sign, unlike shorter ones; "
    "texts that the log itself has shortened look the same",
)
def cut_texts(data: RecordedData) -> DerivedValues:
    if data.has("rows.length"):
        return None  # limits are on tokens, and these were counted
    rows = data.sample.rows
    length, texts = rows["characters"], np.array(rows.texts("response"), object)
    limit = np.nanmax(length, initial=0)
    longest, shorter = length == limit, length < limit
    signed = np.array([_is_signed(text or "") for text in texts], bool)
    if len(set(texts[longest])) < MIN_RESPONSES or shorter.sum() < MIN_RESPONSES:
        return None  # a few texts of a fixed form can have the same length
    if not _is_limit(length, limit) or signed[shorter].mean() < ENDED or signed[longest].mean() > CUT:
        return None
    if len(unsigned := length[shorter & ~signed]) and np.bincount(unsigned.astype(int)).max() >= MIN_RESPONSES:
        return None  # other responses seem to stop at another limit
    return {"rows.cut_text": of_sample(rows, np.where(np.isfinite(length), longest, np.nan))}


def _is_limit(length: Array, limit: float) -> bool:
    """Return whether more responses have the greatest length than all of the five lengths just below it."""
    return bool(np.sum(length == limit) > np.sum((length < limit) & (length >= limit - 5)))


def _is_signed(text: str) -> bool:
    """Return whether a text ends in punctuation or a symbol."""
    return unicodedata.category(text.rstrip()[-1:] or "a")[0] in "PS"
