"""A calculator as an environment, and the reward of its users."""

from collections.abc import Sequence
from typing import Any


class Calculator:
    """Its public methods are the tools."""

    def reset(self, **row: Any) -> None:
        """Begin an episode: there is nothing to prepare."""

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first number
            b: the second number
        """
        return a + b

    def sub(self, a: int, b: int) -> int:
        """Subtract a number from another one.

        Args:
            a: the number to subtract from
            b: the number to subtract
        """
        return a - b

    def mul(self, a: int, b: int) -> int:
        """Multiply two numbers.

        Args:
            a: the first number
            b: the second number
        """
        return a * b


def right(prompts: Sequence[str], responses: Sequence[str], answer: Sequence[int], **_: Any) -> list[float]:
    """1 where the last answer is the right number, and nothing else."""
    return [float(response.strip() == str(number)) for response, number in zip(responses, answer, strict=True)]
