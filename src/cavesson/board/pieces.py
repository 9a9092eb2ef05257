"""The bytes of tokens that are parts of characters, so that the page can join them."""

import re

PARTIAL = "\ufffd"
"""What decoding puts where bytes are not a whole character."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _letters() -> dict[str, int]:
    """Return the byte of each character of byte-level BPE: visible bytes are themselves, others count up from 256."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_LETTERS = _letters()


def bytes_of(token: str) -> bytes | None:
    """Return the bytes that a tokenizer's string represents, or None if its format is not known.

    Known formats are byte-level BPE (``Ġthe``, ``Ã©``: one character per byte) and SentencePiece's ``<0xE4>``.
    """
    if found := _BYTE.fullmatch(token):
        return bytes([int(found[1], 16)])
    if all(letter in _LETTERS for letter in token):
        return bytes(_LETTERS[letter] for letter in token)
    return None
