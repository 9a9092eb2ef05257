"""Cutting and discarding responses."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Self

from pydantic import model_validator

from cavesson.config import ONE_OR_SEVERAL, Settings

CUTS: dict[str, tuple[str, ...]] = {
    "next_turn": ("###Human", "###Assistant", "\n\nHuman:", "\n\nAssistant:", "<|im_start|>", "<|user|>"),
    "next_line": ("\n",),
    "next_paragraph": ("\n\n",),
}
"""Texts before which a response is cut: where the model goes on to speak for somebody else, or too long."""

TOO_SHORT = "too_short"
"""The one rule of `cleaning.discard` that has a name; all others are regular expressions."""

_NAME = re.compile("[a-z]+(_[a-z]+)+")
"""What is the name of a rule, and not a text that responses contain."""

DISCARD_PART = "discard/"
"""Prefix of the reward parts that say which rule discarded a response."""


class CleaningSettings(Settings):
    """Where responses are cut, and which are discarded."""

    cut: Annotated[tuple[str, ...], ONE_OR_SEVERAL] = ()
    """cut responses, both text and tokens, before the first of these: "next_turn" (a mark of the human's or assistant's
    next turn), "next_line", "next_paragraph"; for other texts, set sampling.stop"""
    discard: Annotated[tuple[str, ...], ONE_OR_SEVERAL] = ()
    """responses that get discard_reward instead of their reward: regular expressions that are searched in the text,
    such as "#" or "[:;]\\)", and "too_short" (fewer than two characters)"""
    discard_reward: float | None = None
    """the reward of a discarded response; it should be below all other rewards"""

    @property
    def stop(self) -> tuple[str, ...]:
        """The stop texts of `cut`, at which the sampler ends responses."""
        return tuple(text for name in self.cut for text in CUTS[name])

    @model_validator(mode="after")
    def _check(self) -> Self:
        unknown = next((name for name in self.cut if name not in CUTS), None)
        if unknown is not None:
            raise ValueError(f"cut: there is no {unknown!r}; use {', '.join(CUTS)}")
        for pattern in self.discard:
            _check_pattern(pattern)
        if self.discard and self.discard_reward is None:
            raise ValueError("discard needs discard_reward: a value below all other rewards, such as -10")
        if not self.discard:
            self.refuse("discard_reward", "without discard, which selects the responses that get it")
        return self


def discard(
    settings: CleaningSettings, responses: Sequence[str], rewards: Sequence[float | None]
) -> tuple[list[float | None], dict[str, list[float]]]:
    """Replace the rewards of discarded responses by `discard_reward`.

    Returns:
        The rewards `[B]`, and for each rule of the settings a part of the reward that is 1 for responses discarded by
        the rule and 0 for all others. With these parts, the record shows which rule discarded a response, and the
        other parts show what it would have scored.
    """
    parts = {DISCARD_PART + rule: [float(_discards(rule, text)) for text in responses] for rule in settings.discard}
    kept = list(rewards)
    for row, found in enumerate(zip(*parts.values(), strict=True)):
        if any(found) and settings.discard_reward is not None:
            kept[row] = settings.discard_reward
    return kept, parts


def is_discarded(parts: Mapping[str, float]) -> bool:
    """Return whether a rule discarded the response with these reward parts."""
    return any(value for name, value in parts.items() if name.startswith(DISCARD_PART))


def _discards(rule: str, text: str) -> bool:
    return len(text.strip()) < 2 if rule == TOO_SHORT else re.search(rule, text) is not None


def _check_pattern(pattern: str) -> None:
    if pattern != TOO_SHORT and _NAME.fullmatch(pattern):
        raise ValueError(f"discard: there is no {pattern!r}; use {TOO_SHORT} or a regular expression such as '#'")
    if not pattern:
        raise ValueError("discard: an empty text matches every response")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"discard: {pattern!r} is not a regular expression: {error}") from None
