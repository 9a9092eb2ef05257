"""Conversations: splitting turns into prompt and response, and the common prefix of two conversations."""

from dataclasses import replace
from itertools import pairwise

from cavesson.data.fields import Fields, Skip
from cavesson.data.types import SYSTEM, Content, Turn
from cavesson.errors import UserError

Turns = tuple[Turn, ...]

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    # A call is written by the model; an observation is what the tool returned.
    "function": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
"""How other formats call the roles of chat templates."""


def turns_of(fields: Fields, column: str = "messages", *, role: str = "role", content: str = "content") -> Turns:
    """Return the turns in a column, after a system turn from the column `system` if the row has one."""
    return opened(fields, fields.turns(column, role, content))


def opened(fields: Fields, turns: Turns) -> Turns:
    """Return turns after a system turn from the column `system` if the row has one, and they do not repeat it.

    Raises:
        UserError: they begin with another system turn.
    """
    system = fields.added("system")
    if not system or turns[:1] == (Turn("system", system),):
        return turns
    if turns and turns[0].role in SYSTEM:
        raise UserError(f"{fields.place}: both 'system' and the first message are system messages; remove one of them")
    return (Turn("system", system), *turns)


def renamed(turns: Turns) -> Turns:
    """Return the turns with the role names of chat templates."""
    return tuple(replace(turn, role=ROLES.get(turn.role, turn.role)) for turn in turns)


def ask(turns: Turns) -> Turns:
    """Return the prompt: everything before the last turn if that is an answer, else all turns.

    Raises:
        Skip: the conversation does not begin with the user.
    """
    asked = turns[:-1] if turns and turns[-1].role == "assistant" else turns
    _check_start(asked)
    return asked


def answered(turns: Turns, fields: Fields) -> Turns:
    """Return the turns up to the last answer.

    Raises:
        Skip: there is no answer, or the conversation does not begin with the user.
    """
    if sum(turn.role not in SYSTEM for turn in turns) < 2:
        raise Skip("conversations of fewer than 2 messages are skipped")
    _check_start(turns)
    end = max((i for i, turn in enumerate(turns, start=1) if turn.role == "assistant"), default=0)
    if not end:
        raise Skip("conversations without an answer are skipped")
    if end < len(turns):
        fields.note("turns after the last answer are dropped")
    if any(turn.role == after.role != "tool" for turn, after in pairwise(turns)):
        fields.note("one speaker has two turns in a row, which some chat templates reject")
    return turns[:end]


def split(turns: Turns) -> tuple[Turns, Turns]:
    """Return the turns before the first answer, and those from it on."""
    first = next(i for i, turn in enumerate(turns) if turn.role == "assistant")
    return turns[:first], turns[first:]


def split_last(turns: Turns) -> tuple[Turns, Turns]:
    """Return the turns up to the user's last one, and those after it."""
    last = max(i for i, turn in enumerate(turns, start=1) if turn.role == "user")
    return turns[:last], turns[last:]


def shared(chosen: Turns, rejected: Turns, fields: Fields) -> tuple[Turns, Turns, Turns]:
    """Return the prompt and the two responses: the prompt is the common beginning before an answer in both.

    Raises:
        Skip: they share no question, or one of them is not a question with an answer.
    """
    chosen, rejected = answered(chosen, fields), answered(rejected, fields)
    same = 0
    while same < min(len(chosen), len(rejected)) - 1 and chosen[same] == rejected[same]:
        same += 1
    while same and not chosen[same].role == rejected[same].role == "assistant":
        same -= 1
    if not same:
        raise Skip("pairs that answer different questions are skipped")
    if max(len(chosen), len(rejected)) > same + 1:
        fields.note("chosen and rejected differ in more than their last turn")
    return chosen[:same], chosen[same:], rejected[same:]


def shared_text(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Return the prompt and responses of two texts: the prompt is the words that both begin with.

    A response keeps the space before its first word, where tokenizers split, and is empty only if its text is empty.
    """
    same = 0
    while same < min(len(chosen), len(rejected)) - 1 and chosen[same] == rejected[same]:
        same += 1
    while same and not chosen[same - 1].isspace():
        same -= 1
    if same and chosen[same - 1] == " ":
        same -= 1
    return chosen[:same], chosen[same:], rejected[same:]


def alike(prompt: Content, response: Content) -> tuple[Content, Content]:
    """Return prompt and response both as texts or both as turns.

    If only one of them is a text, it becomes a turn: a prompt of the user, a response of the assistant.
    """
    if isinstance(prompt, str) and not isinstance(response, str):
        return (Turn("user", prompt),) if prompt else (), response
    if isinstance(response, str) and not isinstance(prompt, str):
        return prompt, (Turn("assistant", response),)
    return prompt, response


def _check_start(turns: Turns) -> None:
    first = next((turn.role for turn in turns if turn.role not in SYSTEM), None)
    if first != "user":
        raise Skip("conversations that do not begin with the user (after the system) are skipped")
