"""Runs that are healthy but for what a test changes."""

from pathlib import Path
from typing import Any

from settings_helpers import changed

from cavesson.config import check
from cavesson.findings.finding import Finding, Result
from cavesson.registry import ALGORITHMS

PROMPTS = ("The first", "A second one", "Some third prompt", "And a fourth")


def run_of(command: str, folder: Path, **changes: Any) -> Any:
    """The settings of a healthy run on the built-in model, with changes such as `kl__coef=0.1` laid over them."""
    data = folder / "rows.jsonl"
    if not data.exists():
        data.write_text("\n".join(f'{{"prompt": "{prompt}", "response": " is here."}}' for prompt in PROMPTS))
    values: dict[str, Any] = {"run": folder / "run", "model": {"path": "tiny"}, "data": {"path": str(data)}}
    values |= {"steps": 20, "batch_size": 8, "optimizer": {"learning_rate": 1e-3}}
    if command in ("ppo", "grpo", "rloo", "raft"):
        values |= {"rewards": [{"use": "lowercase"}], "sampling": {"max_new_tokens": 8}}
    return check(ALGORITHMS[command].settings, changed(values, changes), "the test")


def found(results: Any) -> dict[str, str]:
    """Findings by the name of their check: error, warning or note."""
    listed: list[Result] = list(results)
    return {one.rule: one.severity for one in listed if isinstance(one, Finding)}
