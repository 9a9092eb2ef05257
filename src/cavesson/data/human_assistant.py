r"""Conversations in one text, as in HH-RLHF: `\n\nHuman: …\n\nAssistant: …` (Bai et al. 2022, arXiv:2204.05862)."""

import re
from collections.abc import Mapping
from typing import Any

from cavesson.data.conversations import Turns, answered, ask, shared, split
from cavesson.data.fields import Fields
from cavesson.data.questions import GUESSED, in_conversation, paired
from cavesson.data.types import Content, Demonstration, Pair, Turn

_SPEAKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def parse(text: str) -> Turns:
    """Return the turns of such a text, with white space stripped; no turns if no speaker is named."""
    _, *parts = _SPEAKER.split(text)
    return tuple(Turn(_ROLES[who], content.strip()) for who, content in zip(parts[::2], parts[1::2], strict=True))


def holds_dialogue(column: str, values: Mapping[str, Any]) -> bool:
    """Return whether a column of this row is a text of this form."""
    text = values.get(column)
    return isinstance(text, str) and bool(re.match(r"\s*Human:", text)) and "\n\nAssistant:" in text


def pair(fields: Fields) -> Pair:
    """Read `chosen` and `rejected`, which continue `prompt` if the row has one."""
    chosen, rejected = (parse(fields.added("prompt") + fields.text(name)) for name in ("chosen", "rejected"))
    made = paired(fields, *shared(chosen, rejected, fields), fields.margin())
    if not fields.has("prompt"):
        fields.note(GUESSED)
    return made


def demonstration(fields: Fields) -> Demonstration:
    """Read `text`; the response is all turns from the first answer on."""
    return Demonstration(*split(answered(parse(fields.text("text")), fields)))


def prompt(column: str, fields: Fields) -> Content:
    """Return everything before the last answer, which is empty if the text ends with `Assistant:`."""
    return in_conversation(fields, ask(parse(fields.text(column))))[0]
