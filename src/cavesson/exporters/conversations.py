"""Export rollouts as conversations to train on, in TRL's formats: messages, or pairs of responses to a prompt."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow.compute as pc

from cavesson.errors import UserError
from cavesson.importers.fields import to_json
from cavesson.record import open as open_run
from cavesson.record.files import replacing
from cavesson.record.labels import Key, LabelFile, pairs
from cavesson.record.read.reader import Run
from cavesson.record.splits import is_held_out
from cavesson.record.storage import Location
from cavesson.text.chat_marks import CALLS, Said, calls_in, closed, marks_in, messages_in, parsed, turns_in

Format = Literal["sft", "preference"]
Message = dict[str, Any]

AT_ONCE = 500
"""Lines whose rollouts are read together."""
OFFERED = re.compile(r"\n*# Tools\n.*?<tools>\n(.*?)\n</tools>.*", re.DOTALL)
"""Tools as Hermes and Qwen offer them, at the end of the system prompt."""


class Conversation(NamedTuple):
    """A rollout as messages, and the schemas of the tools that its prompt offers."""

    prompt: list[Message]
    response: list[Message]
    tools: list[Any]


def export(place: Location, out: Path, allow_remote: bool = False, *, format: Format) -> int:
    """Write a JSON Lines file, and return the number of its lines.

    ``sft`` has the responses that were trained on, ``preference`` the pairs that people have labelled. With
    ``allow_remote``, the record may be at another place that the run's folder names.

    Raises:
        UserError: ``place`` is not a run.
    """
    run = open_run(place, allow_remote)
    count = 0
    with replacing(out) as file:
        for line in preference_lines(run, labelled_pairs(run)) if format == "preference" else sft_lines(run, _all(run)):
            file.write((to_json(line) + "\n").encode("utf-8", "surrogatepass"))
            count += 1
    return count


def _all(run: Run) -> list[Key]:
    rows = run.rows(["step", "sample", "split"])
    rows = rows.filter(pc.invert(is_held_out(rows["split"])))
    return list(zip(rows["step"].to_pylist(), rows["sample"].to_pylist(), strict=True))


def labelled_pairs(run: Run) -> list[tuple[Key, Key]]:
    """Return the chosen and the rejected rollout of each pair that people have labelled, and that the record has."""
    known = pairs(LabelFile(run).all())
    steps = {chosen[0] for chosen, _ in known}
    there = run.rows(["step", "sample"], steps=steps)
    keys = set(zip(there["step"].to_pylist(), there["sample"].to_pylist(), strict=True))
    return [pair for pair in known if keys.issuperset(pair)]


def sft_lines(run: Run, keys: Sequence[Key]) -> Iterator[dict[str, Any]]:
    """Yield the conversation of each rollout, as ``messages``, and ``tools`` if its prompt offers some."""
    for start in range(0, len(keys), AT_ONCE):
        for one in conversations(run, keys[start : start + AT_ONCE]):
            yield {"messages": one.prompt + one.response} | ({"tools": one.tools} if one.tools else {})


def preference_lines(run: Run, known: Sequence[tuple[Key, Key]]) -> Iterator[dict[str, Any]]:
    """Yield ``prompt``, ``chosen`` and ``rejected`` of each pair, and ``tools`` if the prompt offers some.

    Raises:
        UserError: The two rollouts of a pair answer different prompts.
    """
    for start in range(0, len(known), AT_ONCE):
        some = known[start : start + AT_ONCE]
        chosen, rejected = (conversations(run, [pair[side] for pair in some]) for side in (0, 1))
        for (better, worse), good, bad in zip(some, chosen, rejected, strict=True):
            if (good.prompt, good.tools) != (bad.prompt, bad.tools):
                raise UserError(
                    f"step {better[0]}: samples {better[1]} and {worse[1]} are labelled as a pair, but answer "
                    "different prompts; take the label away on the board"
                )
            line = {"prompt": good.prompt, "chosen": good.response, "rejected": bad.response}
            yield line | ({"tools": good.tools} if good.tools else {})


def conversations(run: Run, keys: Sequence[Key]) -> list[Conversation]:
    """Return some rollouts as conversations, in the given order."""
    rows = run.fetch(keys, ["prompt", "response"]).to_pylist()
    turns: dict[Key, list[dict[str, Any]]] = {}
    for turn in run.turns_of(keys).to_pylist():
        turns.setdefault((turn["step"], turn["sample"]), []).append(turn)
    return [
        conversation(row["prompt"], row["response"], turns.get(key, ())) for key, row in zip(keys, rows, strict=True)
    ]


def conversation(prompt: str, response: str, turns: Sequence[Mapping[str, Any]] = ()) -> Conversation:
    """Return the messages that a prompt, a response and its turns are made of.

    A list of messages in JSON is these; the marks of known chat templates tell the messages of any other prompt apart,
    and a prompt without them is one message of the user. The recorded turns are those of the response; the name and
    arguments of a tool's turn are the call.
    """
    if (listed := messages_in(prompt)) is not None:
        given = None if turns else messages_in(response)
        return Conversation(listed, conversation("", response, turns).response if given is None else given, [])
    marks = marks_in(prompt)
    asked = turns_in(prompt, marks, "user") if marks else [Said("user", prompt)]
    begun = asked.pop().text if asked[-1:] and asked[-1].role == "assistant" else ""
    tools: list[Any] = []
    if asked[:1] and asked[0].role == "system":
        text, tools = _offered(asked[0].text)
        asked[:1] = [Said("system", text)] if text else []
    if not turns:
        own = marks or marks_in(response)
        said = turns_in(response, own, "assistant") if own and marks_in(response) == own else None
        said = said or [Said("assistant", closed(response, own) if own else response)]
        turns = [{"role": one.role, "text": one.text} for one in said]
    answer = list(_messages(turns))
    if begun and answer and answer[0]["role"] == "assistant":
        answer[0] |= {"content": begun + answer[0]["content"]}
    return Conversation([{"role": one.role, "content": one.text} for one in asked], answer, tools)


def _offered(system: str) -> tuple[str, list[Any]]:
    """Return a system prompt without the tools that it offers, and their schemas."""
    found = OFFERED.search(system)
    try:
        tools = [json.loads(line) for line in found[1].split("\n")] if found else []
    except ValueError:
        return system, []
    return (system[: found.start()], tools) if found else (system, [])


def _messages(turns: Sequence[Mapping[str, Any]]) -> Iterator[Message]:
    for place, turn in enumerate(turns):
        text = turn["text"] or ""
        if turn["role"] == "assistant":
            yield _assistant(text, _results(turns[place + 1 :]))
        elif turn["role"] == "tool":
            name = turn.get("name")
            yield {"role": "tool", **({"name": name} if name else {}), "content": text}
        else:
            yield {"role": turn["role"], "content": text}


def _results(turns: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the turns of tools that come first."""
    stop = next((place for place, turn in enumerate(turns) if turn["role"] != "tool"), len(turns))
    return list(turns[:stop])


def _assistant(text: str, results: Sequence[Mapping[str, Any]]) -> Message:
    """Return a message of the assistant; its calls are those that were answered, else those in the text."""
    if results and all(turn.get("name") for turn in results):
        calls = [{"name": turn["name"], "arguments": parsed(turn.get("arguments") or "{}")} for turn in results]
    else:
        calls = calls_in(text)
    if not calls or not all(_is_call(call) for call in calls):
        return {"role": "assistant", "content": text}
    said = "" if _is_call(parsed(text)) else CALLS.sub("", text).strip()
    functions = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
    return {
        "role": "assistant",
        "content": said,
        "tool_calls": [{"type": "function", "function": function} for function in functions],
    }


def _is_call(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and "arguments" in value
