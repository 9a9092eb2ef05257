"""Import TRL's ``log_completions=True``: one ``completions_{step}.parquet`` per log.

Source: https://github.com/huggingface/trl.

A row has ``step, prompt, completion``, one column per reward function, the columns that ``log_extra`` added, and
``advantage``, but no tokens. Prompts and completions are texts or lists of chat messages.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from cavesson.importers.fields import conversation, group_of, step_of, with_rest
from cavesson.importers.packing import is_text
from cavesson.importers.rollout import Broken, Format, ImportedRollout, Origin


def rollouts(record: dict[str, Any], place: Origin) -> Iterable[ImportedRollout]:
    """Return the rollout of one row. Every numeric column is a reward; their unweighted sum is the row's reward."""
    for key in ("prompt", "completion"):
        if key not in record:
            raise Broken(f"{key!r} is missing, expected a string or a list of messages")
    row: dict[str, Any] = {key: conversation(record[name], name) for key, name in _TEXTS.items()}
    row["group"] = group_of(row["prompt"])
    parts = {key: float(value) for key, value in record.items() if key not in _KNOWN and _is_reward(key, value)}
    if not parts:
        raise Broken("no reward was measured: there is no number besides step and advantage")
    row["reward_parts"] = parts
    measured = [value for value in parts.values() if not math.isnan(value)]
    row["reward"] = sum(measured) if measured else math.nan
    return [ImportedRollout(step_of(record), with_rest(row, record, ("step", *_TEXTS.values(), *parts), place), {}, 0)]


_TEXTS = {"prompt": "prompt", "response": "completion"}
_KNOWN = ("step", "prompt", "completion", "advantage")


def _is_reward(key: str, value: Any) -> bool:
    return is_text(key) and (isinstance(value, float) or type(value) is int)


def _recognises(record: Mapping[str, Any]) -> bool:
    return {"step", "prompt", "completion", "advantage"} <= record.keys()


FORMAT = Format(
    "trl",
    "TRL: the .parquet files of log_completions",
    ("completions_*.parquet", "completions/completions_*.parquet", "**/completions_*.parquet", "*.parquet"),
    _recognises,
    rollouts,
)
