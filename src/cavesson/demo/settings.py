"""The settings of the demo."""

import os
from collections.abc import Sequence
from pathlib import Path

from cavesson.algorithms.ppo import PPORun
from cavesson.config import load
from cavesson.errors import UserError

RECIPE = Path(__file__).with_name("demo.toml")


def demo_settings(run: Path | None, flags: Sequence[str] = ()) -> PPORun:
    """Return the settings of the demo in the folder `run`; None: the first free one of runs/demo, runs/demo-2, ….

    Raises:
        UserError: a flag is not valid for the demo.
    """
    settings = load(PPORun, RECIPE, [*flags, "--run", str(run or _free(Path("runs/demo")))])
    if not settings.sampling.declared.local:
        raise UserError("the demo samples with transformers; remove --sampling.engine")
    return settings


def _free(folder: Path) -> Path:
    candidates = [folder, *(folder.with_name(f"{folder.name}-{n}") for n in range(2, 10_000))]
    return next(candidate for candidate in candidates if not os.path.lexists(candidate))
