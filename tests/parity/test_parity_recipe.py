"""Recipes that are converted from configurations of TRL train as TRL does: the losses of the first steps agree."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from parity_helpers import (
    BATCH_SIZE,
    LEARNING_RATE,
    STEPS,
    TOLERANCE,
    demonstrations,
    labelled,
    losses,
    pairs,
    save_classifier,
    save_model,
    write_rows,
)
from test_parity_grpo import GROUP, LONGEST, PROMPTS, REWARD, recorded
from test_parity_grpo import model as model  # a fixture
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from cavesson.config import load
from cavesson.integrations.trl_recipe.given import Given
from cavesson.integrations.trl_recipe.recipe import recipe
from cavesson.registry import ALGORITHMS
from cavesson.train.run import Training

pytest.importorskip("trl", reason="TRL is not installed")
import trl_runs

COMMON = {
    "lr_scheduler_type": "constant",
    "max_steps": STEPS,
    "per_device_train_batch_size": BATCH_SIZE,
    "use_cpu": True,
}


def converted(folder: Path, trainer: str, values: dict[str, Any], *flags: str, **rewards: Any) -> Training:
    """Our run of a configuration; the data come in their order."""
    path = folder / "recipe.toml"
    given = Given(trainer, {**COMMON, "output_dir": str(folder / "run"), **values}, **rewards)
    path.write_text(recipe(given))
    return Training(load(ALGORITHMS[given.command].settings, path, ["--data.shuffle", "false", *flags]))


EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "sft, defaults": ("sft", {}),
    "sft, prompts learned": ("sft", {"completion_only_loss": False}),
    "sft, cut, by passes": ("sft", {"max_length": 24, "max_steps": -1, "num_train_epochs": 1}),
    "sft, betas, decay and norm": (
        "sft",
        {"adam_beta1": 0.8, "adam_beta2": 0.95, "weight_decay": 0.1, "max_grad_norm": 0.3},
    ),
    "sft, cosine": ("sft", {"lr_scheduler_type": "cosine"}),
    "dpo, defaults": ("dpo", {}),
    "dpo, beta": ("dpo", {"beta": 0.5, "loss_type": "sigmoid"}),
    "dpo, hinge": ("dpo", {"loss_type": "hinge"}),
    "dpo, ipo": ("dpo", {"loss_type": "ipo"}),
    "dpo, per token": ("dpo", {"loss_type": ["sigmoid_norm"], "adam_epsilon": 1e-6}),
    "cpo, simpo": ("cpo", {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 1.3}),
    "cpo, simpo, smoothed": ("cpo", {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "label_smoothing": 0.2}),
    "cpo, sigmoid": ("cpo", {"cpo_alpha": 0.0}),
    "cpo, ipo": ("cpo", {"loss_type": "ipo", "cpo_alpha": 0.0, "label_smoothing": 0.2}),
    "cpo, hinge": ("cpo", {"loss_type": "hinge", "cpo_alpha": 0.0, "beta": 0.02}),
    "kto, defaults": ("kto", {}),
    "kto, weights and beta": ("kto", {"beta": 0.5, "desirable_weight": 0.5, "undesirable_weight": 1.5}),
    "kto, apo": ("kto", {"loss_type": "apo_zero_unpaired"}),
    "reward, defaults": ("reward-model", {}),
    "reward, centred": ("reward-model", {"center_rewards_coefficient": 0.1}),
    "reward, decay": ("reward-model", {"weight_decay": 0.2, "max_grad_norm": 0.1}),
    "reward, cosine": ("reward-model", {"lr_scheduler_type": "cosine", "adam_beta2": 0.99}),
    "reward, linear": ("reward-model", {"lr_scheduler_type": "linear"}),
}


TRL = {
    "sft": trl_runs.sft,
    "dpo": trl_runs.dpo,
    "cpo": trl_runs.cpo,
    "orpo": trl_runs.orpo,
    "kto": trl_runs.kto,
    "reward-model": trl_runs.reward,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", EXAMPLES)
def test_examples_have_the_losses_of_trl(tmp_path: Path, case: str) -> None:
    trainer, values = EXAMPLES[case]
    is_reward = trainer == "reward-model"
    folder = (save_classifier if is_reward else save_model)(tmp_path / "model")
    rows: Sequence[dict[str, Any]] = {"sft": demonstrations, "kto": labelled}.get(trainer, pairs)()
    given = {"model": str(folder), "dataset": str(write_rows(tmp_path / "rows.jsonl", rows)), **values}
    training = converted(tmp_path, trainer, {"learning_rate": LEARNING_RATE, **given})
    seen = losses(training, {"sft": "loss/nll"}.get(trainer, "loss/total"))
    if is_reward:  # as texts, TRL would append an end token to them
        ids = AutoTokenizer.from_pretrained(folder)
        rows = [
            {f"{one}_ids": ids(row["prompt"] + row[one])["input_ids"] for one in ("chosen", "rejected")} for row in rows
        ]
    expected = TRL[trainer](str(folder), rows, BATCH_SIZE, LEARNING_RATE, **values)
    assert len(seen) == STEPS and abs(expected[0] - expected[-1]) > 50 * TOLERANCE
    assert seen == pytest.approx(expected, abs=TOLERANCE)


def nll(folder: Path, row: dict[str, str]) -> tuple[Tensor, Tensor]:
    """−log p of the tokens of a prompt, without the first, and of its chosen response with the end token."""
    model, ids = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokens = torch.tensor([[*ids(row["prompt"] + row["chosen"])["input_ids"], ids.eos_token_id]])
    with torch.no_grad():
        each = cross_entropy(model(tokens).logits[0, :-1], tokens[0, 1:], reduction="none")
    prompt = len(ids(row["prompt"])["input_ids"]) - 1
    return each[:prompt], each[prompt:]


@pytest.mark.parametrize("trainer", ["cpo", "orpo"])
def test_the_likelihood_is_what_trl_adds_to_losses_without_a_reference(tmp_path: Path, trainer: str) -> None:
    """CPO adds the mean over all tokens of chosen responses; ORPO's mean is over those of their prompts, too.

    Our ORPO takes the mean of every chosen response, then over the pairs.
    """
    folder, rows = save_model(tmp_path / "model"), pairs(BATCH_SIZE)
    given = {"model": str(folder), "dataset": str(write_rows(tmp_path / "rows.jsonl", rows)), "max_steps": 1}
    (seen,) = losses(converted(tmp_path, trainer, {"learning_rate": LEARNING_RATE, **given}), "loss/total")
    (expected,) = TRL[trainer](str(folder), rows, BATCH_SIZE, LEARNING_RATE)
    prompts, responses = zip(*(nll(folder, row) for row in rows), strict=True)
    if trainer == "cpo":
        added = torch.cat(responses).mean()
    else:
        added = torch.cat([*prompts, *responses]).mean() - torch.stack([one.mean() for one in responses]).mean()
    assert abs(added) > 50 * TOLERANCE
    assert expected - seen == pytest.approx(added.item(), abs=TOLERANCE)


def test_trls_warm_up_begins_at_rate_0(tmp_path: Path) -> None:
    """TRL's second batch finds the model untrained: the first step of its warm-up has rate 0, ours 1/n of the peak."""
    folder, rows = save_model(tmp_path / "model"), demonstrations()
    warm = {"warmup_steps": 2, "lr_scheduler_type": "constant_with_warmup"}
    expected = trl_runs.sft(str(folder), rows, BATCH_SIZE, LEARNING_RATE, **warm)
    untrained = {"learning_rate": LEARNING_RATE, "model": str(folder), "warmup_steps": 2}
    for start in (0, 1):
        place = tmp_path / str(start)
        place.mkdir()
        data = write_rows(place / "rows.jsonl", rows[start * BATCH_SIZE :])
        seen = losses(converted(place, "sft", {**untrained, "dataset": str(data)}), "loss/nll")
        assert seen[0] == pytest.approx(expected[start], abs=TOLERANCE)
        assert start or abs(seen[1] - expected[1]) > 50 * TOLERANCE


ROLLOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo, defaults": ("grpo", {}),
    "grpo, first published": ("grpo", {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False}),
    "grpo, unbiased KL, two updates": ("grpo", {"beta": 0.3, "num_iterations": 2}),
    "grpo, cispo": ("grpo", {"loss_type": "cispo", "epsilon_high": 1.01, "num_iterations": 2}),
    "grpo, gspo": (
        "grpo",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "num_iterations": 2},
    ),
    "rloo, defaults": ("rloo", {"beta": 0.0}),
    "rloo, normalised": ("rloo", {"beta": 0.0, "normalize_advantages": True}),
    "rloo, KL in the reward": ("rloo", {"beta": 0.2}),
    "rloo, clipped rewards": ("rloo", {"beta": 0.0, "reward_clip_range": (-0.5, 0.5)}),
    "rloo, two updates": ("rloo", {"beta": 0.0, "num_iterations": 2, "epsilon": 0.01}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", ROLLOUTS)
def test_rollouts_have_the_losses_of_trl(tmp_path: Path, model: Path, case: str) -> None:
    command, values = ROLLOUTS[case]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    (tmp_path / "uneven.py").write_text(REWARD)
    rate = 3e-4
    values = {"num_generations": GROUP, "max_completion_length": LONGEST, **values}
    updates = int(values.get("num_iterations", 1))
    given = {
        "learning_rate": rate,
        "model": str(model),
        "dataset": str(prompts),
        "max_steps": STEPS * updates,
        **values,
    }
    training = converted(tmp_path, command, given, rewards=[f"{tmp_path}/uneven.py:uneven"])
    seen = losses(training, "loss/total")
    run = {"grpo": trl_runs.grpo, "rloo": trl_runs.rloo}[command]
    expected = run(str(model), *recorded(tmp_path / "run"), rate, **values)
    assert len(expected) == STEPS * updates
    assert seen == pytest.approx([mean(expected[i * updates :][:updates]) for i in range(STEPS)], abs=TOLERANCE)
