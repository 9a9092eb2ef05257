"""Import RL Logging Board's JSON lines, without loss. https://github.com/HarderThenHarder/RLLoggingBoard.

Every line is one rollout; a folder contains one file per process, and files are merged by ``step``.

Every key and value is restored on export: values that have no column, or do not fit it exactly (a null, another type,
an empty list, a list that ends in null), are kept as JSON in ``extra``. For numbers, the value is kept but not the
spelling: 1 is exported as 1.0.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyarrow as pa

from cavesson.importers.fields import group_of, is_unscored, number_of, step_of, text_of, with_rest
from cavesson.importers.packing import Values, is_number, is_text, pack_column, pack_whole
from cavesson.importers.rollout import Format, ImportedRollout, Origin
from cavesson.record.schema import SOURCES, TOKEN_COLUMNS, TURN_COLUMNS

ROW_KEYS = ("prompt", "response", "reward", "ref_response", "ref_reward", "ground_truth")
"""The format's keys that are columns of the record's rows under the same name."""
TOKEN_KEYS = {
    "response_tokens": "token",
    "logprobs": "logprob",
    "ref_logprobs": "ref_logprob",
    "values": "value",
    "token_rewards": "token_reward",
    "sources": "source",
    "learned_tokens": "learned",
}
"""The format's list → the record's column."""
OF_EPISODES = ("source", "learned")
"""Columns of which the format does not know; an export adds them where not all tokens were sampled and learned."""
TURN_KEYS = {
    column.name: column.type
    for column in TURN_COLUMNS
    if column.name not in ("step", "attempt", "rank", "sample", "turn")
}
"""What an export writes of each turn, under ``turns``."""
PARTS = ("valid_reward", "ref_valid_reward")
"""Further rewards that the format's own viewer draws; they stay in ``extra`` as well, to come back on export."""
_OTHER_ROWS = {
    "group", "split", "reward_parts", "shaped_reward", "prompt_ids", "finish_reason", "policy_version", "kl_coef"
}  # fmt: skip
_TOKEN_TYPES = {column.name: column.type for column in TOKEN_COLUMNS}
"""Columns under the record's own names: a source with a list in one of them is the format ``plain``."""
_Check = Callable[[Any], bool]
_OPTIONAL: dict[str, _Check] = {"ref_response": is_text, "ref_reward": is_number, "ground_truth": is_text}


def rollouts(record: dict[str, Any], place: Origin) -> Iterable[ImportedRollout]:
    """Return the rollout of one line."""
    row: dict[str, Any] = {"prompt": text_of(record, "prompt"), "response": text_of(record, "response")}
    row["reward"] = None if is_unscored(record, "reward") else number_of(record, "reward")
    step = step_of(record)
    row |= {key: record[key] for key, fits in _OPTIONAL.items() if key in record and fits(record[key])}
    tokens = _tokens(record)
    used = [*row, *(key for key, name in TOKEN_KEYS.items() if name in tokens)]
    used += ["step"] if type(record["step"]) is int else []
    used = [key for key in used if key != "reward" or _is_reward(record["reward"])]
    row["group"] = group_of(row["prompt"])
    if place.rank is not None:
        row["rank"] = place.rank
    if parts := {key: float(record[key]) for key in PARTS if is_number(record.get(key))}:
        row["reward_parts"] = parts
    turns = record["turns"] if _are_turns(record.get("turns")) else []
    used += ["turns"] if turns else []
    return [ImportedRollout(step, with_rest(row, record, used, place), tokens, _real(tokens), turns=turns)]


def _is_reward(value: Any) -> bool:
    """Whether the column of rewards represents a value exactly: null or a number, but no NaN, which is null there."""
    return value is None or (is_number(value) and not math.isnan(value))


def _are_turns(value: Any) -> bool:
    """Whether a value is what an export writes for the turns of a rollout."""
    turns = value if isinstance(value, list) else []
    return bool(turns) and all(
        isinstance(turn, dict) and "role" in turn and turn.keys() <= TURN_KEYS.keys() and all(map(_fits, turn.items()))
        for turn in turns
    )


def _fits(item: tuple[str, Any]) -> bool:
    name, value = item
    if pa.types.is_string(TURN_KEYS[name]):
        return is_text(value)
    return is_number(value) if pa.types.is_floating(TURN_KEYS[name]) else pack_whole([value]) is not None


def _tokens(record: Mapping[str, Any]) -> dict[str, Values]:
    packed = {name: pack_column(_TOKEN_TYPES[name], record.get(key)) for key, name in TOKEN_KEYS.items()}
    sources, learned = record.get("sources", []), record.get("learned_tokens", [])
    if packed["source"] is not None and not {"sampled"} < {*sources, "sampled"} <= {*SOURCES, None}:
        packed["source"] = None
    if packed["learned"] is not None and not (learned[-1] is True and any(one is False for one in learned)):
        packed["learned"] = None
    return {name: values for name, values in packed.items() if values is not None}


def _real(tokens: Mapping[str, Values]) -> int:
    """Return the number of tokens that are not padding: tokens after the last log-probability are padding."""
    if "logprob" in tokens:
        return tokens["logprob"].size
    numbers = [values.size for name, values in tokens.items() if name != "token"]
    return max(numbers or [values.size for values in tokens.values()], default=0)


def _accepts(record: Mapping[str, Any]) -> bool:
    """Whether a record does not use the record's own column names instead."""
    keys = record.keys()
    ours = any(isinstance(record.get(name), list) for name in _TOKEN_TYPES) or bool(_OTHER_ROWS & keys)
    return bool(TOKEN_KEYS.keys() & keys) or not ours


FORMAT = Format(
    "rl-logging-board",
    "RL Logging Board: a folder of .jsonl files, one per process",
    ("*.jsonl",),
    (frozenset({"prompt", "response", "reward", "step"}),),
    rollouts,
    accepts=_accepts,
    ranks=True,
    one_run=False,
)
