"""Import training traces of OpenEnv (0.10), one JSON object per line. https://github.com/meta-pytorch/OpenEnv.

A trace has ``schema_version`` and ``turns``, and beside them what its producer adds, such as ``step``, ``reward`` and
its parts in ``rewards``; the contract that Harbor exports has the turns to train on in ``trace_entries``. An export of
Cavesson has what is known of the rollout in the metadata of the first turn.

A turn is a call of the engine: the ids before it and its own, the log-probabilities of these, a mask over both, and the
request and the response as messages. If a turn does not follow all tokens of the one before, because the agent rewrote
its history, another rollout begins there.
"""

from collections.abc import Iterable, Mapping, Sequence
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
from cavesson.importers.packing import is_text, pack, pack_texts, pack_whole
from cavesson.importers.rollout import Broken, Format, ImportedRollout, Origin
from cavesson.importers.steps import found_step
from cavesson.importers.turns import OneText, Sampled, one_text, sources_of, spans_of, texts_of, turns_of

OF_ROLLOUT = (
    "step", "split", "group", "reward", "reward_parts", "ground_truth", "finish_reason", "prompt", "response",
)  # fmt: skip
"""Columns of the record that an export writes into the metadata of the first turn."""
_LISTS = ("prompt_token_ids", "completion_token_ids", "per_token_logps", "loss_mask")
REWRITTEN = "the agent rewrote its history, so that the turns of its trace are several rollouts"
Messages = list[Mapping[str, Any]]


def rollouts(record: dict[str, Any], place: Origin) -> Iterable[ImportedRollout]:
    """Return the rollouts of one trace: one for each text that its turns make."""
    turns = record.get("trace_entries", record.get("turns"))
    if not isinstance(turns, list) or not turns:
        raise Broken(f"'turns' is {excerpt(turns)}, expected a list of turns")
    texts = texts_of(map(_sampled, turns))
    known = nested(turns[0], "metadata", "rollout")
    known = known if isinstance(known, Mapping) else {}
    step, remarks = found_step(known if "step" in known else record, place)
    base = _rewards(record, turns, place) | _exported(known, place)
    remarks = remarks if len(texts) == 1 else (*remarks, REWRITTEN)
    begin = 0
    for text in texts:
        own, begin = turns[begin : begin + len(text)], begin + len(text)
        yield _rollout(step, base, record, own, one_text(text), place)._replace(remarks=remarks)


def _rollout(
    step: int,
    base: dict[str, Any],
    record: Mapping[str, Any],
    own: Sequence[Any],
    found: OneText | None,
    place: Origin,
) -> ImportedRollout:
    """Return the rollout of the turns of one text; ``base`` is what is known of all rollouts of the trace."""
    prompt, said = _messages(own)
    row: dict[str, Any] = {}
    if prompt:
        row |= {"prompt": conversation(prompt, "request"), "response": conversation(said, "response")}
        row["group"] = group_of(row["prompt"])
    if (reason := nested(own[-1], "response", "choices", 0, "finish_reason")) in ("length", "stop"):
        row["finish_reason"] = reason
    tokens, sampled = ({}, []) if found is None else (found.tokens, found.sampled)
    row["prompt_ids"] = own[0]["prompt_token_ids"]
    if tokens and (sources := pack_texts(sources_of(said, sampled))) is not None:
        tokens["source"] = sources
    rest = {name: value for name, value in record.items() if name != "trace_entries"}
    kept = [_rest(turn, said) for turn in own]
    known = nested(own[0], "metadata", "rollout")
    if isinstance(known, Mapping) and all(known[name] == base.get(name) for name in known.keys() - {"step"}):
        kept[0]["metadata"] = {name: value for name, value in kept[0]["metadata"].items() if name != "rollout"}
    rest |= {"turns": kept}
    used = ["schema_version", "step", *scored("reward", record)]
    return ImportedRollout(
        step,
        with_rest(row | base, rest, used, place),
        tokens,
        tokens["token_id"].size if tokens else 0,
        turns=turns_of(said, spans_of(said, sampled) if tokens else None),
    )


def _rewards(record: Mapping[str, Any], turns: Sequence[Mapping[str, Any]], place: Origin) -> dict[str, Any]:
    """Return the reward of a trace, or else that of its last turn, and its parts; a missing one is not scored."""
    scored = next((one for one in (record, *reversed(turns)) if "reward" in one), {"reward": None})
    parts = record.get("rewards")
    row: dict[str, Any] = {"reward": reward_of(scored, "reward")}
    return row | ({"reward_parts": parts_of(parts, place) or None} if isinstance(parts, Mapping) else {})


def _exported(known: Mapping[str, Any], place: Origin) -> dict[str, Any]:
    """Return the columns that an export of Cavesson has written, as far as they fit."""
    row = {name: known[name] for name in OF_ROLLOUT if is_text(known.get(name))}
    if "reward" in known:
        row["reward"] = reward_of(known, "reward")
    if isinstance(known.get("reward_parts"), Mapping):
        row["reward_parts"] = parts_of(known["reward_parts"], place) or None
    return row | ({"group": known["group"]} if pack_whole([known.get("group")], 0, 2**53) is not None else {})


def _sampled(turn: Any) -> Sampled:
    given = [turn.get(name) if isinstance(turn, Mapping) else None for name in _LISTS]
    before, ids, logprobs, mask = (one if isinstance(one, list) else None for one in given)
    if before is None or ids is None or logprobs is None or mask is None:
        raise Broken(f"a turn is {excerpt(turn)}, expected the lists {', '.join(_LISTS)}")
    if len(logprobs) != len(ids) or len(mask) != len(before) + len(ids):
        raise Broken("the lists of a turn have different lengths")
    whole = pack_whole(before, low=0) is not None and pack_whole(ids, low=0) is not None
    if not whole or pack(logprobs) is None or not all(value in (0, 1) for value in mask):
        raise Broken("a list of a turn contains something that is not an id, a log-probability, or 0 or 1")
    return Sampled(before, ids, [int(value) for value in mask[len(before) :]], logprobs)


def _rest(turn: Mapping[str, Any], said: Messages) -> dict[str, Any]:
    """Return what has no column in the record: all but the tokens, and the messages if these have been said."""
    rest = {name: value for name, value in turn.items() if name not in _LISTS}
    if said and isinstance(asked := rest.get("request"), Mapping):
        rest["request"] = {name: value for name, value in asked.items() if name != "messages"}
    if nested(turn, "response", "choices", 0, "message") in said:
        choice = {name: value for name, value in turn["response"]["choices"][0].items() if name != "message"}
        rest["response"] = turn["response"] | {"choices": [choice, *turn["response"]["choices"][1:]]}
    return rest


def _messages(turns: Sequence[Any]) -> tuple[Messages, Messages]:
    """Return the messages of the first prompt, and those after it; nothing if the turns do not have them all."""
    asked = [nested(turn, "request", "messages") for turn in turns]
    answer = nested(turns[-1], "response", "choices", 0, "message")
    if not all(map(is_messages, asked)) or not isinstance(answer, Mapping):
        return [], []
    first, last = asked[0], asked[-1]
    return (first, [*last[len(first) :], answer]) if last[: len(first)] == first else ([], [])


FORMAT = Format(
    "openenv",
    "OpenEnv: training traces, one per line",
    ("*.jsonl",),
    (frozenset({"schema_version", "turns"}),),
    rollouts,
)
