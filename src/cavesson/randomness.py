"""Random numbers that depend on where they are used, not on what was drawn before.

Every draw is identified by (seed, purpose, step, row). Resuming, changing the number of processes or changing the
batch size therefore gives the same numbers, and there is no generator state to save.
"""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.random import Generator, Philox
from numpy.typing import NDArray


class Purpose(IntEnum):
    """The purpose of a stream of random numbers; two purposes never share numbers."""

    TOKENS = 1
    LENGTHS = 2
    PROMPT_ORDER = 3
    MINI_BATCHES = 4
    GLOBAL = 5
    INITIAL_WEIGHTS = 6
    NEFTUNE = 7
    EXAMINATION = 8
    MERGED_WEIGHTS = 9
    GIVEN = 10


def generator(seed: int, purpose: Purpose, step: int = 0, row: int = 0) -> Generator:
    """Return the stream of this seed, purpose, step and row (Philox: Salmon et al. 2011, a counter-based generator)."""
    return Generator(Philox(counter=[0, row, step, int(purpose)], key=seed))


def token_uniforms(
    seed: int, step: int, rows: Sequence[int], length: int, starts: Sequence[int] | None = None
) -> NDArray[np.float64]:
    """Return uniform numbers in [0, 1), one per row and position after the prompt, `[len(rows), length]`.

    They are those of the positions from `starts` `[len(rows)]` on, by default from 0.
    """
    drawn = zip(rows, starts or [0] * len(rows), strict=True)
    return np.stack([generator(seed, Purpose.TOKENS, step, row).random(at + length)[at:] for row, at in drawn])
