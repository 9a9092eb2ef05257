"""Whether a KL in the reward, or in the loss, holds the policy to its reference."""

from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor
from train_helpers import quiet

from cavesson.config import check
from cavesson.models.tiny import tiny_model, tiny_tokenizer
from cavesson.ops.kl import ESTIMATORS
from cavesson.registry import ALGORITHMS
from cavesson.train.run import Training

LOGITS, REFERENCE = torch.tensor([0.3, -1.0, 2.0, 0.0, -0.4]), torch.tensor([-0.5, 0.7, 0.1, 1.2, 0.3])


def enumerated(estimator: Any, through: bool) -> Tensor:
    """The expected gradient of a policy of five tokens: of an estimate as reward, or through the estimate."""
    logits = LOGITS.double().requires_grad_()
    logprob, reference = logits.log_softmax(0), REFERENCE.double().log_softmax(0)
    estimate = estimator(logprob, reference)
    weight = logprob.detach().exp()
    # E[∇ log π · estimate], the gradient that a policy-gradient method takes, or E[∇ estimate].
    return torch.autograd.grad((weight * (estimate if through else logprob * estimate.detach())).sum(), logits)[0]


def divergence(flipped: bool = False) -> Tensor:
    """The gradient of KL(π ‖ π_ref), or of KL(π_ref ‖ π)."""
    logits = LOGITS.double().requires_grad_()
    logprob, reference = logits.log_softmax(0), REFERENCE.double().log_softmax(0)
    above, below = (reference, logprob) if flipped else (logprob, reference)
    return torch.autograd.grad((above.exp() * (above - below)).sum(), logits)[0]


def test_in_the_reward_k1_alone_has_the_gradient_of_the_kl() -> None:
    torch.testing.assert_close(enumerated(ESTIMATORS["k1"], through=False), divergence())
    for name in ("abs", "k2", "k3"):
        assert (enumerated(ESTIMATORS[name], through=False) - divergence()).abs().max() > 0.1
    # Σ π ∇ log π · π_ref / π = Σ π_ref ∇ log π: k3 pays the policy for leaving the reference the other way round.
    torch.testing.assert_close(enumerated(ESTIMATORS["k3"], through=False), divergence() - divergence(flipped=True))


def test_in_the_loss_k1_has_no_gradient_and_k2_that_of_the_kl() -> None:
    torch.testing.assert_close(enumerated(ESTIMATORS["k1"], through=True), torch.zeros(5, dtype=torch.float64))
    torch.testing.assert_close(enumerated(ESTIMATORS["k2"], through=True), divergence())


def nothing(prompts: list[str], responses: list[str], **_: Any) -> list[float]:
    return [0.0] * len(responses)


def held(folder: Path, name: str, **changes: Any) -> Training:
    """A run without reward whose reference is far sharper than the policy."""
    reference = tiny_model()
    rate = 2e-3 if name == "ppo" else 5e-3  # PPO updates four times as often
    with torch.no_grad():
        reference.model.norm.weight.mul_(8.0)
    reference.save_pretrained(str(folder / "reference"))
    tiny_tokenizer().save_pretrained(folder / "reference")
    values = {
        "run": folder / "run", "steps": 30, "batch_size": 256, "model": {"device": "cpu"}, "kl": {"coef": 0.5},
        "reference": {"kind": "model", "path": str(folder / "reference")}, "sampling": {"max_new_tokens": 2},
        "optimizer": {"learning_rate": rate}, "doctor": {"on_finding": "ignore"}, "checkpoint": {"every": 0},
        **({} if name == "ppo" else {"samples_per_prompt": 8}), **changes,
    }  # fmt: skip
    settings = check(ALGORITHMS[name].settings, values, "the test")
    return Training(settings, prompts=["On the table", "My", "A dog"], rewards=nothing)


K3 = {"ppo": {"kl": {"coef": 0.5, "estimator": "k3"}}, "rloo": {"rloo": {"kl_estimator": "k3"}},
      "grpo": {"grpo": {"kl_in": "reward", "kl_estimator": "k3"}}}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param("ppo", {}, marks=pytest.mark.slow),
        ("rloo", {}),
        pytest.param("grpo", {"grpo": {"kl_in": "reward"}}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_without_a_reward_the_default_penalty_brings_the_policy_to_its_reference(
    tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    training = held(tmp_path, name, **changes)
    assert not [note for note in training.trainer.notes() if "does not keep the policy" in note]
    seen = [metrics["kl/objective"] for metrics in training.run(quiet).metrics]
    assert seen[0] > 5
    assert median(seen[-5:]) < 1.2  # a single step may leave: the penalty brings it back


@pytest.mark.slow
@pytest.mark.parametrize("name", list(K3))
def test_k3_in_the_reward_does_not_and_says_so(tmp_path: Path, name: str) -> None:
    training = held(tmp_path, name, **K3[name])
    notes = training.trainer.notes()
    assert sum("k3, whose gradient there is not that of the KL" in note for note in notes) == 1
    assert training.run(quiet).metrics[-1]["kl/objective"] > 4


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        *((name, changes, "estimated by k3") for name, changes in K3.items()),
        ("ppo", {"kl": {"coef": 0.5, "estimator": "full"}}, "estimated by full"),
        ("ppo", {"kl": {"coef": 0.5, "estimator": "k2"}}, "estimated by k2"),
        ("grpo", {"grpo": {"kl_estimator": "k1"}}, "The KL in the loss is estimated by k1"),
        ("grpo", {"grpo": {"kl_estimator": "k2"}}, ""),
        ("grpo", {}, ""),
    ],
)
def test_an_estimator_that_does_not_hold_the_policy_is_said_at_the_start(
    tmp_path: Path, name: str, changes: dict[str, Any], said: str
) -> None:
    notes = [note for note in held(tmp_path, name, **changes).trainer.notes() if "does not keep the policy" in note]
    assert len(notes) == bool(said)
    assert all(said in note and "\n" not in note for note in notes)
