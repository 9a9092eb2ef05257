"""Real training of the tiny model, a few steps of each kind: the doctor names no error in it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from settings_helpers import changed

import cavesson
from cavesson.algorithms.distill import DistillRun
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.failures import not_excluded
from cavesson.doctor.rules import RULES
from cavesson.models.tiny import tiny_model, tiny_tokenizer
from cavesson.registry import ALGORITHMS
from cavesson.train.run import Training

PROMPTS = ("On the table", "My", "The morning train was", "A dog and", "Yesterday we", "It", "Behind the door", "Who")
LORA = {"rank": 4, "alpha": 8}


def letters(prompts: Sequence[str], responses: Sequence[str], **_: Any) -> list[float]:
    return [sum(map(str.islower, one)) / max(len(one), 1) for one in responses]


def verdict(prompts: Sequence[str], responses: Sequence[str], **_: Any) -> list[float]:
    return [float(any(map(str.islower, one))) for one in responses]


def some(prompts: Sequence[str], responses: Sequence[str], **_: Any) -> list[float | None]:
    """Every third response is not judged."""
    return [None if sum(map(ord, one)) % 3 == 0 else len(set(one)) / 8 for one in responses]


Rewards = Callable[..., list[Any]]
KINDS: dict[str, tuple[str, Rewards, dict[str, Any]]] = {
    "ppo": ("ppo", letters, {}),
    "grpo": ("grpo", verdict, {"samples_per_prompt": 4}),
    "ppo without a penalty": ("ppo", verdict, {"kl__coef": 0.0}),
    "ppo of adapters": ("ppo", letters, {"model__lora": LORA}),
    "grpo with a penalty in its loss": ("grpo", letters, {"samples_per_prompt": 4, "kl__coef": 0.1}),
    "grpo with a penalty in its reward": (
        "grpo", letters, {"samples_per_prompt": 4, "kl__coef": 0.1, "grpo__kl_in": "reward"},
    ),
    "unscored responses": ("grpo", some, {"samples_per_prompt": 4}),
    "short responses": ("grpo", verdict, {"samples_per_prompt": 4, "sampling__max_new_tokens": 2}),
    "rloo": ("rloo", letters, {"samples_per_prompt": 4, "kl__coef": 0.05}),
    "raft": ("raft", letters, {"samples_per_prompt": 4, "raft__k": 4}),
    "hardly any learning": ("grpo", letters, {"samples_per_prompt": 4, "optimizer__learning_rate": 1e-8}),
    "sharper sampling": ("grpo", letters, {"samples_per_prompt": 4, "sampling__temperature": 0.7}),
}  # fmt: skip
QUICK = ("ppo", "grpo")


@pytest.mark.parametrize(
    "kind", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in KINDS]
)
def test_a_trained_run_has_no_error(kind: str, tmp_path: Path) -> None:
    algorithm, rewards, changes = KINDS[kind]
    values: dict[str, Any] = {
        "run": tmp_path / "run",
        "steps": 12,
        "batch_size": 16,
        "model": {"device": "cpu"},
        "sampling": {"max_new_tokens": 8},
        "optimizer": {"learning_rate": 1e-3},
        "checkpoint": {"every": 0},
        "doctor": {"on_finding": "ignore"},
    }
    settings = ALGORITHMS[algorithm].settings.model_validate(changed(values, changes))
    Training(settings, prompts=PROMPTS, rewards=rewards).run(lambda step, metrics: None)
    found = diagnose(RunData(cavesson.open(tmp_path / "run")), RULES)
    assert [one.rule.name for one in found.findings if one.severity == "error"] == []
    # Cavesson records what it computes: what is open was too short, or not evaluated, and lacks no column.
    assert [need for one in not_excluded(found) for need in one.lacking] == []


def test_given_responses_accuse_nobody(tmp_path: Path) -> None:
    """They are longer than the policy's, end otherwise, and no sampler has drawn them."""
    teacher = tmp_path / "teacher"
    tiny_model(seed=5).save_pretrained(teacher)
    tiny_tokenizer().save_pretrained(teacher)
    settings = DistillRun(
        run=tmp_path / "run",
        steps=16,
        batch_size=32,
        model={"device": "cpu"},
        teacher={"path": str(teacher)},
        distill={"loss_type": "full", "own_share": 0.5},
        sampling={"random_length": (2, 40)},
        optimizer={"learning_rate": 1e-3},
        checkpoint={"every": 0},
        doctor={"on_finding": "ignore"},
    )
    prompts = {"prompt": PROMPTS, "response": [" the same answer to all of them, again and again"] * len(PROMPTS)}
    Training(settings, prompts=prompts).run(lambda step, metrics: None)
    run = cavesson.open(tmp_path / "run")
    assert 150 < run.rows()["split"].to_pylist().count("given") < 350
    found = diagnose(RunData(run), RULES)
    assert [one.rule.name for one in found.findings] == []
