"""Whether a response ends in the right answer: a reward that can be checked, for GSM8K and tasks like it."""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from dressage.errors import UserError

_NUMBER = re.compile(
    r"""(?<![\w.])-?          # the minus of 10-3 and of x-3 is a subtraction
    (?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?
    |(?<![\w.])-?\.\d+
    |\d+(?:\.\d+)?            # glued to a letter, as in x3 or 5kg""",
    re.VERBOSE,
)
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}")


def exact_match(
    prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[Any] | None = None, **_: Any
) -> list[float]:
    r"""1 where the final answer of a response is that of `ground_truth`, else 0.

    The final answer of a text is what its last `\boxed{…}` holds, else the rest of the line after its last `####` (as
    in GSM8K, arXiv:2110.14168), else the whole text. If the truth is a number, the last number of that counts, and it
    is compared as a number: 1,200 = 1200.0, 1/2 = 0.5, and units and currency signs are nothing. Other answers are
    compared as texts, without regard to case, spaces, Markdown's stars and a final full stop.

    Raises:
        UserError: there is no column `ground_truth`, or a row of it is empty.
    """
    if ground_truth is None:
        raise UserError("the reward exact_match needs a column ground_truth with the right answer of every prompt")
    empty = next((row for row, truth in enumerate(ground_truth) if truth is None or not str(truth).strip()), None)
    if empty is not None:
        raise UserError(f"the reward exact_match: ground_truth is empty for prompt {prompts[empty]!r}")
    return [float(matches(response, str(truth))) for response, truth in zip(responses, ground_truth, strict=True)]


def matches(response: str, truth: str) -> bool:
    """Whether both have the same final answer."""
    expected = _marked(truth) or truth
    number = _as_number(expected)
    marked = _marked(response)
    if number is None:
        return _normalised(response if marked is None else marked) == _normalised(expected)
    return _last_number(response if marked is None else marked) == number


def _marked(text: str) -> str | None:
    """The content of the last box, else what follows the last ####; None if there is neither."""
    start = text.rfind(r"\boxed{")
    if start >= 0:
        inside = text[start + len(r"\boxed{") :]
        depth = 1
        for at, character in enumerate(inside):
            depth += {"{": 1, "}": -1}.get(character, 0)
            if depth == 0:
                return inside[:at]
    _, mark, after = text.rpartition("####")
    return after.strip().split("\n")[0] if mark else None


def _as_number(text: str) -> Fraction | None:
    """The number a text is, or None where it is something else; units, currency and percent signs may stand by it."""
    cleaned = _plain(text)
    found = _NUMBER.findall(cleaned)
    rest = _NUMBER.sub("", cleaned)
    return _value(found[0]) if len(found) == 1 and not re.search(r"[^\s$€£¥%.°]", rest) else None


def _last_number(text: str) -> Fraction | None:
    found = _NUMBER.findall(_plain(text))
    return _value(found[-1]) if found else None


def _value(number: str) -> Fraction | None:
    if len(number) > 100:  # a model that repeats a digit without end; Python refuses to read such numbers
        return None
    above, _, below = number.replace(",", "").partition("/")
    return Fraction(above) / Fraction(below or 1) if Fraction(below or 1) else None


def _plain(text: str) -> str:
    """Without what LaTeX and typography add to a number."""
    text = _FRACTION.sub(r"\1/\2", text).replace("−", "-")
    return re.sub(r"\\[!,;: ]|\\text\{[^{}]*\}|\\(?=[$%])|[*_]", "", text)


def _normalised(text: str) -> str:
    return " ".join(_plain(text).replace("$", "").casefold().split()).rstrip(".").strip()
