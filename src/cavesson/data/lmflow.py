"""LMFlow's JSON, `{"type": T, "instances": [...]}`, and those of its types that no other format covers.

Types and fields: github.com/OptimalScale/LMFlow, docs/source/examples/DATASETS.md. Rules for conversations: its
src/lmflow/tokenization/hf_decoder_model.py.
"""

import re
from collections.abc import Mapping
from typing import Any

from cavesson.data.conversations import Turns, answered, renamed, shared, shared_text, turns_of
from cavesson.data.fields import Fields, Skip
from cavesson.data.questions import GUESSED
from cavesson.data.types import Pair
from cavesson.errors import UserError

TYPES = {
    "text_only": "text",
    "text2text": "text2text",
    "float_only": "float_only",
    "image_text": "image_text",
    "conversation": "conversation",
    "paired_conversation": "paired_conversation",
    "paired_text_to_text": "preference",
    "text_to_textlist": "text_to_textlist",
    "text_to_scored_textlist": "text_to_scored_textlist",
}
"""LMFlow's name of a type, and the format that reads it."""

_ANSWER = "###Assistant:"  # written before an answer by the scripts of LMFlow's article
_ROLES = ("system", "user", "assistant", "function", "observation")


def is_lmflow(value: Any) -> bool:
    """Return whether a JSON value is an LMFlow file rather than a row; older files have no type."""
    if not isinstance(value, dict) or not isinstance(value.get("instances"), list):
        return False
    return "type" in value or len(value) == 1


def instances(value: dict[str, Any], file: str) -> tuple[str | None, list[Any]]:
    """Return the format of an LMFlow file, or None if the file has no type, and its rows.

    Raises:
        UserError: LMFlow has no such type.
    """
    if "type" not in value:
        return None, value["instances"]
    if value["type"] not in TYPES:
        raise UserError(f"{file}: LMFlow has no type {value['type']!r}; its types are {', '.join(TYPES)}")
    return TYPES[value["type"]], value["instances"]


def paired_conversation(fields: Fields) -> Pair:
    """Read `chosen` and `rejected`, each of which is a conversation.

    Raises:
        Skip: their tools differ, or `shared` cannot use them.
    """
    chosen, rejected = fields.inside("chosen"), fields.inside("rejected")
    tools = chosen.tools()
    if rejected.tools() != tools:
        raise Skip("pairs whose two conversations have different tools are skipped")
    return Pair(*shared(in_pairs(chosen), in_pairs(rejected), fields), fields.margin(), tools)


def scored_pair(fields: Fields) -> Pair:
    """Read `input` with the best and the worst of the scored texts in `output`; the margin is their difference.

    Raises:
        Skip: all texts have the same score.
    """
    scored = fields.scored("output")
    best, worst = max(scored, key=lambda pair: pair[0]), min(scored, key=lambda pair: pair[0])
    if best[0] == worst[0]:
        raise Skip("scored texts of which none is better than another are skipped")
    return Pair(fields.text("input"), best[1], worst[1], best[0] - worst[0])


def positive_negative(fields: Fields) -> Pair:
    """Read `positive` and `negative`, two texts whose responses begin after the last `###Assistant:` they share.

    Other texts are split as in `preference`: after the words that both begin with.
    """
    positive, negative = fields.text("positive"), fields.text("negative")
    ends = [match.end() for match in re.finditer(_ANSWER, positive)]
    start = max((end for end in ends if negative.startswith(positive[:end])), default=None)
    if start is None:
        fields.note(GUESSED)
        return Pair(*shared_text(positive, negative))
    return Pair(positive[:start], positive[start:], negative[start:])


def holds_messages(values: Mapping[str, Any], *columns: str) -> bool:
    """Return whether these columns are objects, one of which has messages, rather than texts, lists or messages."""
    objects = [values.get(column) for column in columns]
    return all(isinstance(one, dict) for one in objects) and any("messages" in one for one in objects if one)


def holds_list_of(kind: type, values: Mapping[str, Any]) -> bool:
    """Return whether `output` is a list whose first value is of this type."""
    output = values.get("output")
    return isinstance(output, list) and isinstance(output[0] if output else None, kind)


def turns(fields: Fields) -> Turns:
    """Return the turns of a conversation, with the role names of chat templates."""
    said = turns_of(fields)
    unknown = next((turn.role for turn in said if turn.role not in _ROLES), None)
    if unknown is not None:
        raise UserError(f"{fields.place}: LMFlow has no role {unknown!r}; its roles are {', '.join(_ROLES)}")
    return renamed(said)


def in_pairs(fields: Fields) -> Turns:
    """Return alternating questions and answers; an odd last turn is dropped."""
    said = turns(fields)
    spoken = sum(turn.role != "system" for turn in said)
    if spoken > 1 and spoken % 2:
        fields.note("the odd last turn of a conversation is dropped")
        said = said[:-1]
    return answered(said, fields)
