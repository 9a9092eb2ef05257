"""Runs to merge, and all that can be read of them."""

from pathlib import Path
from typing import Any

import numpy as np
from record_helpers import plain

import cavesson
from cavesson.record import Recorder


def record(folder: Path | str, steps: range, attempt: int = 0, rank: int = 0, count: int = 3) -> None:
    """Rollouts whose numbers follow from step, sample and attempt; their groups are not in the order of the samples."""
    with Recorder(folder, attempt=attempt, rank=rank, interval=0) as out:
        for step in steps:
            sample = rank * count + np.arange(count)[::-1]
            rows: dict[str, Any] = {"sample": sample, "prompt": [f"p{s}" for s in sample], "response": ["r"] * count}
            rows |= {
                "reward": step + sample / 16,
                "group": sample % 2,
                "reward_parts": [{"a": float(s)} for s in sample],
            }
            mask = np.arange(4) < ((sample + step) % 4)[:, None]
            tokens = {"mask": mask, "token_id": np.arange(4 * count).reshape(count, 4)}
            if step % 3:
                tokens["value"] = np.full((count, 4), attempt + step / 4)
            out.rollouts(step, rows, tokens)
            out.metrics(step, {f"metric/{step % 2}": step + attempt})


def answers(folder: Path | str) -> str:
    """Everything that can be read, as one text."""
    run = cavesson.open(folder)
    rows, steps = run.rows(), run.steps()
    columns = sorted(steps.column_names)
    found: list[Any] = [rows.to_pylist(maps_as_pydicts="strict"), steps.select(columns).to_pylist()]
    for step in rows["step"].unique().to_pylist():
        found.append(run.tokens(step).to_pylist())
        found.append(run.rows(["reward", "sample"], [step]).to_pylist())
    for row in rows.to_pylist()[::5]:
        found.append(run.rollout(row["step"], row["sample"]).tokens.to_pylist())
    found.append(
        run.fetch(list(zip(*(rows[name].to_pylist() for name in ("step", "sample")), strict=True))).to_pylist()
    )
    found.append(run.rollups().to_pylist())
    found.append(run.sql("SELECT step, sample, count(*), sum(value) FROM tokens GROUP BY ALL ORDER BY ALL").fetchall())
    found.append(run.sql("SELECT * FROM rows ORDER BY step, sample").fetchall())
    return plain(found)


def files(folder: Path, pattern: str = "record/*") -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))
