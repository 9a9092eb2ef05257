"""Statistics of the diversity, repetition and length of responses; docs/text-statistics.md explains every number.

A response is a sequence of tokens: its token ids if available, which suits every language, or else its `words`. None
means that there is nothing to measure.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from functools import cache
from itertools import chain, groupby
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from cavesson.sorted_arrays import Array
from cavesson.text.ngrams import NGrams
from cavesson.text.words import words

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU

Response = Sequence[str] | Sequence[int]

# Self-BLEU costs responses² · tokens. With these limits it takes at most about 25 ms per step.
SELF_BLEU_RESPONSES = 10
SELF_BLEU_TOKENS = 128


def response_statistics(texts: Sequence[Any], ids: Sequence[Sequence[int]] | None = None) -> dict[str, float]:
    """Compute all statistics of one step's responses by metric name; those that cannot be measured are omitted.

    Without the token ids of the responses, words are counted; with them, `texts` may be values that are equal for equal
    texts, and false for empty ones.
    """
    responses: Sequence[Response] = ids if ids is not None else words(texts)
    lengths = [len(response) for response in responses]
    measured = {
        "text/distinct_1": distinct(responses, 1),
        "text/distinct_2": distinct(responses, 2),
        "text/self_bleu": self_bleu(responses),
        "text/repetition": repetition(responses),
        "text/longest_run": longest_run(responses),
        "text/identical": identical(texts),
        "text/unigram_entropy": unigram_entropy(responses),
        "text/empty": fmean(not text for text in texts) if texts else None,
        "length/response_min": min(lengths, default=None),
        "length/response_median": median(lengths) if lengths else None,
        "length/response_max": max(lengths, default=None),
    }
    return {name: float(value) for name, value in measured.items() if value is not None}


def distinct(responses: Sequence[Response], n: Literal[1, 2]) -> float | None:
    """Compute distinct-n (arXiv:1510.03055): the distinct n-grams of all responses, divided by all their n-grams."""
    tokens, owner = flat(responses)
    grams = NGrams(tokens, owner, np.zeros_like(owner))
    (share,) = (grams.doubled() if n == 2 else grams).distinct(1)
    return None if np.isnan(share) else float(share)


def self_bleu(responses: Sequence[Response]) -> float | None:
    """Compute Self-BLEU (arXiv:1802.01886), 0 to 1: the mean BLEU-4 of each response against the others.

    1 means that all are the same. Smoothed as in Texygen (a count of 0 becomes 0.1); a response under four tokens is
    scored by the n-grams it has. At most `SELF_BLEU_RESPONSES` evenly spaced responses are used, and the first
    `SELF_BLEU_TOKENS` tokens of each. More references give a higher score, so only equal numbers of responses are
    comparable.
    """
    some = [response for response in responses if response]
    if len(some) < 2:
        return None
    count = min(len(some), SELF_BLEU_RESPONSES)
    taken = [some[i * len(some) // count][:SELF_BLEU_TOKENS] for i in range(count)]
    # The library splits at spaces, so tokens are replaced by numbers, which contain none.
    numbers = {token: str(i) for i, token in enumerate(dict.fromkeys(chain.from_iterable(taken)))}
    lines = [" ".join(numbers[token] for token in response) for response in taken]
    scores = [_bleu().sentence_score(line, lines[:i] + lines[i + 1 :]).score for i, line in enumerate(lines)]
    return float(fmean(scores)) / 100


def repetition(responses: Sequence[Response]) -> float | None:
    """Compute seq-rep-4 (arXiv:1908.04319): the mean share of a response's 4-grams that repeat an earlier one.

    Responses of fewer than four tokens do not count.
    """
    tokens, owner = flat(responses)
    shares = NGrams(tokens, owner, owner).doubled().doubled().distinct(len(responses))
    known = shares[~np.isnan(shares)]
    return 1 - float(known.mean()) if len(known) else None


def longest_run(responses: Sequence[Response]) -> float | None:
    """Compute the longest run of the same token in a response; mean over the responses that are not empty."""
    runs = [max(len(list(run)) for _, run in groupby(response)) for response in responses if response]
    return fmean(runs) if runs else None


def identical(texts: Sequence[Hashable]) -> float | None:
    """Compute the share of responses that equal another response; None for fewer than two."""
    counts = Counter(texts)
    return fmean(counts[text] > 1 for text in texts) if len(texts) > 1 else None


def unigram_entropy(responses: Sequence[Response]) -> float | None:
    """Compute −Σ p·log p over the frequencies of tokens in all responses together, in nats."""
    counts = Counter(chain.from_iterable(responses))
    total = counts.total()
    return math.fsum(c / total * math.log(total / c) for c in counts.values()) if total else None


def flat(responses: Sequence[Response]) -> tuple[Array, Array]:
    """Return a number for each token, equal for equal tokens, and which response it is in, both [N]."""
    tokens = pa.array(chain.from_iterable(responses)).dictionary_encode().indices
    return tokens.to_numpy().astype(np.int64), np.repeat(np.arange(len(responses)), list(map(len, responses)))


@cache
def _bleu() -> "BLEU":
    from sacrebleu.metrics.bleu import BLEU  # imported on demand, because it takes a fifth of a second

    return BLEU(tokenize="none", smooth_method="floor", smooth_value=0.1, effective_order=True, force=True)
