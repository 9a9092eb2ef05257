"""Import verl's ``trainer.rollout_data_dir`` and ``validation_data_dir``: one ``{step}.jsonl`` per step.

Source: https://github.com/volcengine/verl.

A line has ``input, output, gts, score, step`` and everything else that the reward function returned, but no tokens.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from cavesson.importers.fields import group_of, number_of, step_of, text_of, to_json, with_rest
from cavesson.importers.packing import is_number, is_text
from cavesson.importers.rollout import Format, ImportedRollout, Origin


def rollouts(record: dict[str, Any], place: Origin) -> Iterable[ImportedRollout]:
    """Return the rollout of one line; other numbers that the reward function returned become parts of the reward."""
    row: dict[str, Any] = {"prompt": text_of(record, "input"), "response": text_of(record, "output")}
    row["reward"] = number_of(record, "score")
    used = ["input", "output", "score", "step", "gts"]
    if (truth := record.get("gts")) is not None:
        row["ground_truth"] = truth if isinstance(truth, str) else to_json(truth)
    row["group"] = group_of(row["prompt"])
    if parts := {key: float(v) for key, v in record.items() if key not in used and is_text(key) and is_number(v)}:
        row["reward_parts"] = parts
    return [ImportedRollout(step_of(record), with_rest(row, record, [*used, *parts], place), {}, 0)]


def _recognises(record: Mapping[str, Any]) -> bool:
    return {"input", "output", "score", "step"} <= record.keys()


FORMAT = Format("verl", "verl: rollout_data_dir, one .jsonl file per step", ("*.jsonl",), _recognises, rollouts)
