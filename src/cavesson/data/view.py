"""Rows as a run would read them, for `cavesson data show` and `cavesson data lengths`."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from cavesson.data.answers import answers
from cavesson.data.chat import Chat
from cavesson.data.formats import FORMATS, Kind, named, recognise
from cavesson.data.load import SourceRows, load
from cavesson.data.settings import AnyDataSettings, ChatSettings, ViewSettings
from cavesson.data.sources import read
from cavesson.data.types import Demonstration, Labelled, Pair, Prompt, Turn
from cavesson.errors import UserError

KINDS: dict[str, Kind] = {"prompts": Prompt, "demonstrations": Demonstration, "pairs": Pair, "labelled": Labelled}
"""What settings call the kinds of rows."""


class Recognised(NamedTuple):
    """How rows are read."""

    format: str
    kind: type[Any]
    """one of `KINDS`"""


def recognised(settings: ViewSettings) -> Recognised:
    """Return how the first row is read.

    Raises:
        UserError: there are no rows, or the columns of the first fit no format.
    """
    source = settings.data.mix[0] if settings.data.mix else settings.data
    raw = next(read(source, stream=settings.data.stream), None)
    if raw is None:
        raise UserError(f"{source.path} contains no rows")
    row = SourceRows(source, Prompt).renamed(raw)
    kind = KINDS[settings.kind] if settings.kind else None
    stated = source.format or row.format
    if stated is not None:
        return Recognised(stated, kind or named(stated).gives)
    kinds = (Pair, Labelled, Demonstration, Prompt)
    kind = kind or next((kind for kind in kinds if _is(kind, row.values)), Demonstration)
    return Recognised(recognise(row.values, kind, row.place), kind)


def has_conversations(data: Mapping[str, Any]) -> bool:
    """Return whether the first row of the data of some settings is a conversation; False if it cannot be read."""
    try:
        settings = AnyDataSettings.model_validate({**data, "max_rows": 1, "validation": 0.0})
        row = load(settings, recognised(ViewSettings(data=settings)).kind).train[0]
    except (UserError, ValueError):
        return False
    return not isinstance(row.prompt, str)


def _is(kind: Kind, values: Mapping[str, Any]) -> bool:
    if kind is Labelled:
        return "label" in values and any("label" in one.optional and one.fits(values) for one in FORMATS.values())
    return any(format.gives is kind and format.fits(values) for format in FORMATS.values())


def assistant_turn_end(settings: ChatSettings, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the special token at the end of an assistant's turn, or None if the data is not read as chat."""
    if not (settings.chat or has_conversations(settings.model_dump())):
        return None
    chat = Chat.of(settings, tokenizer)
    try:
        (text, spans), *_ = answers(chat, [Turn("user", "a"), Turn("assistant", "b")]).sequences
    except UserError:
        return None  # reading the data gives a better message
    ids = tokenizer(text[: spans[-1][1]], add_special_tokens=False)["input_ids"]
    return ids[-1] if ids and ids[-1] in tokenizer.all_special_ids else None
