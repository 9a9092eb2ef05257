"""The final answer of a response, wherever it is looked for: what is boxed, what follows ####, or the last number."""

import re
from typing import Literal, NamedTuple

NUMBER = re.compile(
    r"""(?<![\w.])[+-]?       # the minus of 10-3 and of x-3 is a subtraction
    (?:\d+\s+\d+/\d+          # 1 1/2
    |(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+|[eE][+-]?\d+)?
    |\.\d+(?:[eE][+-]?\d+)?)
    |\d+(?:\.\d+)?            # glued to a letter, as in x3 or 5kg""",
    re.VERBOSE,
)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is a character of the answer
WORDS = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it|sf)|mbox|operatorname)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}")
_EMPHASIS = re.compile(r"(?<![\w)}])[*_]+(?=\S)|(?<=\S)[*_]+(?![\w({])")
_SPELLINGS = (
    (r"[−–]", "-"),
    (r"(?<=\d)[\u00a0\u2009\u202f](?=\d{3})", ""),
    (r"\\[dtc]frac", r"\\frac"),
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    (r"\{,\}", ","),
    (r"\\(?:left|right)(?![a-zA-Z])|\\[!,;:()\[\]]|~", ""),
    (r"\\ |\\q?quad(?![a-zA-Z])", " "),
    (r"\\(?=[$%])", ""),
    (r"\^\{?\\circ\}?|\\degree", "°"),
    (r"(?<!\s)\s*(?:\\times|\\cdot|[×·*])\s*10\s*\^\s*(?:\{\s*)?([+-]?\d+)\s*\}?", r"e\1"),
    (r"([\^_])\{(\w)\}", r"\1\2"),
    (r"(?<![\w)}])([+-])\s*(?:[$€£¥]\s*)?(?=[\d.])", r"\1"),
    (r"_{3,}", "__"),
)
"""How LaTeX and typography write what plain text writes otherwise: patterns, and what takes their place, in order.

Responses may be long runs of one character, so no run may be read from each of its characters on.
"""


class FinalAnswer(NamedTuple):
    """The part of a text that is its answer, and how it is marked."""

    text: str
    how: Literal["boxed", "marked", "whole"]


def final_answer(text: str) -> FinalAnswer | None:
    """Return the content of the last box, else the rest of the line after the last ####, else the whole text.

    Return None if the last box is not closed.
    """
    boxes = list(_BOX.finditer(text))
    if boxes:
        inside = _closed(text[boxes[-1].end() :])
        return None if inside is None else FinalAnswer(inside, "boxed")
    _, mark, after = text.rpartition("####")
    return FinalAnswer(after.strip().split("\n")[0], "marked") if mark else FinalAnswer(text, "whole")


def _closed(text: str) -> str | None:
    """Return the text before the first closing brace without an opening brace in `text`, or None if there is none."""
    depth = 1
    for brace in _BRACE.finditer(text):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[: brace.start()]
    return None


def last_number(text: str) -> str | None:
    """Return the last number of a text as it is written without markup, or None if there is none."""
    found = NUMBER.findall(plain(text))
    return found[-1] if found else None


def short_answer(text: str) -> str | None:
    """Return the final answer in a few words: what is boxed or marked, else the last number; None without either."""
    found = final_answer(text)
    if found is None or found.how != "whole":
        return found and found.text.strip()
    return last_number(text)


def plain(text: str) -> str:
    """Remove the LaTeX, Markdown and typographic markup of an answer."""
    for pattern, plain in _SPELLINGS:
        text = re.sub(pattern, plain, text)
    text = WORDS.sub(r" \1 ", text)
    while (simpler := _FRACTION.sub(_slashed, text)) != text:
        text = simpler
    return _EMPHASIS.sub("", text)


def _slashed(fraction: re.Match[str]) -> str:
    """Return a LaTeX fraction as `a/b`, with parentheses where needed.

    After a digit, a space is put before it, so that the two are read as a mixed number.
    """
    before = fraction.string[: fraction.start()]
    above, below = (
        part if re.fullmatch(r"\d+(?:\.\d+)?|[a-zA-Z]", part) else f"({part})"
        for part in (fraction[1].strip(), fraction[2].strip())
    )
    negative = re.fullmatch(r"\(-(\d+)\)", above)
    if negative and not before.strip(" $"):
        above = f"-{negative[1]}"
    return f"{' ' if before[-1:].isdigit() else ''}{above}/{below}"
