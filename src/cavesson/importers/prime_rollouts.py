"""Rollouts as prime-rl wrote them in spring 2026, and as evaluations with verifiers write ``results.jsonl``.

Source: https://github.com/PrimeIntellect-ai/verifiers.

A line has ``prompt, completion, reward``, the ``metrics`` that make the reward, and for each turn of the model the ids
of all tokens before it and of its own, unless prime-rl left these out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from cavesson.importers.fields import conversation, group_of, is_messages, parts_of, reward_of, scored, with_rest
from cavesson.importers.packing import Values, pack, pack_texts, pack_whole
from cavesson.importers.rollout import ImportedRollout, Origin
from cavesson.importers.steps import BY_NAME, found_step
from cavesson.importers.turns import Sampled, one_text, sources_of, spans_of, texts_of, turns_of

ROLLOUT_KEYS = frozenset({"example_id", "prompt", "completion", "reward"})
_TOKEN_KEYS = ("prompt_ids", "completion_ids", "completion_mask", "completion_logprobs")
Turn = dict[str, Any]


def rollout_of(record: dict[str, Any], place: Origin, split: str | None) -> ImportedRollout:
    """Return the rollout of one line."""
    row: dict[str, Any] = {"prompt": conversation(record["prompt"], "prompt"), "split": split}
    row["response"] = conversation(record["completion"], "completion")
    row |= {"reward": reward_of(record, "reward"), "group": group_of(row["prompt"])}
    used = ["step", "prompt", "completion", *scored("reward", record)]
    metrics = record.get("metrics")
    if isinstance(metrics, Mapping) and (parts := parts_of(metrics, place)):
        row["reward_parts"] = parts
        used += ["metrics"] if len(parts) == len(metrics) else []
    if isinstance(record.get("answer"), str):
        row["ground_truth"] = record["answer"]
        used.append("answer")
    if record.get("is_truncated") is True:
        row["finish_reason"] = "length"
    turns = record.get("trajectory")
    messages = record["completion"]
    tokens, row["prompt_ids"], sampled = _tokens(turns) if isinstance(turns, list) else ({}, None, [])
    if (sources := pack_texts(sources_of(messages, sampled))) is not None and tokens:
        tokens["source"] = sources
    step, remarks = found_step(record, place)
    real = tokens["token_id"].size if tokens else 0
    remarks = tuple(remark for remark in remarks if remark != BY_NAME)  # prime-rl's own folders
    kept = record | {"trajectory": [_without_tokens(turn) for turn in turns]} if tokens and turns else record
    said = turns_of(messages, spans_of(messages, sampled) if tokens and is_messages(messages) else None)
    return ImportedRollout(step, with_rest(row, kept, used, place), tokens, real, remarks, said)


def _without_tokens(turn: Turn) -> Turn:
    return turn | {"tokens": {key: value for key, value in turn["tokens"].items() if key not in _TOKEN_KEYS}}


def _tokens(turns: Sequence[Any]) -> tuple[dict[str, Values], list[int] | None, list[bool]]:
    """Return the columns of all tokens after the first prompt, its ids, and which of the tokens were sampled.

    All are empty if the turns are not one text.
    """
    given: list[Any] = [turn.get("tokens") if isinstance(turn, dict) else None for turn in turns]
    if not given or not all(map(_is_complete, given)):
        return {}, None, []
    texts = texts_of(
        Sampled(
            one["prompt_ids"], one["completion_ids"], list(map(int, one["completion_mask"])), one["completion_logprobs"]
        )
        for one in given
    )
    return (one_text(texts[0]) if len(texts) == 1 else None) or ({}, None, [])


def _is_complete(tokens: Any) -> bool:
    """Whether a turn has whole ids before and of its completion, and a mask and log-probability for each of these."""
    given = [tokens.get(key) if isinstance(tokens, dict) else None for key in _TOKEN_KEYS]
    before, ids, mask, logprobs = (one if isinstance(one, list) else None for one in given)
    if ids is None or mask is None or logprobs is None or not len(ids) == len(mask) == len(logprobs):
        return False
    whole = all(pack_whole(one, low=0) is not None for one in (before, ids))
    return whole and all(value in (0, 1) for value in mask) and pack(logprobs) is not None
