"""Import prime-rl's episodes. https://github.com/PrimeIntellect-ai/prime-rl.

Since September 2026, they are one stream, ``monitors/file/traces/stream/NNNNN.jsonl`` (``.zst`` once a file is
complete), with annotations that are written later; see ``prime_annotations``. Earlier versions wrote one file per step,
``rollouts/step_{N}/{train,eval}/{all,effective}/traces.jsonl``, and before July 2026
``rollouts/step_{N}/{train,eval}_rollouts.jsonl``, with one trace per line, or one rollout as in ``prime_rollouts``.

A line is an episode of one or more traces; a trace is a graph of messages with their tokens, and every path from its
root to a leaf is one rollout. Lines that are a single trace, as an evaluation writes them, are also read. A folder
contains every episode under ``all``, and a copy of those that were trained on under ``effective``; ``all`` is read.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cavesson.importers.fields import (
    MAX_STEP,
    as_number,
    excerpt,
    group_of,
    message_text,
    nested,
    text_of,
    to_json,
    with_rest,
)
from cavesson.importers.packing import Values, is_number, is_text, pack, pack_texts, pack_whole
from cavesson.importers.prime_annotations import Annotations, paths_of
from cavesson.importers.prime_rollouts import ROLLOUT_KEYS, rollout_of
from cavesson.importers.rollout import Broken, Format, ImportedRollout, Origin
from cavesson.importers.steps import step_in_names
from cavesson.importers.turns import Span, source_of, turns_of

SAMPLED = {
    "logprobs": "sampler_logprob",
    "reference_logprobs": "ref_logprob",
    "trainer_logprobs": "logprob",
    "advantages": "advantage",
    "entropies": "entropy",
}
"""A node's list, one entry per sampled token → the record's column."""
Node = Mapping[str, Any]


def rollouts(record: dict[str, Any], place: Origin) -> Iterable[ImportedRollout]:
    """Return one rollout per path of each trace of the episode.

    The step is taken from the record's ``run.work``, else from the folder name, else from the trace's ``arrival``. An
    evaluation with verifiers alone, which belongs to no training, has step 0.
    """
    if record.keys() >= ROLLOUT_KEYS:
        return [rollout_of(record, place, _split_of_name(place))]
    traces = record.get("traces", [record])
    if not isinstance(traces, list) or not all(isinstance(trace, dict) for trace in traces):
        raise Broken(f"'traces' is {excerpt(traces)}, expected a list of objects")
    if not traces:
        raise Broken(f"the episode has no traces; its errors: {excerpt(record.get('errors'), 200)}")
    named = nested(record, "run", "work")
    work = named if isinstance(named, Mapping) and named.get("type") in ("train", "eval") else {}
    step = work.get("step", step_in_names(place.names))
    step = nested(traces, 0, "info", "arrival", "step") if step is None else step
    is_alone = step is None and not work and nested(record, "run", "type") in (None, "eval")
    step = 0 if is_alone else step
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise Broken("neither the record nor a folder step_… names its step")
    base: dict[str, Any] = {"split": work.get("type") or _split_of_name(place) or ("eval" if is_alone else None)}
    group = record.get("group")
    base["group"] = group_of(str(group["id"])) if isinstance(group, Mapping) and "id" in group else None
    return [rollout for trace in traces for rollout in _of_trace(trace, step, base, record, place)]


def _of_trace(
    trace: Node, step: int, base: Mapping[str, Any], record: Node, place: Origin
) -> Iterable[ImportedRollout]:
    reward, parts = _rewards(trace)
    nodes = trace.get("nodes")
    if not isinstance(nodes, list) or not all(isinstance(node, dict) for node in nodes):
        raise Broken(f"'nodes' is {excerpt(nodes)}, expected a list of objects")
    kept = {"trace": {key: value for key, value in trace.items() if key not in ("nodes", "rewards")}}
    if trace is not record:
        kept |= {key: value for key, value in record.items() if key not in ("traces", "group", "run")}
    for path in paths_of(nodes):
        row = dict(base) | {"reward": reward, "reward_parts": parts or None}
        sampled = [bool(node.get("sampled")) for node in path]
        cut = sampled.index(True) if True in sampled else len(path)
        row |= {"prompt": _text(path[:cut]), "response": _text(path[cut:])}
        row["group"] = group_of(row["prompt"]) if row["group"] is None else row["group"]
        reason = nested(trace, "calls", -1, "finish_reason")
        row["finish_reason"] = reason if reason in ("stop", "length") else None
        tokens, prompt_ids = _tokens(path)
        turns = turns_of([node.get("message") for node in path[cut:]], _spans(path, len(prompt_ids))[cut:])
        if prompt_ids:
            row["prompt_ids"] = prompt_ids
        real = tokens["token_id"].size if tokens else 0
        yield ImportedRollout(step, with_rest(row, kept, (), place), tokens, real, turns=turns)


def _split_of_name(place: Origin) -> str | None:
    names = [name.removesuffix("_rollouts.jsonl") for name in reversed(place.path.parts)]
    return next((name for name in names if name in ("train", "eval")), None)


def _rewards(trace: Node) -> tuple[float, dict[str, float]]:
    """Return the weighted sum of the rewards that were scored, and each score."""
    rewards = trace.get("rewards")
    if not isinstance(rewards, Mapping):
        raise Broken(f"'rewards' is {excerpt(rewards)}, expected an object")
    scored = {name: r if isinstance(r, Mapping) else {"score": r} for name, r in rewards.items() if r is not None}
    for name, reward in scored.items():
        if not is_text(name) or as_number(reward.get("score")) is None or not is_number(reward.get("weight", 1.0)):
            raise Broken(f"the reward {name!r} is {excerpt(rewards[name])}, expected a score and a weight")
    if not scored:
        raise Broken(f"the trace was not scored; its errors: {excerpt(trace.get('errors'), 200)}")
    total = sum(float(reward["score"]) * reward.get("weight", 1.0) for reward in scored.values())
    return float(total), {name: float(reward["score"]) for name, reward in scored.items()}


def _text(path: Sequence[Node]) -> str:
    messages = [node.get("message") for node in path]
    texts = [message_text(message) if isinstance(message, Mapping) else to_json(message) for message in messages]
    return text_of({"message": "\n\n".join(texts)}, "message")


def _tokens(path: Sequence[Node]) -> tuple[dict[str, Values], list[int]]:
    """Return the token columns from the first sampled token on, and the ids before it."""
    ids = [value for node in path for value in _list(node, "token_ids")]
    sampled = [bool(value) for node in path for value in _list(node, "mask")]
    if pack_whole(ids, low=0) is None or len(ids) != len(sampled):
        raise Broken("the nodes' token_ids and mask are not lists of the same length")
    if True not in sampled:
        return {}, ids
    start = sampled.index(True)
    learned = pack_whole([int(value) for value in sampled[start:]])
    packed: dict[str, Values | None] = {"token_id": pack_whole(ids[start:]), "learned": learned}
    packed["source"] = pack_texts(_sources(path)[start:])
    columns = {name: _spread(path, key) for key, name in SAMPLED.items()}
    packed |= {name: pack(values[start:]) for name, values in columns.items() if values is not None}
    tokens: dict[str, Values] = {}
    for name, values in packed.items():
        if values is None:
            raise Broken(f"a node's list for {name} contains something that is not a number")
        tokens[name] = values
    return tokens, ids[:start]


def _sources(path: Sequence[Node]) -> list[str | None]:
    """Return the source of every token: in a message of the assistant, the template wrote what was not sampled."""
    found: list[str | None] = []
    for node in path:
        role = nested(node, "message", "role")
        found += [
            "template" if role == "assistant" and not value else source_of(role, bool(value))
            for value in _list(node, "mask")
        ]
    return found


def _spans(path: Sequence[Node], start: int) -> list[Span | None]:
    """Return where the tokens of each node are, counted from the first sampled one; None for a node without tokens."""
    spans: list[Span | None] = []
    end = -start
    for node in path:
        first, end = max(end, 0), end + len(_list(node, "token_ids"))
        spans.append(Span(first, end - first) if end > first else None)
    return spans


def _list(node: Node, key: str) -> list[Any]:
    values = node.get(key) or []
    if not isinstance(values, list):
        raise Broken(f"a node's list of tokens is {excerpt(values)}")
    return values


def _spread(path: Sequence[Node], key: str) -> list[Any] | None:
    """Spread a list of one entry per sampled token over all tokens, null elsewhere; return None if no node has it."""
    if all(not node.get(key) for node in path):
        return None
    spread: list[Any] = []
    for node in path:
        values = iter(_list(node, key))
        spread += [next(values, None) if sampled else None for sampled in _list(node, "mask")]
    return spread


def _accepts(record: Mapping[str, Any]) -> bool:
    return isinstance(record.get("traces", []), list)


FORMAT = Format(
    "prime-rl",
    "prime-rl: monitors/file/traces, or rollouts/step_*",
    (
        "stream/[0-9]*.jsonl",
        "stream.jsonl",
        "all/traces.jsonl",
        "traces.jsonl",
        "train_rollouts.jsonl eval_rollouts.jsonl",
        "results.jsonl",
    ),
    (frozenset({"traces"}), frozenset({"nodes", "rewards", "task"}), ROLLOUT_KEYS),
    rollouts,
    accepts=_accepts,
    annotations=Annotations,
)
