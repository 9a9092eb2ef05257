"""Import training traces of OpenEnv (0.10), one JSON object per line. https://github.com/meta-pytorch/OpenEnv.

A trace has ``schema_version`` and ``turns``, and beside them what its producer adds, such as ``step`` and ``reward``.
A turn is a call of the engine: the ids before it and its own, the log-probabilities of these, a mask over both, and the
request and the response as messages. If a turn does not follow all tokens of the one before, because the agent rewrote
its history, another rollout begins there.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cavesson.importers.fields import conversation, excerpt, group_of, is_messages, nested, reward_of, scored, with_rest
from cavesson.importers.packing import pack, pack_texts, pack_whole
from cavesson.importers.rollout import Broken, Format, ImportedRollout, Origin
from cavesson.importers.steps import found_step
from cavesson.importers.turns import Sampled, one_text, sources_of, spans_of, texts_of, turns_of

_LISTS = ("prompt_token_ids", "completion_token_ids", "per_token_logps", "loss_mask")
REWRITTEN = "the agent rewrote its history, so that the turns of its trace are several rollouts"
Messages = list[Mapping[str, Any]]


def rollouts(record: dict[str, Any], place: Origin) -> Iterable[ImportedRollout]:
    """Return the rollouts of one trace: one for each text that its turns make."""
    turns = record.get("turns")
    if not isinstance(turns, list) or not turns:
        raise Broken(f"'turns' is {excerpt(turns)}, expected a list of turns")
    step, remarks = found_step(record, place)
    texts = texts_of(map(_sampled, turns))
    used, begin = ["schema_version", "step", *scored("reward", record)], 0
    for text in texts:
        own, begin = turns[begin : begin + len(text)], begin + len(text)
        found = one_text(text)
        prompt, said = _messages(own)
        row: dict[str, Any] = {"reward": reward_of(record, "reward") if "reward" in record else None}
        if prompt:
            row |= {"prompt": conversation(prompt, "request"), "response": conversation(said, "response")}
            row["group"] = group_of(row["prompt"])
        if (reason := nested(own[-1], "response", "choices", 0, "finish_reason")) in ("length", "stop"):
            row["finish_reason"] = reason
        tokens, sampled = ({}, []) if found is None else (found.tokens, found.sampled)
        row |= {"prompt_ids": found.prompt_ids} if found is not None else {}
        if tokens and (sources := pack_texts(sources_of(said, sampled))) is not None:
            tokens["source"] = sources
        yield ImportedRollout(
            step,
            with_rest(row, record | {"turns": [_rest(turn, said) for turn in own]}, used, place),
            tokens,
            tokens["token_id"].size if tokens else 0,
            remarks if len(texts) == 1 else (*remarks, REWRITTEN),
            turns_of(said, spans_of(said, sampled) if tokens else None),
        )


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
