"""The share of lower-case letters: a reward that even a tiny random model learns to increase in seconds."""

from collections.abc import Sequence
from typing import Any


def lowercase(prompts: Sequence[str], responses: Sequence[str], **_: Any) -> list[float]:
    """Return the share of characters that are lower-case ASCII letters, from 0 to 1; an empty response scores 0."""
    return [sum("a" <= c <= "z" for c in response) / max(1, len(response)) for response in responses]
