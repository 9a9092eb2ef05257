"""Import verl's ``trainer.rollout_data_dir`` and ``validation_data_dir``: one ``{step}.jsonl`` per step.

Source: https://github.com/volcengine/verl.

A line has ``input, output, gts, score, step`` and everything else that the reward function returned, but no tokens.
"""

from collections.abc import Iterable
from typing import Any

from cavesson.importers.fields import group_of, parts_of, reward_of, scored, text_of, to_json, with_rest
from cavesson.importers.rollout import Format, ImportedRollout, Origin
from cavesson.importers.steps import step_at
from cavesson.importers.turns import turns_of


def rollouts(record: dict[str, Any], place: Origin) -> Iterable[ImportedRollout]:
    """Return the rollout of one line; other numbers and truth values of the reward function are parts of the reward."""
    row: dict[str, Any] = {"prompt": text_of(record, "input"), "response": text_of(record, "output")}
    row["reward"] = reward_of(record, "score")
    if (truth := record.get("gts")) is not None:
        row["ground_truth"] = truth if isinstance(truth, str) else to_json(truth)
    row["group"] = group_of(row["prompt"])
    if parts := parts_of(record, place, without=_KNOWN):
        row["reward_parts"] = parts
    used = ["input", "output", "step", "gts", *scored("score", record), *parts]
    turns = turns_of(record["output"])
    return [ImportedRollout(step_at(record, place), with_rest(row, record, used, place), {}, 0, turns=turns)]


_KNOWN = ("input", "output", "score", "step", "gts")
FORMAT = Format(
    "verl",
    "verl: rollout_data_dir, one .jsonl file per step",
    ("*.jsonl",),
    (frozenset({"input", "output", "score"}),),
    rollouts,
)
