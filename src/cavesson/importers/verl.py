"""Import verl's ``trainer.rollout_data_dir`` and ``validation_data_dir``: one ``{step}.jsonl`` per step.

Source: https://github.com/volcengine/verl.

A line has ``input, output, gts, score, step`` and everything else that the reward function returned, but no tokens. Of
validation, verl also logs a few responses to Weights & Biases, ``val/generations``: a row of the table is a step, with
``input_1, output_1, score_1, input_2, …``, and each table repeats the rows of the one before.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cavesson.importers.fields import group_of, parts_of, reward_of, scored, text_of, to_json, with_rest
from cavesson.importers.rollout import Format, ImportedRollout, Origin
from cavesson.importers.steps import step_at
from cavesson.importers.turns import turns_of
from cavesson.record.splits import HELD_OUT


def rollouts(record: dict[str, Any], place: Origin) -> Iterable[ImportedRollout]:
    """Return the rollouts of one line or row; other numbers of the reward function are parts of the reward."""
    if "input" not in record and record.keys() >= TABLE_KEYS:
        return [_rollout(one, place, HELD_OUT) for one in _in_columns(record)]
    return [_rollout(record, place, None)]


def _in_columns(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the samples of a row of the table, each with what is in other columns."""
    samples = {key: _COLUMN.fullmatch(key) for key in record}
    others = {key: value for key, value in record.items() if samples[key] is None}
    numbers = dict.fromkeys(found["number"] for found in samples.values() if found)
    for number in numbers:
        yield others | {name: record[f"{name}_{number}"] for name in _NAMES if f"{name}_{number}" in record}


def _rollout(record: dict[str, Any], place: Origin, split: str | None) -> ImportedRollout:
    row: dict[str, Any] = {"prompt": text_of(record, "input"), "response": text_of(record, "output")}
    row["reward"] = reward_of(record, "score")
    if (truth := record.get("gts")) is not None:
        row["ground_truth"] = truth if isinstance(truth, str) else to_json(truth)
    row["group"] = group_of(row["prompt"])
    if parts := parts_of(record, place, without=_KNOWN):
        row["reward_parts"] = parts
    row["split"] = split
    used = ["input", "output", "step", "gts", *scored("score", record), *parts]
    turns = turns_of(record["output"])
    return ImportedRollout(step_at(record, place), with_rest(row, record, used, place), {}, 0, turns=turns)


_NAMES = ("input", "output", "score")
_COLUMN = re.compile(rf"(?:{'|'.join(_NAMES)})_(?P<number>[1-9][0-9]*)")
TABLE_KEYS = frozenset({"step", *(f"{name}_1" for name in _NAMES)})
_KNOWN = ("input", "output", "score", "step", "gts")
FORMAT = Format(
    "verl",
    "verl: rollout_data_dir, one .jsonl file per step",
    ("*.jsonl", "*.table.json"),
    (frozenset(_NAMES), TABLE_KEYS),
    rollouts,
)
