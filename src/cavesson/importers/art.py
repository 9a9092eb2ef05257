"""Import ART's trajectories, ``trajectories/{split}/{step}.parquet``. Source: https://github.com/OpenPipe/ART.

A trajectory has a ``reward``, ``metrics``, ``metadata`` and ``messages_and_choices``: chat messages, and choices of the
engine, which hold what the policy said. A table has one per row, as JSON in ``trajectory_json`` beside its group's in
``group_json``; the first versions had columns instead. Before, a line of ``{step}.jsonl`` was a group.
"""

import json
import re
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
    scored,
    with_rest,
)
from cavesson.importers.packing import Values, pack, pack_texts, pack_whole
from cavesson.importers.rollout import Broken, Format, ImportedRollout, Origin
from cavesson.importers.steps import step_at
from cavesson.importers.turns import turns_of

ENDS = ("stop", "length")
_ID = re.compile(r"token_id:(\d{1,9})")
_OF_TABLE = {"format_version", "trajectory_json", "reward", "metrics", "metadata", "tools", "logs", "messages"}
_IN_GROUP = {"group_json", "group_metadata", "group_metrics", "group_logs"}


def rollouts(record: dict[str, Any], place: Origin) -> Iterable[ImportedRollout]:
    """Return the rollouts of one row, or of one line with a group."""
    if "trajectories" in record:
        if not is_messages(record["trajectories"]):
            raise Broken(f"'trajectories' is {excerpt(record['trajectories'])}, expected a list of trajectories")
        others = {name: value for name, value in record.items() if name != "trajectories"}
        return [_rollout({**others, **one}, place) for one in record["trajectories"]]
    if "trajectory_json" not in record:
        return [_rollout(_of_columns(record), place)]
    if record["trajectory_json"] is None:  # stands for a group without trajectories
        return []
    others = {name: value for name, value in record.items() if name not in _OF_TABLE | _IN_GROUP}
    others |= {"group": _object(record, "group_json")} if record.get("group_json") else {}
    return [_rollout({**others, **_object(record, "trajectory_json")}, place)]


def _rollout(record: dict[str, Any], place: Origin) -> ImportedRollout:
    given = record.get("messages_and_choices")
    if not is_messages(given):
        raise Broken(f"'messages_and_choices' is {excerpt(given)}, expected a list of messages")
    messages = [one["message"] if isinstance(one.get("message"), Mapping) else one for one in given]
    said = [one.get("role") == "assistant" for one in messages]
    begin = said.index(True) if True in said else len(messages)
    row: dict[str, Any] = {"prompt": conversation(messages[:begin], "messages_and_choices")}
    row |= {"response": conversation(messages[begin:], "messages_and_choices"), "reward": reward_of(record, "reward")}
    row |= {"group": group_of(row["prompt"]), "split": "train" if place.path.parent.name == "train" else "eval"}
    metrics = record.get("metrics")
    parts = parts_of(metrics, place) if isinstance(metrics, Mapping) else {}
    row["reward_parts"] = parts or None
    tokens = _tokens(given[begin]) if len(messages) == begin + 1 else {}
    choices = [_rest(one, bool(tokens)) for one in given if "message" in one]
    if choices and (reason := choices[-1].get("finish_reason")) in ENDS:
        row["finish_reason"] = reason
    used = ["messages_and_choices", *scored("reward", record)]
    used += ["metrics"] if isinstance(metrics, Mapping) and len(parts) == len(metrics) else []
    rest = record | ({"choices": choices} if choices else {})
    real = next((values.size for values in tokens.values()), 0)
    row = with_rest(row, {name: value for name, value in rest.items() if value not in (None, [], {})}, used, place)
    return ImportedRollout(step_at(record, place), row, tokens, real, (), turns_of(messages[begin:]))


def _of_columns(record: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the first tables as a trajectory."""
    messages = record.get("messages")
    if not is_messages(messages):
        raise Broken(f"'messages' is {excerpt(messages)}, expected a list of messages")
    flat = [{key: value for key, value in one.items() if value is not None} for one in messages]
    for one in flat:
        if isinstance(one.get("tool_calls"), str):
            one["tool_calls"] = _parsed(one["tool_calls"])
        one.pop("trainable", None)
    texts = ("metrics", "metadata", "tools", "group_metadata", "group_metrics")
    read = {name: _parsed(record[name]) for name in texts if isinstance(record.get(name), str)}
    others = {name: value for name, value in record.items() if name != "messages"}
    return {**others, **read, "messages_and_choices": flat}


def _object(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    content = _parsed(record[key])
    if not isinstance(content, dict):
        raise Broken(f"{key!r} is {excerpt(content)}, expected a JSON object")
    return content


def _parsed(text: Any) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError):
        return text


def _tokens(choice: Mapping[str, Any]) -> dict[str, Values]:
    """Return the tokens of a choice, if it has their log-probabilities; engines may write ids in place of texts."""
    content = nested(choice, "logprobs", "content")
    if not is_messages(content) or not content:
        return {}
    texts, logprobs = pack_texts([one.get("token") for one in content]), pack([one.get("logprob") for one in content])
    if texts is None or texts.missing or logprobs is None:
        return {}
    ids = [_ID.fullmatch(one["token"]) for one in content]
    if all(ids) and (packed := pack_whole([int(one[1]) for one in ids if one])) is not None:
        return {"token_id": packed, "sampler_logprob": logprobs}
    return {"token": texts, "sampler_logprob": logprobs}


def _rest(choice: Mapping[str, Any], has_tokens: bool) -> dict[str, Any]:
    """Return what a choice has beside its message."""
    left_out = {"message", "logprobs"} if has_tokens else {"message"}
    return {name: value for name, value in choice.items() if name not in left_out and value is not None}


FORMAT = Format(
    "art",
    "ART: trajectories/*/*.parquet",
    ("*.parquet", "*.jsonl"),
    (
        frozenset({"group_json", "trajectory_json"}),
        frozenset({"group_index", "messages", "reward", "metrics"}),
        frozenset({"trajectories"}),
    ),
    rollouts,
    one_run=False,
)
