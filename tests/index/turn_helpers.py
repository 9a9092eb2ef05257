"""Runs whose turns say what their responses lack, as in imports; what an episode holds follows from step and sample."""

from pathlib import Path
from typing import Any

import numpy as np
from index_helpers import rows_of, tokens_of

from cavesson.record import Recorder, begin_attempt

TOOLS = ["search", "multiply", "Đọc", None]
WORDS = ["alpha", "beta gamma", "42", "音乐", "Timed out", "#1", "É", ""]


def turns_of(step: int, sample: int) -> list[dict[str, Any]]:
    """The turns of an episode; every fifth rollout has none."""
    generator = np.random.default_rng([step, sample, 7])
    if sample % 5 == 4:
        return []
    return [_turn(generator) for _ in range(int(generator.integers(1, 7)))]


def _turn(generator: np.random.Generator) -> dict[str, Any]:
    def some(values: list[Any]) -> Any:
        return values[int(generator.integers(len(values)))]

    role = some(["assistant", "tool", "tool", "user"])
    turn = {"role": role, "text": some([*WORDS, None])}
    if role != "tool":
        return turn
    error = some([None, None, "Timed out after 2 s", "no such key: beta"])
    return turn | {
        "name": some(TOOLS),
        "arguments": some(['{"query": "alpha beta"}', '{"a": 6, "b": 7}', "not JSON", None]),
        "error": error,
        "seconds": some([None, 0.0, 0.5, 2.0, 2.5]),
    }


def record_turns(folder: Path, steps: range, *, batch: int = 10, attempt: int | None = None) -> None:
    attempt = begin_attempt(folder, start_step=steps[0]) if attempt is None else attempt
    with Recorder(folder, attempt=attempt) as recorder:
        for step in steps:
            lines = [{"sample": sample} | turn for sample in range(batch) for turn in turns_of(step, sample)]
            names = dict.fromkeys(name for line in lines for name in line)
            turns = {name: [line.get(name) for line in lines] for name in names}
            rows = rows_of(step, batch) | {"response": [f"response {sample}" for sample in range(batch)]}
            recorder.rollouts(step, rows, tokens_of(step, batch), turns)
