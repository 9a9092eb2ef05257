"""What lists show of prompts: what each asks, without its system turn and the beginning that all of them share."""

from collections.abc import Iterable

import numpy as np

from cavesson.board.excerpts import LENGTH
from cavesson.board.runs import OpenRun
from cavesson.index.snapshot import Snapshot
from cavesson.text.chat_marks import asked

SAMPLED = 32
"""Rollouts whose prompts show what the prompts of a run share."""
LEAST = 40
"""Characters; a shorter beginning is shown with each prompt."""


def shown(run: OpenRun, snapshot: Snapshot, prompts: Iterable[str]) -> list[str]:
    """Return what a list shows of some prompts of a run, given their beginnings; a sign is where all begin alike."""
    key = snapshot.rows.bit_length()
    shared = run.cache.get("shared beginning", key, lambda: _shared_beginning(run, snapshot), most=1)
    texts = map(asked, prompts)
    return [f"…{rest}"[:LENGTH] if (rest := _rest(text, shared)) else text[:LENGTH] for text in texts]


def _rest(text: str, shared: str) -> str:
    return text.removeprefix(shared) if shared and text.startswith(shared) else ""


def _shared_beginning(run: OpenRun, snapshot: Snapshot) -> str:
    """Return the beginning, in whole words, that different prompts of a run have in common; empty if it is short."""
    rows = np.unique(np.linspace(0, snapshot.rows - 1, SAMPLED).astype(np.int64))
    texts = {asked(text) for text in run.texts(snapshot, rows).prompt if text}
    if len(texts) < 2:
        return ""
    low, high = min(texts), max(texts)  # what these two have in common, those between have, too
    size = next((place for place, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    words = low[: max(low.rfind(" ", 0, size), low.rfind("\n", 0, size)) + 1]
    return words if len(words) >= LEAST else ""
