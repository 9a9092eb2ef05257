"""Search texts as regular expressions of RE2, which needs time in proportion to the text but can still need much."""

import re
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc

from dressage.errors import UserError

HIT = "dressage_hit"


def compiled(q: str, regex: bool) -> str:
    """Returns an expression whose one group of this name, ``HIT``, is what is sought.

    Raises:
        UserError: It is no regular expression that RE2 knows.
    """
    pattern = f"(?P<{HIT}>{_without_groups(q)})" if regex else f"(?i)(?P<{HIT}>{escaped(q)})"
    try:
        # As it was given first, for a message about what was given.
        for candidate in (q, pattern) if regex else (pattern,):
            pc.match_substring_regex(pa.array([""]), candidate)
        pc.extract_regex_span(pa.array([""]), pattern)
    except pa.ArrowInvalid as error:
        reason = str(error).removeprefix("Invalid regular expression: ")
        raise UserError(f"this is no regular expression: {reason}") from None
    return pattern


def escaped(text: str) -> str:
    """Returns an expression that matches the text."""
    return "".join(c if c.isalnum() or ord(c) > 127 else f"\\x{ord(c):02x}" for c in text)


_PIECES = re.compile(
    r"\\Q.*?(?:\\E|$)|\\.|\[\^?\]?(?:\[:\^?\w+:\]|\\.|[^\]\\])*\]|\(\?P?<\w+>|\(\?|\{[0-9,]*\}|.", re.DOTALL
)


def _without_groups(pattern: str) -> str:
    """Returns the expression with groups that capture nothing: Arrow wants every other one named."""
    pieces = _PIECES.findall(pattern)
    return "".join("(?:" if piece == "(" or piece.startswith(("(?P<", "(?<")) else piece for piece in pieces)


def required(pattern: str) -> list[str]:
    """Returns texts that every match of a regular expression holds, upper and lower case aside; perhaps none."""
    if "|" in pattern or "(?" in pattern or "\\Q" in pattern:
        return []
    found, depth = [""], 0
    pieces = [*_PIECES.findall(pattern), ""]
    for piece, after in pairwise(pieces):
        depth += (piece == "(") - (piece == ")")
        plain = len(piece) == 1 and piece not in ".^$*+?{}()[]\\"
        if plain and depth == 0 and not after.startswith(("*", "?", "{")):
            found[-1] += piece
        else:
            # `+` repeats what is there at least once, but what follows need not touch it.
            found.append("")
    return [text.strip() for text in found if text.strip()]
