from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import cavesson.record
from cavesson.board.indexing import Indexing
from cavesson.index.build import Builder
from cavesson.index.snapshot import Snapshot, snapshot
from cavesson.record import Recorder, begin_attempt, write_run
from cavesson.record.rescored import SCHEMA, description, write_rescored

WORDS = [
    "the",
    "concert",
    "on",
    "Friday",
    "night",
    "was",
    "great",
    ":)",
    "##",
    "café",
    "Đường",
    "音乐会",
    "很好",
    "so-so",
    "refund",
    "$5",
    "É́",
    "end",
]


def new_run(folder: Path, info: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_run(folder, {"algorithm": "grpo"} | (info or {}))
    return folder


def followed(*runs: tuple[str, Path]) -> Indexing:
    """Start the processes that index some runs, given by their paths and the folders of their indexes."""
    indexing = Indexing()
    for run in runs:
        indexing.add(*run)
    return indexing


def record(folder: Path, steps: Sequence[int], *, batch: int = 6, attempt: int | None = None, **columns: Any) -> None:
    """Record a batch per step; what a rollout holds follows from its step and sample."""
    if attempt is None:
        attempt = begin_attempt(folder, start_step=steps[0])
    with Recorder(folder, attempt=attempt) as recorder:
        for step in steps:
            recorder.rollouts(step, rows_of(step, batch) | columns, tokens_of(step, batch))
            recorder.metrics(
                step, {"reward/mean": float(np.mean(rows_of(step, batch)["reward"])), "loss": 1 / (step + 1)}
            )


def rows_of(step: int, batch: int) -> dict[str, Any]:
    generator = np.random.default_rng(step)
    return {
        "sample": np.arange(batch),
        "group": np.arange(batch) // 2,
        "split": ["train"] * batch,
        "prompt": [f"prompt {i // 2}" for i in range(batch)],
        "response": [text_of(step, i) for i in range(batch)],
        "reward": np.round(generator.normal(step, 1, batch), 3),
        "reward_parts": [{"good": float(i), "bad/../": float(-i)} for i in range(batch)],
        "ref_reward": np.full(batch, 0.5),
        "finish_reason": ["eos" if i % 2 else "length" for i in range(batch)],
    }


def text_of(step: int, sample: int) -> str:
    generator = np.random.default_rng([step, sample])
    return " ".join(generator.choice(WORDS, int(generator.integers(3, 12))))


def tokens_of(step: int, batch: int, width: int = 10) -> dict[str, np.ndarray]:
    generator = np.random.default_rng([step, 99])
    lengths = generator.integers(1, width + 1, batch)
    logprob = -generator.random((batch, width))
    return {
        "mask": np.arange(width) < lengths[:, None],
        "token_id": generator.integers(0, 50, (batch, width)),
        "logprob": logprob,
        "ref_logprob": logprob - 0.1 * step,
    }


def indexed(folder: Path) -> Snapshot:
    """Brings the index up to date and return it."""
    builder = Builder(cavesson.record.open(folder), folder / "index")
    builder.update()
    while builder.advance():
        pass
    return snapshot(folder / "index")


def add_rewards(folder: Path, name: str, steps: Iterable[int], of: Callable[[pa.Table], Any]) -> None:
    """Write rewards of some steps as ``cavesson rescore`` does; ``of`` gets their rows."""
    run = cavesson.record.open(folder)
    rows = run.rows(None, list(steps))
    content = {column: rows[column] for column in ("step", "attempt", "sample")} | {"reward": pa.array(of(rows))}
    missing = {field.name: pa.nulls(len(rows), field.type) for field in SCHEMA if field.name not in content}
    (folder / "rescored" / name).mkdir(parents=True, exist_ok=True)
    run.storage.create(description(name), b"{}")
    write_rescored(run.storage, name, pa.table(content | missing).select(SCHEMA.names).cast(SCHEMA))
