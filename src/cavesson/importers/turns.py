"""Turns of an episode, from the chat messages after its first prompt and from which of its tokens were sampled."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from cavesson.importers.fields import content_text, is_messages, message_text, to_json
from cavesson.importers.packing import Values, is_text, pack, pack_whole
from cavesson.record.write.failures import error_in
from cavesson.text.chat_marks import OF_RESULTS, RESULT, RESULTS, calls_in, marks_in, messages_in, turns_in

Turn = dict[str, Any]
"""Columns of ``TURN_COLUMNS`` that are known, without those that say where the turn belongs."""


class Span(NamedTuple):
    """Where the tokens of a message are."""

    first: int
    size: int


class Sampled(NamedTuple):
    """A turn of the model, as engines return it."""

    before: list[int]
    """Ids of all tokens before it."""
    ids: list[int]
    """Ids of its tokens; the other lists are as long."""
    learned: list[int]
    logprobs: list[float]


class OneText(NamedTuple):
    """The turns of an episode as one text."""

    tokens: dict[str, Values]
    """Columns of all tokens after the first prompt."""
    prompt_ids: list[int]
    """Ids of the first prompt."""
    sampled: list[bool]
    """[T] whether the policy sampled each token after it."""


def texts_of(turns: Iterable[Sampled]) -> list[list[Sampled]]:
    """Return the turns in one list per text: each turn of a list follows all tokens of the one before."""
    found: list[list[Sampled]] = []
    for turn in turns:
        last = found[-1][-1] if found else None
        ids = None if last is None else [*last.before, *last.ids]
        if ids is not None and turn.before[: len(ids)] == ids:
            found[-1].append(turn)
        else:
            found.append([turn])
    return found


def one_text(turns: Sequence[Sampled]) -> OneText | None:
    """Return a list of `texts_of` as one text; None if it has no tokens."""
    first = turns[0].before
    mask, sampled, logprobs = list[int](), list[bool](), list[float | None]()
    for turn in turns:
        between = len(turn.before) - len(first) - len(mask)
        mask += [0] * between + turn.learned
        sampled += [False] * between + [True] * len(turn.ids)
        logprobs += [*[None] * between, *turn.logprobs]
    ids = [*turns[-1].before, *turns[-1].ids][len(first) :]
    packed = {"token_id": pack_whole(ids), "learned": pack_whole(mask), "sampler_logprob": pack(logprobs)}
    tokens: dict[str, Values] = {name: values for name, values in packed.items() if values is not None and values.size}
    return OneText(tokens, first, sampled) if "token_id" in tokens else None


def turns_of(messages: Any, spans: Sequence[Span | None] | None = None) -> list[Turn]:
    """Return the turns of the chat messages after the first prompt, a list or its JSON; of another text, its turns.

    They are nothing for anything else. ``spans`` say where the tokens of each message are; None = unknown.
    """
    if isinstance(messages, str):
        listed = messages_in(messages)
        return turns_of_text(messages) if listed is None else turns_of(listed)
    if not is_messages(messages):
        return []
    found, waiting = [], list[Mapping[str, Any]]()
    for message, span in zip(messages, spans or [None] * len(messages), strict=True):
        role = str(message.get("role") or "")
        turn: Turn = {"role": role}
        if role == "tool":
            turn |= _result(message, _answered(message, waiting))
        else:
            waiting += _calls(message) if role == "assistant" else []
            turn["text"] = message_text(message).partition("\n")[2]
        if span is not None:
            turn |= {"first_token": span.first, "tokens": span.size}
        found.append({name: _encodable(value) for name, value in turn.items()})
    return found


def turns_of_text(response: str) -> list[Turn]:
    """Return the turns that the marks in a response tell, if they are those of the policy and results of tools.

    Other turns are none: the policy may have written a mark itself.
    """
    lower = response.lower()
    if not any(name in lower for name in OF_RESULTS):  # most responses, and looking for marks takes longer
        return []
    marks = marks_in(response)
    found, waiting = list[Turn](), list[Mapping[str, Any]]()
    for said in turns_in(response, marks, "assistant") if marks else []:
        if said.role == "tool" or (said.role == "user" and RESULTS.fullmatch(said.text)):
            texts = RESULT.findall(said.text) if said.role == "user" else [said.text]
            results = [{"content": text} for text in texts]
            found += [{"role": "tool"} | _result(one, _answered(one, waiting)) for one in results]
        elif said.role == "assistant":
            waiting = [call if isinstance(call, Mapping) else {} for call in calls_in(said.text)]
            found.append({"role": "assistant", "text": said.text})
        else:
            return []
    if all(turn["role"] == "assistant" for turn in found):
        return []
    return [{name: _encodable(value) for name, value in turn.items()} for turn in found]


def spans_of(messages: Any, sampled: Sequence[bool]) -> list[Span | None]:
    """Return where the tokens of each message are, if that follows from which tokens were sampled.

    The messages are those after the first prompt, and ``sampled`` [T] is about each token after it.
    """
    blocks = _blocks(messages)
    runs = [(is_sampled, sum(1 for _ in run)) for is_sampled, run in groupby(sampled)]
    if [is_sampled for is_sampled, _ in runs] != [is_assistant for is_assistant, _ in blocks]:
        return [None] * len(messages)
    spans: list[Span | None] = []
    first = 0
    for (_, count), (_, block) in zip(runs, blocks, strict=True):
        spans += [Span(first, count)] if len(block) == 1 else [None] * len(block)
        first += count
    return spans


def sources_of(messages: Any, sampled: Sequence[bool]) -> list[str | None]:
    """Return [T] the source of each token; None where only its not being sampled is known.

    What the chat template adds around a result or a reply counts as a part of it: the log does not tell them apart.
    """
    blocks = _blocks(messages)
    runs = [(is_sampled, sum(1 for _ in run)) for is_sampled, run in groupby(sampled)]
    matches = [is_sampled for is_sampled, _ in runs] == [is_assistant for is_assistant, _ in blocks]
    sources: list[str | None] = []
    for place, (is_sampled, count) in enumerate(runs):
        roles = {message.get("role") for message in blocks[place][1]} if matches else set()
        sources += [source_of(roles.pop() if len(roles) == 1 else None, is_sampled)] * count
    return sources


def source_of(role: Any, is_sampled: bool) -> str | None:
    """Return the source of a token in a message of some role."""
    return "sampled" if is_sampled else role if role in ("tool", "user") else None


def _blocks(messages: Any) -> list[tuple[bool, list[Mapping[str, Any]]]]:
    """Return every message of the assistant alone, and the messages between them together."""
    if not is_messages(messages):
        return []
    found: list[tuple[bool, list[Mapping[str, Any]]]] = []
    for message in messages:
        is_assistant = message.get("role") == "assistant"
        if found and not is_assistant and not found[-1][0]:
            found[-1][1].append(message)
        else:
            found.append((is_assistant, [message]))
    return found


def _calls(message: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []


def _answered(message: Mapping[str, Any], waiting: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the call that a tool's message answers, and remove it from those that wait for an answer."""
    key, name = message.get("tool_call_id"), message.get("name")
    chosen = [call for call in waiting if key is not None and call.get("id") == key]
    chosen = chosen or [call for call in waiting if name is None or _function(call).get("name") == name]
    if not chosen:
        return {}
    waiting.remove(chosen[0])
    return _function(chosen[0])


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function", call)
    return function if isinstance(function, Mapping) else {}


def _result(message: Mapping[str, Any], call: Mapping[str, Any]) -> Turn:
    arguments, text = call.get("arguments"), content_text(message.get("content"))
    name = message.get("name") or call.get("name")
    return {
        "name": None if name is None else str(name),
        "arguments": arguments if arguments is None or isinstance(arguments, str) else to_json(arguments),
        "text": text,
        "error": error_in(text),
    }


def _encodable(value: Any) -> Any:
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) and not is_text(value) else value
