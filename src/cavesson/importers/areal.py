"""Import AReaL's trajectories, ``rollout/{version}/{task}.jsonl`` and ``eval-rollout/{version}/{task}.jsonl``.

Source: https://github.com/inclusionAI/AReaL.

A line has ``prompt, completion, reward``, and the versions of the weights that sampled its first and last tokens.
"""

from collections.abc import Iterable
from typing import Any

from cavesson.importers.fields import group_of, reward_of, scored, step_of, text_of, with_rest
from cavesson.importers.rollout import Format, ImportedRollout, Origin
from cavesson.importers.turns import turns_of


def rollouts(record: dict[str, Any], place: Origin) -> Iterable[ImportedRollout]:
    """Return the rollout of one line; its step is the newest version of the weights that sampled it."""
    row: dict[str, Any] = {"prompt": text_of(record, "prompt"), "response": text_of(record, "completion")}
    row |= {"reward": reward_of(record, "reward"), "group": group_of(row["prompt"])}
    row["split"] = "eval" if "eval-rollout" in place.path.parts else "train"
    row["policy_version"] = step_of(record, "head_version")
    used = ("prompt", "completion", "head_version", "tail_version", *scored("reward", record))
    step, turns = step_of(record, "tail_version"), turns_of(record["completion"])
    return [ImportedRollout(step, with_rest(row, record, used, place), {}, 0, turns=turns)]


FORMAT = Format(
    "areal",
    "AReaL: rollout/*/*.jsonl and eval-rollout/*/*.jsonl",
    ("*.jsonl",),
    (frozenset({"prompt", "completion", "reward", "head_version", "tail_version"}),),
    rollouts,
    one_run=False,
)
