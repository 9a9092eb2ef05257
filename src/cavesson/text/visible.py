"""Safe display of untrusted text: control and invisible characters are shown as signs."""

import json

BIDI = {
    0x061C: "ALM", 0x200E: "LRM", 0x200F: "RLM", 0x202A: "LRE", 0x202B: "RLE", 0x202C: "PDF", 0x202D: "LRO",
    0x202E: "RLO", 0x2066: "LRI", 0x2067: "RLI", 0x2068: "FSI", 0x2069: "PDI",
}  # fmt: skip
"""What changes the direction of the text around it, by its name in Unicode Standard Annex 9."""
HIDDEN = (
    *range(0x80, 0xA0), 0xAD, 0x115F, 0x1160, 0x180E, 0x200B, 0x2028, 0x2029, *range(0x2060, 0x2065),
    *range(0x206A, 0x2070), 0x3164, *range(0xD800, 0xE000), 0xFEFF, 0xFFA0, *range(0xFFF9, 0xFFFC),
    *range(0x1BCA0, 0x1BCA4), *range(0x1D173, 0x1D17B), *range(0xE0000, 0xE0080),
)  # fmt: skip
"""C1 controls, what has no width or is blank, separators, halves of surrogate pairs, which no terminal can be sent, and
tags, in which a whole text can hide. The flags of England, Scotland and Wales contain tags."""

SIGNS = {code: chr(0x2400 + code) for code in range(32)} | {0x7F: "␡", ord("\n"): "↵"}
"""What stands for a character where text takes one line."""
SIGNS |= {code: f"⟨{name}⟩" for code, name in BIDI.items()} | {code: f"⟨U+{code:04X}⟩" for code in HIDDEN}

_SIGNS = {code: sign for code, sign in SIGNS.items() if chr(code) not in "\n\t"}
_ESCAPES = {code: json.dumps(chr(code))[1:-1] for code in (0x7F, *BIDI, *HIDDEN)}


def visible(text: str) -> str:
    """Show control and invisible characters, direction marks and lone surrogates as signs such as ``␛`` or ``⟨RLO⟩``.

    Line breaks and tabs stay, as do letters of every script and the joiners used in emoji and Persian.
    """
    return text.translate(_SIGNS)


def visible_line(text: str) -> str:
    """Show text on one line: like ``visible``, with ``↵`` for a line break and ``␉`` for a tab."""
    return text.translate(SIGNS)


def shortened(text: str, length: int = 60) -> str:
    """Return a text, or its beginning and ``…`` if it is longer."""
    return text if len(text) <= length else f"{text[:length]}…"


def safe_json(text: str) -> str:
    """Escape characters that ``json.dumps(ensure_ascii=False)`` leaves raw although they affect a terminal."""
    return text.translate(_ESCAPES)
