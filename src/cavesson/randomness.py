"""Random numbers that depend on where they are used, not on what was drawn before.

Every draw is identified by (seed, purpose, step, row). Resuming, changing the number of processes or changing the
batch size therefore gives the same numbers, and there is no generator state to save.
"""

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


def generator(seed: int, purpose: Purpose, step: int = 0, row: int = 0) -> Generator:
    """Return the stream of this seed, purpose, step and row (Philox: Salmon et al. 2011, a counter-based generator)."""
    return Generator(Philox(counter=[0, row, step, int(purpose)], key=seed))


def token_uniforms(seed: int, step: int, rows: range, length: int) -> NDArray[np.float64]:
    """Return uniform numbers in [0, 1), one per row and response position, `[len(rows), length]`."""
    return np.stack([generator(seed, Purpose.TOKENS, step, row).random(length) for row in rows])
