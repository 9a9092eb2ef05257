"""GRPO learns from the same responses what TRL's learns: ours are sampled, recorded and given to TRL.

With several optimiser steps per batch of responses TRL logs each, and ours their mean.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from parity_helpers import BATCH_SIZE, STEPS, TOLERANCE, build, losses, save_model, write_rows

import cavesson

pytest.importorskip("trl", reason="TRL is not installed")
import trl_runs

GROUP = 4
LONGEST = 8
SLOWLY = 3e-4  # so that responses stay uneven
PROMPTS = ("The ferry", "A dog and its", "On the table", "My neighbour", "Rain", "At noon the", "We", "Two")
REWARD = """
def uneven(prompts, responses, **columns):
    return [sum(map(ord, response)) % 7 / 3 - 1 for response in responses]
"""
EXACT_KL = {"beta": 0.3, "use_bias_correction_kl": False}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "token mean": ({"loss_type": "dapo"}, {}),
    "sequence mean, KL": (
        {"loss_type": "grpo", **EXACT_KL},
        {"grpo": {"normalise": "sequence"}, "kl": {"coef": 0.3}},
    ),
    "token mean, KL, two updates": (
        {"loss_type": "dapo", "num_iterations": 2, **EXACT_KL},
        {"kl": {"coef": 0.3}, "update": {"epochs": 2}},
    ),
    "no standard deviation, constant": (
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        {"grpo": {"normalise": "constant", "scale": "none"}},
    ),
    "standard deviation of the step": ({"loss_type": "dapo", "scale_rewards": "batch"}, {"grpo": {"scale": "batch"}}),
    "sequence ratio, two updates": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2},
        {"grpo": {"normalise": "sequence", "ratio": "sequence"}, "update": {"epochs": 2}},
    ),
    "clip higher, three updates": (
        {"loss_type": "dapo", "num_iterations": 3, "epsilon": 0.01, "epsilon_high": 0.02},
        {"grpo": {"clip_low": 0.01, "clip_high": 0.02}, "update": {"epochs": 3}},
    ),
    "without what was cut": (
        {"loss_type": "dapo", "mask_truncated_completions": True},
        {"grpo": {"overlong": "filter"}},
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned to end some of its responses early: TRL cannot take empty ones."""
    folder = tmp_path_factory.mktemp("model")
    rows = [{"prompt": prompt, "completion": " well"[: 1 + i % 5]} for i, prompt in enumerate(PROMPTS)]
    start = save_model(folder / "start")
    build("sft", folder / "run", start, write_rows(folder / "rows.jsonl", rows), epochs=15).run(lambda *_: None)
    return folder / "run" / "model"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_trl(tmp_path: Path, model: Path, case: str) -> None:
    theirs, ours = CASES[case]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    (tmp_path / "uneven.py").write_text(REWARD)
    common: dict[str, Any] = {
        "optimizer": {"learning_rate": SLOWLY},
        "steps": STEPS,
        "samples_per_prompt": GROUP,
        "sampling": {"max_new_tokens": LONGEST},
        "rewards": [{"use": f"{tmp_path}/uneven.py:uneven"}],
    }
    training = build("grpo", tmp_path / "run", model, prompts, **{**common, **ours})
    seen = losses(training, "loss/total")
    if training.settings.grpo.normalise == "constant":  # the metric is a mean over tokens whatever the loss is
        tokens = cavesson.open(tmp_path / "run").steps()["optim/weight"].to_pylist()
        seen = [loss * count / (BATCH_SIZE * LONGEST) for loss, count in zip(seen, tokens, strict=True)]
    finish = cavesson.open(tmp_path / "run").rows(["finish_reason"])["finish_reason"].to_pylist()
    assert set(finish) == {"eos", "length"}
    settings = {"num_generations": GROUP, "max_completion_length": LONGEST, **theirs}
    expected = trl_runs.grpo(str(model), *recorded(tmp_path / "run"), SLOWLY, **settings)
    per_step = len(expected) // STEPS
    assert seen == pytest.approx([mean(expected[i * per_step :][:per_step]) for i in range(STEPS)], abs=TOLERANCE)
    assert max(map(abs, seen)) > 50 * TOLERANCE


def recorded(folder: Path) -> tuple[list[str], list[list[Sequence[int]]], list[list[float]]]:
    """Prompts, responses as token ids and rewards, by step."""
    run = cavesson.open(folder)
    prompts, responses, rewards = [], [], []
    for step in range(STEPS):
        rows = run.rows(steps=[step]).sort_by("sample").to_pylist()
        assert len(rows) == BATCH_SIZE
        prompts += [row["prompt"] for row in rows[::GROUP]]
        tokens = run.tokens(step).to_pylist()
        responses.append([[t["token_id"] for t in tokens if t["sample"] == row["sample"]] for row in rows])
        rewards.append([row["reward"] for row in rows])
    return prompts, responses, rewards
