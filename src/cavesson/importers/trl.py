"""Import TRL's ``log_completions=True``: one ``completions_{step}.parquet`` per log, or a table of Weights & Biases.

Sources: https://github.com/huggingface/trl, https://github.com/modelscope/ms-swift.

A row has ``step, prompt, completion``, one column per reward function, the columns that ``log_extra`` added, and
``advantage``, but no tokens. Prompts and completions are texts or lists of chat messages. ms-swift writes the same
columns as lists, one line of ``completions.jsonl`` per log, with other columns after ``advantages``, and with Megatron
``gen_step`` in place of the step. The first versions of TRL had a column ``reward`` instead of the advantage, as
ms-swift has with Ray. In a distillation, there is neither.
"""

import math
from collections.abc import Iterable
from typing import Any

from cavesson.importers.fields import conversation, group_of, parts_of, reward_of, scored, with_rest
from cavesson.importers.rollout import Broken, Format, ImportedRollout, Origin
from cavesson.importers.samples import samples_of
from cavesson.importers.steps import step_at
from cavesson.importers.turns import turns_of


def rollouts(record: dict[str, Any], place: Origin) -> Iterable[ImportedRollout]:
    """Return the rollouts of one row or line."""
    for key in ("prompt", "completion"):
        if key not in record:
            raise Broken(f"{key!r} is missing, expected a string or a list of messages")
    return [_rollout(row, place) for row in samples_of(record, "completion")]


def _rollout(record: dict[str, Any], place: Origin) -> ImportedRollout:
    row: dict[str, Any] = {key: conversation(record[name], name) for key, name in _TEXTS.items()}
    row["group"] = group_of(row["prompt"])
    total = [] if _ADVANTAGES & record.keys() else ["reward"]
    parts = parts_of(record, place, without=[*_KNOWN, *total])
    row |= {"reward_parts": parts or None}
    row["reward"] = _sum(record, parts) if not total else reward_of(record, "reward") if "reward" in record else None
    used = [*_STEPS, *_TEXTS.values(), *parts, *(scored("reward", record) if total else [])]
    turns = turns_of(record["completion"])
    step = step_at(record, place, next((name for name in _STEPS if name in record), "step"))
    return ImportedRollout(step, with_rest(row, record, used, place), {}, 0, turns=turns)


def _sum(record: dict[str, Any], parts: dict[str, float]) -> float | None:
    """Return the unweighted sum of the columns of reward functions; None if none of them has judged the response.

    These hold numbers; columns of other kinds are extra ones, and count only if there are no others.
    """
    if not parts and any(record[name] is None for name in record.keys() - set(_KNOWN)):
        return None
    if not parts:
        raise Broken("no reward was measured: there is no number besides step and advantage")
    names = list(record)
    last = names.index("advantages") if "advantages" in names else len(names)
    numbers = [name for name in parts if not isinstance(record[name], bool | str) and names.index(name) < last]
    measured = [parts[name] for name in numbers or parts if not math.isnan(parts[name])]
    return sum(measured) if measured else None


_TEXTS = {"prompt": "prompt", "response": "completion"}
_ADVANTAGES = {"advantage", "advantages"}
_STEPS = ("step", "gen_step")
_ENDS = (*((name,) for name in sorted(_ADVANTAGES)), ("reward",), ())
_BARE = {*_STEPS, "prompt", "completion", "image", "images"}
_KNOWN = (*_STEPS, "prompt", "completion", *_ADVANTAGES)
FORMAT = Format(
    "trl",
    "TRL and ms-swift: the files or tables of log_completions",
    ("completions_*.parquet", "completions.jsonl", "*.parquet", "completions*.table.json", "*.table.json", "*.db/*/*"),
    tuple(frozenset({step, "prompt", "completion", *end}) for step in _STEPS for end in _ENDS),
    rollouts,
    accepts=lambda record: bool(record.keys() & set().union(*_ENDS)) or record.keys() <= _BARE,
    new_tables=True,
)
