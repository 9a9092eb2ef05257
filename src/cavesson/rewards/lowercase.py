"""The share of lower-case letters: a reward that even a tiny random model can climb in seconds."""

from collections.abc import Sequence
from typing import Any


def lowercase(prompts: Sequence[str], responses: Sequence[str], **_: Any) -> list[float]:
    """Lower-case ASCII letters per character, 0 to 1; an empty response scores 0."""
    return [sum("a" <= c <= "z" for c in response) / max(1, len(response)) for response in responses]
