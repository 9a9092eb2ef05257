"""Import traces of trackio, ``trackio.log({key: trackio.Trace(messages, metadata)})``, from ``PROJECT.db``.

Source: https://github.com/gradio-app/trackio.

A trace has ``messages`` as the API of OpenAI has them, and ``metadata``, which may hold a ``reward`` or ``score``, and
parts of it in ``rewards`` or ``scores``. Tables of completions in such a database are those of their trainer, TRL.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from cavesson.importers.fields import (
    conversation,
    excerpt,
    group_of,
    is_messages,
    nested,
    parts_of,
    reward_of,
    step_of,
    with_rest,
)
from cavesson.importers.rollout import Broken, Format, ImportedRollout, Origin
from cavesson.importers.turns import turns_of

REWARDS = ("reward", "score")
PARTS = ("reward_parts", "rewards", "scores")


def rollouts(record: dict[str, Any], place: Origin) -> Iterable[ImportedRollout]:
    """Return the rollout of one trace: what the assistant says first begins the response."""
    messages, metadata = record.get("messages"), record.get("metadata")
    if not is_messages(messages) or not messages:
        raise Broken(f"'messages' is {excerpt(messages)}, expected a list of messages")
    known = metadata if isinstance(metadata, Mapping) else {}
    said = [one.get("role") == "assistant" for one in messages]
    begin = said.index(True) if True in said else len(messages)
    row: dict[str, Any] = {"prompt": conversation(messages[:begin], "messages")}
    row |= {"response": conversation(messages[begin:], "messages"), "group": group_of(row["prompt"])}
    reward = next((name for name in REWARDS if name in known), None)
    row["reward"] = None if reward is None else reward_of(known, reward)
    parts: Mapping[str, Any] = next((known[name] for name in PARTS if isinstance(known.get(name), Mapping)), {})
    row["reward_parts"] = parts_of(parts, place) or None
    if isinstance(truth := nested(known, "ground_truth"), str):
        row["ground_truth"] = truth
    row = with_rest(row, record, ("step", "messages"), place)
    return [ImportedRollout(step_of(record), row, {}, 0, (), turns_of(messages[begin:]))]


FORMAT = Format(
    "trackio",
    "trackio: traces in PROJECT.db",
    ("*.db/*/*",),
    (frozenset({"messages", "metadata", "key", "step"}),),
    rollouts,
)
