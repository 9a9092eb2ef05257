"""How responses end: end tokens, the length limit, and which of both ended each response."""

from collections import Counter

import numpy as np

from cavesson.doctor.derivation import DerivedValues, derivation
from cavesson.doctor.recorded import RecordedData
from cavesson.doctor.rows import Rows
from cavesson.doctor.sample import Sample
from cavesson.doctor.series import Array

MIN_RESPONSES = 5
"""Responses that must end in a token before it counts as an end token."""
INSIDE = 0.01
"""Largest share of the responses with an end token that also have it before their end."""
EXPLAINED = 0.95
"""Smallest share of the shorter responses whose end must be understood."""
PILE = 3.0
"""Times the mean of the lengths just below it by which the longest length must be more frequent to be a limit."""
NAMES = frozenset({
    "</s>", "<eos>", "[eos]", "<end>", "<|end|>", "<|eos|>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>",
    "<|eot_id|>", "<|eom_id|>", "<|end_of_turn|>", "<end_of_turn>", "<turn|>", "<|endofturn|>", "<|return|>",
    "<|end_of_sentence|>", "<｜end▁of▁sentence｜>", "<|end_of_turn_token|>",
})  # fmt: skip
"""Texts of the end tokens of well-known models, in lower case."""
SIGNS = 5
"""Different last signs that most finished responses share."""


@derivation(gives=["tokens.token_id"], needs=["tokens.token"], how="tokens with the same text are the same token")
def same_texts(data: RecordedData) -> DerivedValues:
    return {"tokens.token_id": _numbered}


def _numbered(sample: Sample) -> Array:
    """Return [N] a number for each different text of a token, NaN for tokens without a text."""
    codes = sample.column("token").combine_chunks().dictionary_encode().indices
    return np.asarray(codes.to_numpy(zero_copy_only=False), np.float64)


@derivation(
    gives=["info.eos_token_ids"],
    needs=["tokens.token_id"],
    how="the tokens with the name of an end token; else those that responses shorter than the longest end in, and that "
    "nothing but padding follows",
)
def end_tokens(data: RecordedData) -> DerivedValues:
    sample = data.sample
    named = named_ends(data)
    if len(named):
        return {"info.eos_token_ids": named.astype(int).tolist()}
    last, shorter = _last_token(sample), _shorter(sample)
    padding = padding_of(sample)
    found = []
    for token in np.unique(last[shorter & np.isfinite(last)]):
        ends = last == token
        several = ends.sum() >= MIN_RESPONSES and len(np.unique(sample.length[ends])) > 1
        if several and _inside(sample, token, padding) <= INSIDE * ends.sum():
            found.append(int(token))
    if shorter.sum() < MIN_RESPONSES or np.mean(np.isin(last[shorter], found)) < EXPLAINED:
        return None
    return {"info.eos_token_ids": found}


def named_ends(data: RecordedData) -> Array:
    """Return the tokens with the name of an end token, by their texts or the vocabulary; none if neither is known."""
    sample = data.sample
    if not sample.recorded("token"):
        ids = np.unique(sample["token_id"][np.isfinite(sample["token_id"])])
        return ids[[name.lower() in NAMES for name in data.run.token_strings(ids.astype(int).tolist())]]
    texts = sample.column("token").combine_chunks().dictionary_encode()
    ends = [number for number, text in enumerate(texts.dictionary.to_pylist()) if text and text.lower() in NAMES]
    return np.unique(sample["token_id"][np.isin(texts.indices.to_numpy(zero_copy_only=False), ends)])


def _last_token(sample: Sample) -> Array:
    """Return [n] the last trained token of each rollout, NaN for empty ones."""
    last = np.full(len(sample.rows), np.nan)
    last[sample.line[sample.last]] = sample["token_id"][sample.last]
    return last


def _shorter(sample: Sample) -> Array:
    """Return [n] whether each response has tokens, and fewer than the longest one."""
    return np.asarray((sample.length > 0) & (sample.length < sample.length.max(initial=0)))


def padding_of(sample: Sample) -> Array:
    """Return the tokens that fill up responses: they stand there several times in a row, and nothing follows them."""
    last = _last_token(sample)
    inner = np.flatnonzero(sample.trained & ~sample.last)
    before = np.full(len(sample.rows), np.nan)
    before[sample.line[inner]] = sample["token_id"][inner]  # of several values for one index, the last one counts
    tokens, count = np.unique(last[before == last], return_counts=True)
    ends = [np.sum(last == token) for token in tokens]
    nothing = np.zeros(0)
    return np.array(
        [
            token
            for token, several, all_of in zip(tokens, count, ends, strict=True)
            if several >= MIN_RESPONSES and _inside(sample, token, nothing) <= INSIDE * all_of
        ]
    )


def _inside(sample: Sample, token: float, padding: Array) -> int:
    """Return the number of responses in which another trained token than padding follows the token."""
    trained = np.flatnonzero(sample.trained)
    ids, line = sample["token_id"][trained], sample.line[trained]
    others = np.flatnonzero((ids != token) & ~np.isin(ids, padding))
    last_other = np.full(len(sample.rows), -1)
    last_other[line[others]] = others  # of several values for one index, the last one counts
    mine = np.flatnonzero(ids == token)
    return len(np.unique(line[mine[mine < last_other[line[mine]]]]))


@derivation(
    gives=["info.config.sampling.max_new_tokens"],
    needs=["rows.length", "info.eos_token_ids|rows.response", "tokens.token_id|rows.response"],
    how="the longest length, at which many responses stop without an end",
)
def length_limit(data: RecordedData) -> DerivedValues:
    limit = int(np.nanmax(data.rows["length"]))
    length = data.sample.rows["length"]
    longest, shorter = length == limit, length < limit
    if limit < 1 or longest.sum() < MIN_RESPONSES:
        return None
    if data.has("info.eos_token_ids") and data.has("tokens.token_id"):
        ended = np.isin(_last_token(data.sample)[longest], data.setting("eos_token_ids"))
        is_limit = bool(np.mean(ended) < 0.5)
    else:
        is_limit = _piled(data.rows["length"]) and _stop_elsewhere(data.sample.rows, longest, shorter)
    return {"info.config.sampling.max_new_tokens": limit} if is_limit else None


def _piled(length: Array) -> bool:
    """Return whether clearly more responses have the longest length than the lengths just below it."""
    counts = np.bincount(length[np.isfinite(length)].astype(int))
    below = counts[max(1, len(counts) - 6) : -1]
    return bool(counts[-1] >= MIN_RESPONSES and len(below) and counts[-1] > PILE * below.mean())


def _stop_elsewhere(rows: Rows, longest: Array, shorter: Array) -> bool:
    """Return whether shorter responses end in few different signs, as sentences do, and the longest ones do not."""
    if shorter.sum() < MIN_RESPONSES:
        return False
    ends = np.array([(text or "").rstrip()[-1:] for text in rows.texts("response")])
    usual = [sign for sign, _ in Counter(ends[shorter].tolist()).most_common(SIGNS)]
    of_shorter, of_longest = (float(np.mean(np.isin(ends[part], usual))) for part in (shorter, longest))
    return of_shorter > 0.8 and of_longest < 0.5


@derivation(
    gives=["rows.finish_reason"],
    needs=[
        "rows.length",
        "info.eos_token_ids|info.config.sampling.max_new_tokens",
        "tokens.token_id|info.config.sampling.max_new_tokens",
    ],
    how="responses of the greatest length count as cut; the others have ended",
)
def finish_reasons(data: RecordedData) -> DerivedValues:
    limit = data.setting("config.sampling.max_new_tokens")
    if data.has("info.eos_token_ids") and data.has("tokens.token_id"):
        rows = data.sample.rows
        inside = (data.sample.length > 0) & ~(rows["length"] >= (np.inf if limit is None else limit))
        ended = np.isin(_last_token(data.sample)[inside], data.setting("eos_token_ids"))
        if not len(ended) or np.mean(ended) < EXPLAINED:
            return None
    elif limit is None:
        return None

    def reasons(rows: Rows) -> Array:
        cut = rows["length"] >= (np.inf if limit is None else limit)
        found = np.where(cut, "length", "eos").astype(object)
        found[~np.isfinite(rows["length"])] = None
        return found

    return {"rows.finish_reason": reasons}
