"""Import logs of Inspect, ``*.eval``. Source: https://github.com/UKGovernmentBEIS/inspect_ai.

A log is an archive with one JSON file per sample and epoch: its ``input`` and ``target``, the ``messages`` of the
conversation, the ``output`` of the last call of the model, and ``scores`` by scorer. Long contents of messages are in
``attachments``, by their hash. All samples are held-out ones.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from cavesson.importers.fields import as_number, conversation, group_of, is_messages, nested, to_json, with_rest
from cavesson.importers.packing import Values, is_text, pack, pack_texts
from cavesson.importers.rollout import Format, ImportedRollout, Origin
from cavesson.importers.steps import step_in_names
from cavesson.importers.turns import Turn, turns_of
from cavesson.record.splits import HELD_OUT

GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
"""Correct, partly correct, incorrect, no answer: the numbers that Inspect's own metrics take."""
ENDS = {"stop": "stop", "max_tokens": "length", "model_length": "length"}
EVENTS = "the events of a sample, the transcript of what happened, stay in the log"
_ATTACHMENT = "attachment://"
_USED = ("input", "target", "messages", "events", "attachments")


def rollouts(record: dict[str, Any], place: Origin) -> Iterable[ImportedRollout]:
    """Return the rollout of a sample; its step is that of the path, or 0. Its reward is the sum of its scores."""
    attachments = record.get("attachments")
    messages = _resolved(record.get("messages"), attachments if isinstance(attachments, Mapping) else {})
    before, said = _divided(messages if is_messages(messages) else [])
    row: dict[str, Any] = {"prompt": conversation(before or record.get("input"), "input"), "split": HELD_OUT}
    row |= {"response": conversation(said, "messages"), "group": group_of(row["prompt"])}
    row |= {"ground_truth": _target(record.get("target"))} | _scores(record.get("scores"))
    reason = nested(record, "output", "choices", 0, "stop_reason")
    row |= {"finish_reason": ENDS[reason]} if isinstance(reason, str) and reason in ENDS else {}
    tokens = _tokens(record) if len(said) == 1 else {}
    return [
        ImportedRollout(
            step_in_names(place.names) or 0,
            with_rest(row, _rest(record), _USED, place),
            tokens,
            tokens["token"].size if tokens else 0,
            (EVENTS,) if record.get("events") else (),
            _turns(said),
        )
    ]


def _resolved(value: Any, attachments: Mapping[str, Any]) -> Any:
    """Return a value with the contents that are attached to the sample in their places."""
    if isinstance(value, str) and value.startswith(_ATTACHMENT):
        return attachments.get(value.removeprefix(_ATTACHMENT), value)
    if isinstance(value, list):
        return [_resolved(one, attachments) for one in value]
    if isinstance(value, Mapping):
        return {key: _resolved(one, attachments) for key, one in value.items()}
    return value


def _divided(messages: list[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the messages before the model's first one, and those from there on."""
    ours = [_message(message) for message in messages]
    is_said = [one.get("role") == "assistant" and one.get("source") != "input" for one in messages]
    begin = is_said.index(True) if True in is_said else len(ours)
    return ours[:begin], ours[begin:]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as the API of OpenAI has it."""
    kept = {key: value for key, value in message.items() if key not in ("id", "source", "model", "function")}
    if message.get("role") == "tool" and "function" in message:
        kept["name"] = message["function"]
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        kept["tool_calls"] = [_call(call) for call in calls]
    return kept


def _call(call: Any) -> Any:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), str):
        return call
    function = {"name": call["function"], "arguments": call.get("arguments")}
    return {key: value for key, value in call.items() if key != "arguments"} | {"function": function}


def _turns(said: list[dict[str, Any]]) -> list[Turn]:
    turns = turns_of(said)
    for turn, message in zip(turns, said, strict=True):
        if isinstance(error := message.get("error"), Mapping):
            turn["error"] = one if is_text(one := error.get("message")) else to_json(error)
    return turns


def _target(target: Any) -> str | None:
    one = target[0] if isinstance(target, list) and len(target) == 1 else target
    return one if is_text(one) else None if one in (None, []) else to_json(one)


def _scores(scores: Any) -> dict[str, Any]:
    """Return the reward, its parts, and the explanations of scorers."""
    found = scores if isinstance(scores, Mapping) else {}
    parts: dict[str, float] = {}
    for name, score in found.items():
        value = score.get("value") if isinstance(score, Mapping) else score
        for key, one in value.items() if isinstance(value, Mapping) else [(None, value)]:
            number = GRADES.get(one, as_number(one)) if isinstance(one, str) else as_number(one)
            part = name if key is None else f"{name}/{key}"
            if number is not None and is_text(part):
                parts[part] = number
    reasons = {name: nested(score, "explanation") for name, score in found.items()}
    return {
        "reward": sum(parts.values()) if parts else None,
        "reward_parts": parts or None,
        "reward_reasons": {name: text for name, text in reasons.items() if is_text(name) and is_text(text)} or None,
    }


def _tokens(record: Mapping[str, Any]) -> dict[str, Values]:
    """Return the tokens of the only answer of the model, if the log has their log-probabilities."""
    content = nested(record, "output", "choices", 0, "logprobs", "content")
    texts, logprobs = ([nested(one, name) for one in content or ()] for name in ("token", "logprob"))
    packed, numbers = pack_texts(texts), pack(logprobs)
    if not texts or packed is None or packed.missing or numbers is None:
        return {}
    return {"token": packed, "sampler_logprob": numbers}


def _rest(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record without the message that its output repeats."""
    output, message = record.get("output"), nested(record, "output", "choices", 0, "message")
    if not isinstance(output, Mapping) or message is None:
        return dict(record)
    rest = {name: value for name, value in output["choices"][0].items() if name not in ("message", "logprobs")}
    kept = {name: value for name, value in output.items() if name != "completion"}
    return {**record, "output": {**kept, "choices": [rest, *output["choices"][1:]]}}


FORMAT = Format(
    "inspect",
    "Inspect: logs *.eval",
    ("*.eval", "*.jsonl"),
    (frozenset({"id", "epoch", "input", "target"}),),
    rollouts,
    one_run=False,
)
