"""Whether a response ends in the right answer: a verifiable reward for GSM8K and similar tasks."""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from cavesson.errors import UserError
from cavesson.text.final_answer import NUMBER, WORDS, final_answer, last_number, plain

_SIGNS = r"\s$€£¥%.°"
_LARGEST_EXPONENT = 100


def exact_match(
    prompts: Sequence[str], responses: Sequence[str], ground_truth: Sequence[Any] | None = None, **_: Any
) -> list[float]:
    r"""Return 1 for each response with the same final answer as `ground_truth`, and 0 for all others.

    The final answer of a text is the content of its last `\boxed{…}`, else the rest of the line after its last `####`
    (as in GSM8K, arXiv:2110.14168), else the whole text. A box that is never closed has no answer.

    If the ground truth is a number, it is compared with a number of the response: the only one in its box (after the
    last equals sign), or without a box, the last one. 1,200 = 1{,}200 = 1200.0 = 1.2e3 = `1.2 \times 10^3`,
    1/2 = 0.5 = `\frac{1}{2}` and 1 1/2 = `1\frac{1}{2}` = 1.5. Currency and percent signs (25% = 25), degrees, words
    and a final full stop next to a number are ignored. `\boxed{2x}`, `\boxed{\sqrt{2}}` and `\boxed{10-8}` do not equal
    2: nothing is calculated.

    Other answers are compared as texts, ignoring case, Markdown's asterisks, a final full stop, dollar signs and white
    space, except white space between two words or numbers. `\text{…}` is replaced by its content, `\dfrac` is the same
    as `\frac`, and `\frac{x+1}{2}` is the same as `(x+1)/2`.

    Raises:
        UserError: there is no column `ground_truth`, or one of its rows is empty or has an unclosed box.
    """
    truths = right_answers(prompts, ground_truth)
    return [float(matches(response, truth)) for response, truth in zip(responses, truths, strict=True)]


def right_answers(prompts: Sequence[str], ground_truth: Sequence[Any] | None) -> list[str]:
    """Return the right answers to some prompts as texts.

    Raises:
        UserError: there are none, or one of them is empty or has an unclosed box.
    """
    if ground_truth is None:
        raise UserError("the reward exact_match needs a column ground_truth with the right answer of every prompt")
    for prompt, truth in zip(prompts, ground_truth, strict=True):
        if truth is None or not str(truth).strip():
            raise UserError(f"the reward exact_match: ground_truth is empty for prompt {prompt!r}")
        if final_answer(str(truth)) is None:
            raise UserError(f"the reward exact_match: ground_truth has a box that is not closed for prompt {prompt!r}")
    return [str(truth) for truth in ground_truth]


def matches(response: str, truth: str) -> bool:
    """Return whether both texts have the same final answer."""
    answer, expected = final_answer(response), final_answer(truth)
    if answer is None or expected is None:
        return False
    number = _as_number(expected.text)
    if number is None:
        known = _normalised(expected.text)
        return bool(known) and _normalised(answer.text) == known
    return (_boxed_number(answer.text) if answer.how == "boxed" else _last_number(answer.text)) == number


def _as_number(text: str) -> Fraction | None:
    """Return the number that a text consists of, or None if it is not a number.

    Units in LaTeX's text commands may stand next to the number.
    """
    for cleaned in (plain(WORDS.sub("", text)), plain(text)):
        found = NUMBER.findall(cleaned)
        if len(found) == 1 and not re.search(f"[^{_SIGNS}]", NUMBER.sub("", cleaned)):
            return _value(found[0])
    return None


def _boxed_number(text: str) -> Fraction | None:
    """Return the number in a box, or None if the box does not hold exactly one number or holds an expression.

    A letter directly before a number, or a single letter directly after it, is a factor and makes an expression.
    """
    cleaned = re.split(r"=|≈|\\approx", plain(text))[-1]
    cleaned = re.sub(r"(?<=[a-z])/(?=[a-z])", "", cleaned)  # a unit such as km/h
    found = NUMBER.findall(cleaned)
    if len(found) != 1 or re.search(r"[A-Za-z]\d|\d[A-Za-z](?![A-Za-z])", NUMBER.sub("0", cleaned)):
        return None
    is_expression = re.search(rf"[^{_SIGNS},;:'\"\w]|_", NUMBER.sub("", cleaned))
    return None if is_expression else _value(found[0])


def _last_number(text: str) -> Fraction | None:
    found = last_number(text)
    return None if found is None else _value(found)


def _value(number: str) -> Fraction | None:
    if len(number) > 100:  # models may repeat a digit endlessly, and Python refuses to parse such numbers
        return None
    *whole, fraction = number.lower().replace(",", "").split()
    above, _, below = fraction.partition("/")
    exponent = above.partition("e")[2]
    if (below and not int(below)) or abs(int(exponent or 0)) > _LARGEST_EXPONENT:
        return None
    value = Fraction(above) / int(below or 1)
    if not whole:
        return value
    return Fraction(whole[0]) + (-value if whole[0].startswith("-") else value)


def _normalised(text: str) -> str:
    text = plain(text).replace("$", "").casefold()
    text = re.sub(r"\s*([^\w\s])\s*", r"\1", " ".join(text.split()))
    return text.rstrip(".").strip()
