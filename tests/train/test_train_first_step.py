"""Before anything is learned, old and new policy are the same numbers, and so are policy and reference."""

from pathlib import Path
from typing import Any

import pytest
import torch
from train_helpers import LORA, PROMPTS, STOP, build, quiet, tiny_run
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel

import cavesson
from cavesson.algorithms.grpo import GRPO
from cavesson.models.load import prepare
from cavesson.models.tiny import tiny_model, tiny_tokenizer

COMMON: dict[str, Any] = {
    "batch_size": 9, "sampling.stop": STOP, "checkpoint.every": 0, "optimizer.learning_rate": 1e-3,
    "optimizer.warmup_steps": 0, "doctor.on_finding": "ignore",
}  # fmt: skip
PPO: dict[str, Any] = {"shaping.scale": False, "shaping.normalise": False}
GSPO: dict[str, Any] = {"grpo.ratio": "sequence", "grpo.clip_low": 3e-4, "grpo.clip_high": 4e-4, "kl.coef": 0.1}
EPOCHS, MINI, MICRO = "update.epochs", "update.mini_batches", "update.micro_batch_size"
SINGLE: dict[str, Any] = {EPOCHS: 1, MINI: 1, "steps": 1}
SPLIT: dict[str, Any] = {EPOCHS: 1, MINI: 2, MICRO: 2, "steps": 2}
UPDATES: dict[str, dict[str, Any]] = {
    "micro-batches": {EPOCHS: 1, MINI: 1, MICRO: 4, "steps": 1},
    "one at a time": {EPOCHS: 1, MINI: 1, MICRO: 1, "steps": 1},
    "epochs": {EPOCHS: 2, MINI: 1, "steps": 2},
    "mini-batches": {EPOCHS: 2, MINI: 3, "steps": 1},
    "prompts of the same length": {**SPLIT, "prompts": [prompt.ljust(8, ".")[:8] for prompt in PROMPTS]},
    "a separate critic, and exact KL": {**SPLIT, "value.kind": "separate", "kl.estimator": "full"},
}


def sharp(dtype: torch.dtype) -> PreTrainedModel:
    """The tiny model with weights large enough that a rounded state is another probability."""
    model = tiny_model(dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 4.0 if parameter.ndim == 2 else 1.0
    return prepare(model)


def starts_at_one(
    name: str, folder: Path, dtype: torch.dtype, changes: dict[str, Any], model: PreTrainedModel | None = None
) -> None:
    changes = {**COMMON, **changes}
    inputs = {"model": model or sharp(dtype), "tokenizer": tiny_tokenizer(), "prompts": changes.pop("prompts", PROMPTS)}
    metrics = tiny_run(name, folder, inputs, **changes).run(quiet).metrics
    for step in metrics:
        assert (step["policy/first_ratio_error"], step["policy/first_approx_kl"]) == (0.0, 0.0)
    assert (metrics[0]["kl/objective"], metrics[0]["kl/objective_k3"]) == (0.0, 0.0)
    assert metrics[0].get("kl/penalty", 0.0) == 0.0
    assert all(step["kl/objective"] != 0.0 for step in metrics[1:])  # something was learned
    if changes[EPOCHS] == changes[MINI] == 1:
        assert [step["policy/clip_fraction"] for step in metrics] == [0.0] * len(metrics)
    tokens = cavesson.open(folder).tokens(0)
    assert tokens["logprob"] == tokens["ref_logprob"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "computed again"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("samples", [1, 3], ids=["alone", "groups"])
@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_first_ratio_is_one_and_first_kl_is_zero(
    tmp_path: Path, name: str, samples: int, lora: bool, checkpointing: bool, dtype: torch.dtype
) -> None:
    changes = PPO if name == "ppo" else GSPO
    if name == "grpo" and samples == 1:
        changes = {**changes, "grpo.baseline": "batch", "grpo.scale": "batch"}
    if lora:
        changes = {**changes, **{f"model.lora.{key}": value for key, value in LORA.items()}}
    changes = {**changes, "samples_per_prompt": samples, "model.gradient_checkpointing": checkpointing}
    for number, update in enumerate((SINGLE, SPLIT)):
        starts_at_one(name, tmp_path / str(number), dtype, {**changes, **update})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("samples", [1, 3], ids=["alone", "groups"])
@pytest.mark.parametrize("update", UPDATES)
def test_however_a_step_is_split(tmp_path: Path, update: str, samples: int) -> None:
    for number, checkpointing in enumerate((False, True)):
        changes = {**PPO, "samples_per_prompt": samples, "model.gradient_checkpointing": checkpointing}
        starts_at_one("ppo", tmp_path / str(number), torch.bfloat16, {**changes, **UPDATES[update]})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "computed again"])
def test_experts_whose_router_is_noisy_in_training(tmp_path: Path, checkpointing: bool) -> None:
    config = MixtralConfig(
        vocab_size=258, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, router_jitter_noise=0.5, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    changes = {**PPO, **SPLIT, "model.gradient_checkpointing": checkpointing}
    starts_at_one("ppo", tmp_path / "run", torch.float32, changes, MixtralForCausalLM(config))


def test_where_a_step_samples_more_than_it_learns_from(tmp_path: Path) -> None:
    changes = {**GSPO, "samples_per_prompt": 3, "grpo.resample": 2, "rewards": "rare", **SPLIT}
    starts_at_one("grpo", tmp_path / "run", torch.bfloat16, changes)
    assert cavesson.open(tmp_path / "run").rows().num_rows > 2 * 9


@pytest.mark.parametrize(("update", "forward_passes"), [("single pass", 2), ("epochs", 8), ("micro-batches", 8)])
def test_a_single_pass_scores_and_learns_from_one_forward_pass(
    tmp_path: Path, update: str, forward_passes: int
) -> None:
    # Two steps: 1 each where scoring is learned from; else 1 + 3 epochs, or 2 micro-batches scored and 2 learned from.
    changes: dict[str, dict[str, Any]] = {
        "single pass": {"update__epochs": 1},
        "epochs": {"update__epochs": 3},
        "micro-batches": {"update__epochs": 1, "update__micro_batch_size": 4},
    }
    training = build(tmp_path / "run", **changes[update])
    seen = []
    training.trainer.policy.register_forward_hook(lambda *_: seen.append(1))
    training.run(quiet)
    assert len(seen) == forward_passes


@pytest.mark.parametrize(("k", "graphs"), [(1, [True, True]), (3, [False, True, False, True])])
def test_scoring_has_no_graph_where_only_some_responses_are_learned_from(
    tmp_path: Path, k: int, graphs: list[bool]
) -> None:
    changes = {**COMMON, **SINGLE, "steps": 2, "raft.k": k}
    inputs = {"model": sharp(torch.float32), "tokenizer": tiny_tokenizer(), "prompts": PROMPTS}
    training = tiny_run("raft", tmp_path / "run", inputs, **changes)
    seen: list[bool] = []
    training.trainer.policy.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    training.run(quiet)
    assert seen == graphs


def test_discarded_responses_are_left_out_where_all_others_are_learned_from(tmp_path: Path) -> None:
    """With k = 1, RAFT learns from a step's forward pass, but not if it has scored responses that were discarded."""
    changes = {**COMMON, **SINGLE, "raft.k": 1, "cleaning.discard": ["too_short"], "cleaning.discard_reward": -3.0}
    found = []
    for name, more in (("whole", {}), ("split", {MICRO: 1})):
        inputs = {"model": sharp(torch.float32), "tokenizer": tiny_tokenizer(), "prompts": PROMPTS}
        training = tiny_run("raft", tmp_path / name, inputs, **{**changes, **more, "sampling.random_length": (1, 9)})
        training.run(quiet)
        found.append({name: p.detach().clone() for name, p in training.trainer.model.named_parameters()})
        rewards = cavesson.open(tmp_path / name).rows(["reward"])["reward"].to_pylist()
        assert 0 < rewards.count(-3.0) < len(rewards)
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], atol=1e-4, rtol=1e-3)


GROUPS: dict[str, Any] = {**COMMON, "samples_per_prompt": 3, "steps": 2, MICRO: 2, EPOCHS: 1, MINI: 1}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "changes",
    [
        {"kl.coef": 0.1, "update.max_grad_norm": 0.01},
        {"grpo.resample": 2, "rewards": "rare", "grpo.importance": 1.5},
        {"grpo.normalise": "sequence", "grpo.overlong": "filter", "model.gradient_checkpointing": True},
        {"grpo.overlong": "filter", "sampling.random_length": (1, 1), "sampling.stop": []},
        {"kl.coef": 0.1, **{f"model.lora.{key}": value for key, value in LORA.items()}},
    ],
    ids=["kl", "resampled", "filtered", "nothing to learn", "lora"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_learning_while_scoring_is_learning_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    passes, weights, tables = [], [], []
    for afterwards in (False, True):
        monkeypatch.setattr(GRPO, "credits_scores", afterwards)
        folder = tmp_path / str(afterwards)
        inputs = {"model": sharp(dtype), "tokenizer": tiny_tokenizer(), "prompts": PROMPTS}
        training = tiny_run("grpo", folder, inputs, **{**GROUPS, **changes})
        seen: list[int] = []
        training.trainer.learner.model.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        training.run(quiet)
        passes.append(len(seen))
        weights.append({name: p.detach().clone() for name, p in training.trainer.model.named_parameters()})
        run = cavesson.open(folder)
        timed = [name for name in run.steps().column_names if name.startswith(("time/", "machine/", "tokens_per"))]
        tables.append((run.steps().drop_columns(timed), run.tokens(1)))
    assert tables[0] == tables[1]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    # Where a step samples more, only the rows that it learns from are read once; nothing is learned from no tokens.
    if "rewards" not in changes and "sampling.random_length" not in changes:
        assert passes == [10, 20]
