"""What the columns of rows are used for; a column that would be dropped, although other data mean it, is refused."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cavesson.data.fields import Fields, is_empty
from cavesson.data.formats import FORMATS, named
from cavesson.data.types import Answered, Demonstration, Labelled, Pair, Prompt
from cavesson.errors import UserError

_RESPONSES = ("completion", "response", "answer", "output", "text", "messages", "conversations")
_ROLES = {
    **dict.fromkeys(_RESPONSES, "response"),
    **{"chosen": "chosen", "positive": "chosen", "rejected": "rejected", "negative": "rejected"},
    **{name: name for name in ("margin", "label", "tools")},
}
"""What a column that is read is used for; any other is part of the prompt."""
_WHOLE = ("text", "messages", "conversations")
"""Columns that have the prompt and the response."""
_ORDER = ("prompt", "response", "prompt and response", "chosen", "rejected", "margin", "label", "tools")

_QUESTIONS = {"prompt", "question", "instruction", "input"}
_MEDIA = {"image", "images", "video", "videos", "audio", "audios"}
_OTHER_NAMES = {
    "system_prompt": "system",
    "system_message": "system",
    "functions": "tools",
    "query": "prompt",
    "conversation": "messages",
    "kto_tag": "label",
}
"""Names that other programs give to our columns."""
_VERDICTS = ("labels", "winner", "preference")
"""Columns that say which response is the better one."""
_SHOWN = _MEDIA | {
    "system", "system_prompt", "system_message", "history", "context", "input", "instruction", "tools", "functions"
}  # fmt: skip
"""What a model must be shown, and rewards alone cannot make up for."""
_MEANT = {
    *(name for format in FORMATS.values() for name in (*format.columns, *format.optional) if name != "value"),
    *(*_OTHER_NAMES, *_MEDIA, *_VERDICTS),
}
"""Columns that are never dropped without being asked."""
_MEANT_FOR: dict[type[Any], set[str]] = {
    Prompt: _SHOWN,
    Answered: _SHOWN,
    Demonstration: _MEANT - {"rejected", "negative"},  # nobody learns these
    Pair: _MEANT,
    Labelled: _MEANT,
}


class Usage:
    """Which columns of the rows of a source are used as what; the rows become one of the kinds of `data.types`.

    `names` maps Cavesson's names of columns to those of the source, where they differ.
    """

    def __init__(self, kind: type[Any], names: Mapping[str, str]):
        self.kind, self.names = kind, names
        self._sources = {part for name in names.values() for part in (name, name.partition(".")[0])}
        self._used: dict[str, dict[str, None]] = {}
        self._others: dict[str, None] = {}

    def add(self, fields: Fields) -> None:
        """Count a row that was read."""
        for name, value in fields.values.items():
            if value is not None and name in fields.used:
                self._used.setdefault(self._role(name), {})[name] = None
            elif value is not None:
                self._others[self.names.get(name, name)] = None
        for name, value in fields.original.items():
            is_read = name in fields.values and name not in self.names
            if value is not None and not is_read and name not in self._sources:
                self._others[name] = None

    def check(self, fields: Fields, format: str) -> None:
        """Refuse a row with a column that would be dropped, although it says what the model must read or learn.

        A column that repeats what was read is no loss, nor is one that the format itself leaves out.

        Raises:
            UserError: there is such a column.
        """
        meant = _MEANT_FOR[self.kind] - set(named(format).columns) - fields.used
        dropped = [name for name in fields.values if name in meant and not _is_said(name, fields)]
        mapped = next((name for name in dropped if name in self.names), None)
        if mapped is not None:
            raise UserError(
                f"{fields.place}: data.columns maps {mapped!r}, which {format} does not read; remove it there"
            )
        if dropped:
            columns = f"the column{'s' if len(dropped) > 1 else ''} {', '.join(map(repr, dropped))}"
            raise UserError(f"{fields.place}: {columns} would be dropped; {self._way_out(dropped)}")

    def line(self) -> str:
        """Return e.g. `prompt ← question, system; to the rewards: answer; not used: source`, or "" before any row."""
        parts = [
            f"{role} ← {', '.join(self.names.get(name, name) for name in self._used[role])}"
            for role in _ORDER
            if role in self._used
        ]
        if self._others:
            parts.append(
                f"{'to the rewards' if issubclass(self.kind, Prompt) else 'not used'}: {', '.join(self._others)}"
            )
        return "; ".join(parts)

    def _role(self, name: str) -> str:
        if self.kind is Prompt:
            return "tools" if name == "tools" else "prompt"
        if self.kind in (Answered, Demonstration, Labelled) and name in _WHOLE:
            return "prompt and response"
        return _ROLES.get(name, "prompt")

    def _way_out(self, dropped: Sequence[str]) -> str:
        """Return the settings that would use columns, where there are any, and the one that leaves them out."""
        ignored = f"data.ignore = {json.dumps(dropped)}"
        if set(dropped) & _MEDIA:
            return f"Cavesson trains on text only; to train on the text alone, set {ignored}"
        uses = {ours: name for name in dropped if (ours := _OTHER_NAMES.get(name) or self._same_role(name))}
        use = ", ".join(f'{ours} = "{name}"' for ours, name in uses.items())
        them = "it" if len(dropped) == 1 else "them"
        leave = f"leave {them} out on purpose with {ignored}"
        return f"use {them} with data.columns = {{{use}}}, or {leave}" if use else leave

    def _same_role(self, name: str) -> str | None:
        """Return the column whose place a column could take."""
        if name in _WHOLE or name not in _QUESTIONS | _ROLES.keys():
            return None
        return next((other for other in self._used.get(self._role(name), {}) if other not in _WHOLE), None)


def _is_said(name: str, fields: Fields) -> bool:
    """Return whether a column says nothing, or nothing that a column does not say that was read."""
    value, read = fields.values[name], [fields.values.get(name) for name in fields.used]
    if is_empty(value) or value in read:
        return True
    messages = (message for one in read if isinstance(one, list) for message in one if isinstance(message, dict))
    return isinstance(value, str) and any(value in (one.get("content"), one.get("value")) for one in messages)
