"""How positive a text sounds: the compound score of the VADER lexicon, from −1 to 1 (Hutto & Gilbert, ICWSM 2014)."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer


def sentiment(prompts: Sequence[str], responses: Sequence[str], **_: Any) -> list[float]:
    """Return the sentiment of each response, without its prompt; an empty response is neutral."""
    return [float(_analyzer().polarity_scores(response)["compound"]) for response in responses]


@cache
def _analyzer() -> SentimentIntensityAnalyzer:
    return SentimentIntensityAnalyzer()
