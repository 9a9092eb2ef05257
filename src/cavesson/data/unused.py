"""Parts of conversations that a chat template does not use."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from cavesson.data.chat import Chat, Tools, Unrenderable
from cavesson.data.template import variables
from cavesson.data.types import Turn


@dataclass(frozen=True)
class Unused:
    """Finds the fields of messages that make no difference to what a template writes.

    A field is tested by rendering the conversation without it, separately for every role, until it makes a difference
    for the first time. One that the template does not name is tested once.
    """

    chat: Chat
    _known: dict[tuple[str, str], bool] = field(default_factory=dict)
    """whether a field of a role is used"""

    def remarks(self, turns: Sequence[Turn], tools: Tools) -> list[str]:
        """Return a remark for every field that the template does not use; there must be one."""
        unused = [name for name in _fields(turns) if not self._is_used(*name, turns, tools)]
        names = [f"the chat template does not use {name!r} of {role} messages" for role, name in unused]
        reads_tools = not tools or "tools" in variables(self.chat.template(tools).source)
        return names if reads_tools else [*names, "the chat template does not use tools"]

    def _is_used(self, role: str, name: str, turns: Sequence[Turn], tools: Tools) -> bool:
        if (role, name) in self._known:
            return self._known[role, name]
        is_used = self._differs(role, name, turns, tools)
        if is_used or name not in self.chat.template(tools).source:
            self._known[role, name] = is_used
        return is_used

    def _differs(self, role: str, name: str, turns: Sequence[Turn], tools: Tools) -> bool:
        """Return whether the conversation up to the last message that has this field differs without it."""
        has = [(role, name) in _fields([turn]) for turn in turns]
        some = turns[: len(has) - has[::-1].index(True)]
        without = [_without(turn, name) if is_one else turn for turn, is_one in zip(some, has, strict=False)]
        try:
            return self.chat.render(some, tools) != self.chat.render(without, tools)
        except Unrenderable:
            return True  # then the template needs the field, or the row is dropped for another reason


def _fields(turns: Iterable[Turn]) -> list[tuple[str, str]]:
    """Return the fields that some turns have, as pairs of a role and a name."""
    names = ((turn.role, [*turn.others, *(["content"] if turn.text.strip() else [])]) for turn in turns)
    return list(dict.fromkeys((role, name) for role, some in names for name in some))


def _without(turn: Turn, name: str) -> Turn:
    if name == "content":
        return replace(turn, content="")
    return replace(turn, others={other: value for other, value in turn.others.items() if other != name})
