"""Check of the disk space that a run needs."""

import shutil
from pathlib import Path

from cavesson.algorithms.runs import ExampleRun, RolloutRun
from cavesson.findings.finding import Finding, Results
from cavesson.findings.words import number
from cavesson.train.recording import TOKEN_COLUMNS

BYTES_PER_NUMBER = 2.4
"""On disk, of a number per token: five columns take 11.8 bytes per token (docs/record.md)."""
_BYTES_PER_ROLLOUT = 2000
"""Texts, scalars and statistics."""


def check_disk(settings: RolloutRun | ExampleRun, weights: int, learns: int) -> Results:
    """Compare the free disk space with the size of checkpoints, model and record.

    The model saved at the end has `weights` bytes, a checkpoint's trainable weights and optimiser state `learns`.
    """
    need = disk_need(settings, weights, learns)
    place = next(folder for folder in (settings.run, *settings.run.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    parts = ", ".join(f"{name} {gigabytes(size)}" for name, size in need.items())
    total = sum(need.values())
    yield Finding(
        "disk",
        "error",
        "The disk will run full",
        f"The run writes {gigabytes(total)} to {Path(settings.run).absolute().parent}.",
        "--run on another disk, checkpoint.keep = 1, or model.lora, whose checkpoints are small",
        gigabytes(total),
        f"needed on disk ({parts}); {gigabytes(free)} are free",
    ).unless(total <= free)


def disk_need(settings: RolloutRun | ExampleRun, weights: int, learns: int) -> dict[str, int]:
    """Return the bytes needed on disk, by purpose; while a checkpoint is written, the one it replaces still exists."""
    copies = 1 if settings.checkpoint.is_single else settings.checkpoint.keep + 1
    copies += isinstance(settings, RolloutRun) and settings.checkpoint.updates > 0  # the newest inside a step
    need = {"checkpoints": copies * learns, "model": weights}
    if isinstance(settings, RolloutRun) and settings.record is None:
        rollouts = settings.steps * settings.batch_size
        numbers = len(TOKEN_COLUMNS) + 2  # token and mask
        need["record"] = int(rollouts * (_BYTES_PER_ROLLOUT + settings.longest_episode * numbers * BYTES_PER_NUMBER))
    return need


def gigabytes(size: float) -> str:
    """Format a number of bytes as MB or GB."""
    return f"{number(size / 2**30)} GB" if size >= 2**30 else f"{number(round(size / 2**20, 1))} MB"
