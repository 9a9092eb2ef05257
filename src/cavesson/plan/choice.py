"""What a run leaves to the plan of its memory: which layers are recomputed, and how many tokens a micro-batch has."""

from collections.abc import Callable, Iterator
from typing import Any

from cavesson.algorithms.runs import ExampleRun, RolloutRun
from cavesson.models.layers import Recomputation
from cavesson.train.by_plan import left_to_plan, with_choices

RECOMPUTED, TOKENS = "model.gradient_checkpointing", "update.micro_batch_tokens"
_MODES: tuple[Recomputation, ...] = (False, "half", True)
_LADDER = (16384, 8192, 4096, 2048, 1024)
_ENOUGH = 8192
"""Tokens at which a pass is about as fast as it gets: with fewer, recomputing layers costs less than smaller passes."""
ROOM = 0.9
"""Share of the free memory that a plan may fill; the allocator needs the rest."""


def chosen(settings: RolloutRun | ExampleRun, fits: Callable[[RolloutRun | ExampleRun], bool]) -> dict[str, Any]:
    """Return the values of the settings that are left to the plan: the fastest that fit, or those that need the least.

    Args:
        settings: of the run.
        fits: whether a run with these settings has enough memory.
    """
    names = left_to_plan(settings)
    values: dict[str, Any] = {}
    for values in _from_fastest(names) if names else ():
        if fits(with_choices(settings, values)):
            break
    return values


def _from_fastest(names: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the values of these settings, from the fastest to those that need the least memory."""
    modes = _MODES if RECOMPUTED in names else (None,)
    ladder = _LADDER if TOKENS in names else (None,)
    for large in (True, False):
        for mode in modes:
            for tokens in ladder:
                if (tokens is None or tokens >= _ENOUGH) is large and (large or mode is modes[-1]):
                    values = {RECOMPUTED: mode, TOKENS: tokens}
                    yield {name: values[name] for name in names}
