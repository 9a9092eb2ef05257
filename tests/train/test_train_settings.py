"""Each setting does what its help says."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from train_helpers import LOGPROB, LORA, SIGNAL, STOP, build, farthest, finish, move, quiet, rollouts, weights

import cavesson
from cavesson.models.parts import causal
from cavesson.models.policy import Policy
from cavesson.models.tiny import tiny_model, tiny_tokenizer

LEARNING: dict[str, Any] = {"steps": 3, "kl__coef": 0.4, "optimizer__learning_rate": 1e-2, "sampling__stop": STOP}

ESTIMATORS = {
    "k1": lambda delta: delta,
    "abs": np.abs,
    "k2": lambda delta: delta**2 / 2,
    "k3": lambda delta: np.exp(-delta) - 1 + delta,
}


def columns(folder: Path, step: int, *names: str) -> list[np.ndarray]:
    """Token columns of a step, all rollouts one after the other."""
    tokens = cavesson.open(folder).tokens(step)
    return [tokens[name].to_numpy() for name in names]


def last_tokens(folder: Path, step: int) -> np.ndarray:
    sample = np.append(columns(folder, step, "sample")[0], -1)
    return sample[1:] != sample[:-1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("estimator", [*ESTIMATORS, "full"])
def test_the_penalty_is_the_named_estimate_and_the_objective_always_k1(tmp_path: Path, estimator: str) -> None:
    metrics = finish(tmp_path / "run", **LEARNING, kl__estimator=estimator).metrics
    for step in range(3):
        new, old, reward = columns(tmp_path / "run", step, "logprob", "ref_logprob", "token_reward")
        inner = ~last_tokens(tmp_path / "run", step)  # the last token also has the score
        penalty = -reward[inner] / 0.4
        if estimator == "full":
            assert (penalty >= -1e-6).all()
        else:
            delta = (new - old)[inner]
            off = SIGNAL * np.abs(penalty) + LOGPROB * np.maximum(1, np.exp(np.abs(delta))) + 1e-5
            assert (np.abs(penalty - ESTIMATORS[estimator](delta)) <= off).all()
        assert metrics[step]["kl/objective"] == pytest.approx((new - old).sum() / 6, abs=len(new) / 6 * LOGPROB + 1e-5)
        assert (step > 0) == bool(np.abs(penalty).max() > 1e-4)


@pytest.mark.parametrize("model", [{}, {"model__lora": LORA}], ids=["full", "lora"])
def test_full_kl_is_that_of_the_whole_distributions(tmp_path: Path, model: dict[str, Any]) -> None:
    policy = build(tmp_path / "run", sampling__temperature=0.5, **model).trainer.policy
    before = logits(policy)
    move(policy, seed=1, size=0.05)
    p, q = ((x / 0.5).double().softmax(-1) for x in (logits(policy), before))
    expected = (p * (p.log() - q.log())).sum(-1)
    seen = policy.reference_kl(rollouts([[70, 71], [80]], [[40, 41, 42], []]))
    torch.testing.assert_close(seen[0].double(), expected, rtol=1e-4, atol=1e-6)
    assert not seen[1].any() and float(expected.min()) > 0.01


@torch.no_grad()
def logits(policy: Policy) -> Tensor:
    return policy.model(input_ids=torch.tensor([[70, 71, 40, 41, 42]])).logits[0, 1:4]


def test_the_adaptive_coefficient_follows_the_recorded_kl(tmp_path: Path) -> None:
    changes = {**LEARNING, "steps": 6, "kl__target": 0.02, "kl__horizon": 40}
    metrics = finish(tmp_path / "run", **changes).metrics
    expected, errors = 0.4, []
    for step, seen in enumerate(metrics):
        assert seen["kl/coef"] == pytest.approx(expected, rel=1e-12)
        recorded = cavesson.open(tmp_path / "run").rows(["kl_coef", "kl_k1"], [step])
        assert set(recorded["kl_coef"].to_pylist()) == {seen["kl/coef"]}
        kl = np.mean(recorded["kl_k1"].to_pylist())
        assert seen["kl/objective"] == pytest.approx(kl, abs=1e-5)
        errors.append(max(-0.2, min(0.2, seen["kl/objective"] / 0.02 - 1)))
        expected *= 1 + errors[-1] * 6 / 40
    assert errors[0] == -0.2 and max(errors) > 0  # both ways


def one_step(folder: Path, **changes: Any) -> Policy:
    """Two passes over one step's rollouts: in the second one the value head is no longer zero."""
    return finish(
        folder, steps=1, update__epochs=2, update__max_grad_norm=None, optimizer__eps=1e-3, **changes
    ).policy  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["trunk", "separate"])
def test_the_value_loss_reaches_the_policy_only_through_a_shared_trunk(tmp_path: Path, kind: str) -> None:
    without = one_step(tmp_path / "without", value__kind=kind, ppo__value_coef=0.0)
    with_it = one_step(tmp_path / "with", value__kind=kind, ppo__value_coef=5.0)
    assert farthest(weights(without.value_head), weights(with_it.value_head)) > 1e-4
    change = farthest(weights(without.model), weights(with_it.model))
    if kind == "separate":
        assert change == 0.0
        assert farthest(weights(without.critic), weights(with_it.critic)) > 1e-6
    else:
        assert change > 1e-6


def test_another_model_may_be_the_reference(tmp_path: Path) -> None:
    other = tiny_model(seed=5)
    other.save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    changes = {"reference__kind": "model", "reference__path": str(tmp_path / "other")}
    metrics = finish(tmp_path / "run", **changes).metrics
    assert metrics[0]["kl/objective"] != 0.0
    run = cavesson.open(tmp_path / "run")
    row, tokens = run.rollout(1, 0)
    ids = row["prompt_ids"] + tokens["token_id"].to_pylist()
    with torch.no_grad():
        expected = other(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    places = torch.arange(len(row["prompt_ids"]) - 1, len(ids) - 1)
    np.testing.assert_allclose(
        tokens["ref_logprob"].to_numpy(), expected[places, torch.tensor(ids)[places + 1]].numpy(), rtol=0, atol=1e-5
    )


def test_adapters_off_and_a_copy_are_the_same_reference(tmp_path: Path) -> None:
    for kind in ("adapters-off", "copy"):
        finish(tmp_path / kind, **LEARNING, model__lora=LORA, reference__kind=kind)
    for step in range(3):
        off, copied = (columns(tmp_path / kind, step, "ref_logprob")[0] for kind in ("adapters-off", "copy"))
        np.testing.assert_allclose(off, copied, rtol=0, atol=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", [{}, {"model__lora": LORA}], ids=["full", "lora"])
def test_the_reference_never_moves(tmp_path: Path, model: dict[str, Any]) -> None:
    training = build(tmp_path / "run", **LEARNING, **model)
    batch = rollouts([[70, 71, 72]], [[40, 41, 42]])
    before = training.trainer.policy.reference_logprob(batch)
    training.run(quiet)
    assert torch.equal(training.trainer.policy.reference_logprob(batch), before)
    with torch.no_grad():
        assert float((training.trainer.policy(batch).logprob - before).abs().max()) > 1e-3


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", [{}, {"lora": LORA}], ids=["full", "lora"])
def test_bfloat16_computes_in_bfloat16_and_learns_in_float32(tmp_path: Path, model: dict[str, Any]) -> None:
    changes = {"model": {"device": "cpu", "dtype": "bfloat16", **model}}
    result = finish(tmp_path / "run", **changes)
    assert causal(result.policy.model).dtype == torch.bfloat16
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    learned = load_file(checkpoint / "weights.safetensors")
    kept = load_file(checkpoint / "optimizer.safetensors")
    weights = dict(result.policy.named_parameters())
    for name, weight in learned.items():
        assert weight.dtype == torch.float32 and kept[f"exp_avg.{name}"].dtype == torch.float32
        assert torch.equal(weight.to(weights[name].dtype), weights[name])
    (logprob,) = columns(tmp_path / "run", 1, "logprob")
    assert (torch.from_numpy(logprob.copy()).bfloat16().float().numpy() != logprob).any()  # finer than bfloat16
    assert [step["policy/first_ratio_error"] for step in result.metrics] == [0.0, 0.0]
    assert all(np.isfinite(value) for step in result.metrics for value in step.values())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", [{}, {"model__lora": LORA}], ids=["full", "lora"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_gradient_checkpointing_computes_activations_again_and_changes_nothing(
    tmp_path: Path, model: dict[str, Any], epochs: int
) -> None:
    seen, calls = [], []
    for use in (False, True):
        training = build(
            tmp_path / str(use), **model, update__epochs=epochs, optimizer__eps=1e-3, model__gradient_checkpointing=use
        )
        calls.append(0)
        layer = training.trainer.policy.get_submodule(
            next(name for name, _ in training.trainer.policy.named_modules() if name.endswith("layers.1.mlp"))
        )

        def count(*_: Any) -> None:
            calls[-1] += torch.is_grad_enabled()

        layer.register_forward_pre_hook(count)
        seen.append(weights(training.run(quiet).policy))
    assert calls == [2 * epochs, 2 * 2 * epochs]
    assert farthest(*seen) < 1e-6


def test_an_entropy_bonus_raises_the_entropy(tmp_path: Path) -> None:
    common = {"sampling__temperature": 0.05, "update__epochs": 1, "optimizer__learning_rate": 1e-3}
    entropy = [
        finish(tmp_path / str(coef), **common, ppo__entropy_coef=coef).metrics[1]["policy/entropy"] for coef in (0, 5)
    ]
    assert entropy[1] > entropy[0] + 0.01


def test_filtered_sampling_is_recorded_as_it_was(tmp_path: Path) -> None:
    finish(tmp_path / "run", sampling__top_k=3)
    sampler, policy = columns(tmp_path / "run", 0, "sampler_logprob", "logprob")
    assert (sampler > policy + 1).all()  # three tokens share what 258 had


def test_the_seed_decides_the_run(tmp_path: Path) -> None:
    runs = {name: finish(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))}
    ids = {name: columns(tmp_path / name, 1, "token_id")[0].tolist() for name in runs}
    assert ids["a"] == ids["b"] != ids["c"]
    assert farthest(weights(runs["a"].policy), weights(runs["b"].policy)) == 0.0


def test_settings_show_what_differs_from_the_defaults() -> None:
    assert repr(cavesson.KLSettings()) == "KLSettings()"
    changed = cavesson.PPORun.model_validate({"run": "x", "kl": {"coef": 0.3}, "steps": 7, "ppo": {}})
    assert repr(changed) == f"PPORun(run={Path('x')!r}, steps=7, kl=KLSettings(coef=0.3))"
