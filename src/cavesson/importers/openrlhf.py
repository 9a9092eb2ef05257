"""Import OpenRLHF's generated samples. https://github.com/OpenRLHF/OpenRLHF.

Two kinds of files are read: the ``.jsonl`` that its batch inference writes (``input, output, reward``; all of it is
step 0), and the table that its trainer logs to Weights & Biases, ``train/generated_samples`` (``global_step, text,
reward``), as the ``.table.json`` in that run's folder. The trainer logs one sample per step, with prompt and response
in one text.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from cavesson.importers.fields import group_of, number_of, step_of, text_of, with_rest
from cavesson.importers.rollout import Format, ImportedRollout, Origin


def rollouts(record: dict[str, Any], place: Origin) -> Iterable[ImportedRollout]:
    """Return the rollout of one line, or of one row of the table."""
    row: dict[str, Any]
    if "global_step" in record:
        step = step_of(record, "global_step")
        row = {"prompt": "", "response": text_of(record, "text"), "reward": number_of(record, "reward")}
        return [ImportedRollout(step, with_rest(row, record, ("global_step", "text", "reward"), place), {}, 0)]
    row = {"prompt": text_of(record, "input"), "response": text_of(record, "output")}
    row |= {"reward": number_of(record, "reward"), "group": group_of(row["prompt"])}
    return [ImportedRollout(0, with_rest(row, record, ("input", "output", "reward"), place), {}, 0)]


def _recognises(record: Mapping[str, Any]) -> bool:
    keys = record.keys()
    return {"global_step", "text", "reward"} <= keys or ({"input", "output", "reward"} <= keys and "step" not in keys)


FORMAT = Format(
    "openrlhf",
    "OpenRLHF: .jsonl of its batch inference, or the table of samples in a Weights & Biases run",
    ("*.jsonl", "**/generated_samples*.table.json"),
    _recognises,
    rollouts,
)
