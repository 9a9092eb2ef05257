"""Partial credit: what answers earn that are plainly not right, but made of the right one."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from cavesson.check.answers import Answer
from cavesson.check.attacks import Material

_INTEGER = re.compile(r"-?\d+")
_NUMBER = re.compile(r"(-?)(\d+\.\d+)")
_LONGEST = 30
"""Characters of right answers that are changed: a part of a longer text may deserve a part of the reward."""
_SHORTEST = 4
"""Letters of a word of which half is not an answer: "y" may stand for "yes"."""
_OTHERS = 6
"""Answers among which the right one is hidden."""


class Close(NamedTuple):
    """Answers to some of the tasks, which are not right."""

    rows: list[int]
    answers: list[Answer]


def close(of: Material) -> Iterator[Close]:
    """Yield right answers with a digit more, half of them, and among others, as plain text and in the best form."""
    changes: tuple[Callable[[Sequence[str], int], str | None], ...] = (_longer, _half, _among)
    for change in changes:
        changed = {row: change(of.right, row) for row in range(len(of.right))}
        contents = {row: one for row, one in changed.items() if one is not None}
        for write in (Answer, of.best.write):
            written = {row: write(one) for row, one in contents.items()}
            answers = {row: one for row, one in written.items() if one is not None}
            yield Close([*answers], [*answers.values()])


def _longer(right: Sequence[str], row: int) -> str | None:
    """Return a number with one digit more, which is about ten times as large or far more."""
    if _INTEGER.fullmatch(right[row]):
        return f"{right[row]}7"
    decimal = _NUMBER.fullmatch(right[row])
    return f"{decimal[1]}97{decimal[2]}" if decimal else None


def _half(right: Sequence[str], row: int) -> str | None:
    one = right[row]
    is_integer = _INTEGER.fullmatch(one) is not None
    if (not is_integer and not one.isalpha()) or not (2 if is_integer else _SHORTEST) <= len(one) <= _LONGEST:
        return None
    half = one[: (len(one) + 1) // 2]
    return None if half == "-" or (is_integer and int(half) == int(one)) else half


def _among(right: Sequence[str], row: int) -> str | None:
    """Return the right answer between those of other rows; none if they are long."""
    others = [one for one in dict.fromkeys([*right[row:], *right[:row]]) if one != right[row]][:_OTHERS]
    if len(others) < 2 or max(map(len, (*others, right[row]))) > _LONGEST:
        return None
    middle = len(others) // 2
    return ", ".join([*others[:middle], right[row], *others[middle:]])
