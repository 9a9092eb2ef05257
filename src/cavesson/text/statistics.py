"""How diverse, how repetitive and how long responses are; docs/text-statistics.md explains every number.

A response is a sequence of tokens: token ids where there are some, which suits every language, or its `words`. None
means that there is nothing to measure.
"""

import math
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from functools import cache
from itertools import chain, groupby
from statistics import fmean, median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU

Response = Sequence[Hashable]

STRAY = ("#", ":)", ";)")
"""What models have been seen to sprinkle over their responses once a reward model liked it."""

# Self-BLEU costs responses² · tokens. With these limits a step pays some 25 ms at most, however many responses it has.
SELF_BLEU_RESPONSES = 10
SELF_BLEU_TOKENS = 128

# Chinese and Japanese put no spaces between words, so every character of theirs counts as one.
_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+|[^\w\s]")


def response_statistics(texts: Sequence[str], ids: Sequence[Sequence[int]] | None = None) -> dict[str, float]:
    """All statistics of one step's responses by their metric names; what cannot be measured is missing.

    Args:
        texts: the responses, `[B]`.
        ids: their token ids, without padding; None counts words instead.
    """
    responses: Sequence[Response] = ids if ids is not None else [words(text) for text in texts]
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


def words(text: str) -> list[str]:
    """Words and punctuation marks; a Chinese or Japanese character is a word of its own."""
    return _WORD.findall(text)


def distinct(responses: Sequence[Response], n: int) -> float | None:
    """Distinct-n (arXiv:1510.03055): different n-grams of all responses together, divided by all their n-grams."""
    seen = [gram for response in responses for gram in _ngrams(response, n)]
    return len(set(seen)) / len(seen) if seen else None


def self_bleu(responses: Sequence[Response]) -> float | None:
    """Self-BLEU (arXiv:1802.01886), 0 to 1: the mean BLEU-4 of each response with the others as its references.

    1 = all the same. Smoothed as in Texygen (a count of 0 becomes 0.1); a response under four tokens is scored by the
    n-grams it has. Of many responses `SELF_BLEU_RESPONSES` are taken at even distances, and of each the first
    `SELF_BLEU_TOKENS`: more references mean a higher score, so only equal numbers of responses can be compared.
    """
    some = [response for response in responses if response]
    if len(some) < 2:
        return None
    count = min(len(some), SELF_BLEU_RESPONSES)
    taken = [some[i * len(some) // count][:SELF_BLEU_TOKENS] for i in range(count)]
    # The library splits at blanks; numbers in place of tokens have none.
    numbers = {token: str(i) for i, token in enumerate(dict.fromkeys(chain.from_iterable(taken)))}
    lines = [" ".join(numbers[token] for token in response) for response in taken]
    scores = [_bleu().sentence_score(line, lines[:i] + lines[i + 1 :]).score for i, line in enumerate(lines)]
    return float(fmean(scores)) / 100


def repetition(responses: Sequence[Response], n: int = 4) -> float | None:
    """seq-rep-n (arXiv:1908.04319): the share of a response's n-grams that it has had before; mean over the responses.

    Responses of fewer than n tokens do not count.
    """
    shares = [1 - len(set(grams)) / len(grams) for grams in (_ngrams(r, n) for r in responses) if grams]
    return fmean(shares) if shares else None


def longest_run(responses: Sequence[Response]) -> float | None:
    """How many times a token stands in a row at most; mean over the responses that are not empty."""
    runs = [max(len(list(run)) for _, run in groupby(response)) for response in responses if response]
    return fmean(runs) if runs else None


def identical(texts: Sequence[str]) -> float | None:
    """The share of responses that another response repeats word for word; None for fewer than two."""
    counts = Counter(texts)
    return fmean(counts[text] > 1 for text in texts) if len(texts) > 1 else None


def unigram_entropy(responses: Sequence[Response]) -> float | None:
    """−Σ p·log p over how often each token occurs in all responses together, in nats."""
    counts = Counter(chain.from_iterable(responses))
    total = counts.total()
    return math.fsum(c / total * math.log(total / c) for c in counts.values()) if total else None


def contains(texts: Sequence[str], pattern: str) -> float:
    """The share of texts, of at least one, in which this very piece of text occurs, such as those of `STRAY`."""
    return fmean(pattern in text for text in texts)


def _ngrams(response: Response, n: int) -> list[tuple[Hashable, ...]]:
    return list(zip(*(response[i:] for i in range(n)), strict=False))


@cache
def _bleu() -> "BLEU":
    from sacrebleu.metrics.bleu import BLEU  # takes a fifth of a second, which `cavesson show` need not pay

    return BLEU(tokenize="none", smooth_method="floor", smooth_value=0.1, effective_order=True, force=True)
