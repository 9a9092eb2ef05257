"""Import OpenRLHF's generated samples. https://github.com/OpenRLHF/OpenRLHF.

Two kinds of files are read: the ``.jsonl`` that its batch inference writes (``input, output, reward``; step 0 if no
name says which), and the table that its trainer logs to Weights & Biases, ``train/generated_samples`` (``global_step,
text, reward``), as the ``.table.json`` in that run's folder. The trainer logs one sample per step, with prompt and
response in one text.
"""

from collections.abc import Iterable
from typing import Any

from cavesson.importers.fields import group_of, reward_of, scored, step_of, text_of, with_rest
from cavesson.importers.rollout import Format, ImportedRollout, Origin
from cavesson.importers.steps import step_in_names


def rollouts(record: dict[str, Any], place: Origin) -> Iterable[ImportedRollout]:
    """Return the rollout of one line, or of one row of the table."""
    row: dict[str, Any]
    if "global_step" in record:
        row, used = {"prompt": "", "response": text_of(record, "text")}, ["global_step", "text"]
        step = step_of(record, "global_step")
    else:
        row, used = {"prompt": text_of(record, "input"), "response": text_of(record, "output")}, ["input", "output"]
        row["group"] = group_of(row["prompt"])
        step = step_in_names(place.names) or 0
    row["reward"] = reward_of(record, "reward")
    return [ImportedRollout(step, with_rest(row, record, [*used, *scored("reward", record)], place), {}, 0)]


FORMAT = Format(
    "openrlhf",
    "OpenRLHF: .jsonl of its batch inference, or the table of samples in a Weights & Biases run",
    ("*.jsonl", "generated_samples*.table.json"),
    (frozenset({"input", "output", "reward"}), frozenset({"global_step", "text", "reward"})),
    rollouts,
    accepts=lambda record: "step" not in record,
    one_run=False,
)
