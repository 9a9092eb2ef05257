"""What answers a turn of the policy: the results of its calls, or a user, as turns and as messages."""

import json
from asyncio import wrap_future
from collections.abc import Sequence
from typing import Any, NamedTuple

from cavesson.rollout import contract
from cavesson.rollout.calling import Caller
from cavesson.rollout.environments import Instance
from cavesson.rollout.types import Answered, Call
from cavesson.types import Turn


class Said(NamedTuple):
    """What somebody other than the policy says."""

    turn: Turn
    """whose place is not known yet"""
    message: dict[str, Any]


async def answered(
    caller: Caller, instance: Instance, text: str, calls: Sequence[Call], *, is_last: bool
) -> list[Said]:
    """Make the calls of a turn of the policy, or let the user reply to its text.

    With `is_last`, the policy has no other turn, and no user replies.
    """
    if calls:
        given = [await caller.answer(instance.tools, call) for call in calls]
        return [Said(_turn(call, one), _message(call, one)) for call, one in zip(calls, given, strict=True)]
    if not instance.kind.speaks or contract.is_done(instance) or is_last:
        return []
    reply = await wrap_future(contract.user_reply(caller, instance, text))
    return [] if reply is None else [Said(Turn("user", reply, 0, 0), {"role": "user", "content": reply})]


def end_of(instance: Instance, said: Sequence[Said], *, is_last: bool) -> str | None:
    """Return why an episode ends after the present turn, which `said` answers, or None if the policy decides."""
    if contract.is_done(instance):
        return "done"
    # An answer without a call ends an episode by itself, unless a user would have replied in another turn.
    return "turns" if is_last and (said or instance.kind.speaks) else None


def as_message(content: str, calls: Sequence[Call]) -> dict[str, Any]:
    """Return a turn of the policy as a message, with its calls."""
    asked = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        | ({"id": call.id} if call.id is not None else {})
        for call in calls
    ]
    return {"role": "assistant", "content": content} | ({"tool_calls": asked} if asked else {})


def _message(call: Call, answer: Answered) -> dict[str, Any]:
    identifier = {"tool_call_id": call.id} if call.id is not None else {}
    return {"role": "tool", "name": call.name, "content": answer.text, **identifier}


def _turn(call: Call, answer: Answered) -> Turn:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return Turn("tool", answer.text, 0, 0, call.name, arguments, answer.seconds, answer.error)
