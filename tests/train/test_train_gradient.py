"""PPO's gradient against one from the formulas: no padding, no batch, own softmax, GAE, whitening and losses."""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from batch_helpers import ALONE, every
from torch import Tensor
from train_helpers import LORA, build, move, rollouts

from cavesson.algorithms.ppo import PPO
from cavesson.algorithms.settings import OptimizerSettings, UpdateSettings
from cavesson.models.parts import causal
from cavesson.models.policy import Policy
from cavesson.processes import Processes
from cavesson.train.optimizer import Optimizer
from cavesson.train.rollouts import score_rollouts
from cavesson.train.update import Learner, StepInfo, averaged, update

PROMPTS = [[70, 71, 72, 73], [80], [90, 91, 92, 93, 94, 95, 96], [100, 101, 102], [110, 111, 112, 113, 114]]
RESPONSES = [[40, 41, 42, 43, 44], [], [50], [60, 61, 62], [30, 31, 32, 33, 34, 0]]
SCORES = [1.0, -2.0, 0.5, 3.0, -1.5]
TEMPERATURE, COEF = 0.7, 0.3
PPO_SETTINGS: dict[str, Any] = {
    "gamma": 0.9, "lam": 0.8, "clip": 0.2, "value_clip": 0.15, "value_coef": 0.7, "entropy_coef": 0.05
}  # fmt: skip
CASES = {
    "full": {},
    "lora": {"model__lora": LORA},
    "separate critic": {"value__kind": "separate"},
    "whitened rewards": {"ppo__whiten_rewards": True},
    "advantages as they are": {"ppo__whiten_advantages": False},
}


class Row(NamedTuple):
    """One response's numbers, one per token."""

    logprob: Tensor
    entropy: Tensor
    value: Tensor


def scored(policy: Policy, prompt: list[int], response: list[int]) -> Row:
    ids = torch.tensor([prompt + response])
    out = policy.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    places = slice(len(prompt) - 1, len(prompt) + len(response) - 1)  # a token is predicted one place before it
    exponentials = (out.logits[0, places].double() / TEMPERATURE).exp()
    p = exponentials / exponentials.sum(-1, keepdim=True)
    chosen = p[torch.arange(len(response)), torch.tensor(response, dtype=torch.long)]
    states = out.hidden_states[-1] if policy.critic is None else policy.critic(input_ids=ids).last_hidden_state
    head = policy.value_head
    assert head is not None
    return Row(chosen.log(), -(p * p.log()).sum(-1), states[0, places].double() @ head.weight[0].double() + head.bias)


def all_scored(policy: Policy) -> list[Row]:
    return [scored(policy, prompt, response) for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]


def reference_logprobs(policy: Policy, original: Any) -> list[Tensor]:
    """Of the model before anything moved: a copy of it made then."""
    moved = policy.model
    policy.model = original
    rows = all_scored(policy)
    policy.model = moved
    return [row.logprob for row in rows]


def whitened(rows: list[list[float]], shift: bool) -> list[list[float]]:
    flat = [x for row in rows for x in row]
    mean = sum(flat) / len(flat)
    variance = sum((x - mean) ** 2 for x in flat) / len(flat)
    return [[(x - mean) / variance**0.5 + (0.0 if shift else mean) for x in row] for row in rows]


def advantages(rewards: list[list[float]], values: list[list[float]], gamma: float, lam: float) -> list[list[float]]:
    """GAE as the sum it is defined by: Σ_k (γλ)^k · δ_{t+k}."""
    result = []
    for r, v in zip(rewards, values, strict=True):
        v = [*v, 0.0]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
        result.append([sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(r))) for t in range(len(r))])
    return result


class Expected(NamedTuple):
    token_reward: list[list[float]]
    advantage: list[list[float]]
    returns: list[list[float]]


def credited(old: list[Row], reference: list[Tensor], ppo: PPO) -> Expected:
    rewards = []
    for row, ref, score in zip(old, reference, SCORES, strict=True):
        r = [-COEF * float(a - b) for a, b in zip(row.logprob, ref, strict=True)]
        rewards.append([*r[:-1], r[-1] + score] if r else r)
    values = [row.value.tolist() for row in old]
    signal = whitened(rewards, shift=False) if ppo.whiten_rewards else rewards
    advantage = advantages(signal, values, ppo.gamma, ppo.lam)
    returns = [[a + v for a, v in zip(*pair, strict=True)] for pair in zip(advantage, values, strict=True)]
    return Expected(rewards, whitened(advantage, shift=True) if ppo.whiten_advantages else advantage, returns)


def loss_and_metrics(new: list[Row], old: list[Row], expected: Expected, ppo: PPO) -> tuple[Tensor, dict[str, float]]:
    """A token at a time, divided by the number of tokens."""
    total, seen = torch.zeros((), dtype=torch.float64), []
    for row, before, advantage, returns in zip(new, old, expected.advantage, expected.returns, strict=True):
        for t, (a, target) in enumerate(zip(advantage, returns, strict=True)):
            logprob, entropy, value = row.logprob[t], row.entropy[t], row.value[t]
            ratio, moved = (logprob - before.logprob[t]).exp(), value - before.value[t]
            limits = 1 - ppo.clip, 1 + ppo.clip
            policy_loss = -min(ratio * a, ratio.clamp(*limits) * a)
            nearby = before.value[t] + moved.clamp(-ppo.value_clip, ppo.value_clip)
            value_loss = 0.5 * max((value - target) ** 2, (nearby - target) ** 2)
            total = total + policy_loss + ppo.value_coef * value_loss - ppo.entropy_coef * entropy
            worse = ratio > limits[1] if a > 0 else ratio < limits[0]
            kl, outside = before.logprob[t] - logprob, (nearby - target) ** 2 > (value - target) ** 2
            numbers = (policy_loss, value_loss, ratio, entropy, kl, (value - target) ** 2, worse, outside)
            seen.append([x.item() for x in numbers])
    means = [sum(column) / len(seen) for column in zip(*seen, strict=True)]
    return total / len(seen), dict(zip(METRICS, means, strict=True))


METRICS = (
    "loss/policy", "loss/value", "policy/ratio", "policy/entropy", "policy/kl", "value/error",
    "policy/clip_fraction", "value/clip_fraction",
)  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_gradient_is_that_of_the_formulas(tmp_path: Path, case: str) -> None:  # noqa: PLR0915  # one chain of numbers
    settings = {**{f"ppo__{name}": value for name, value in PPO_SETTINGS.items()}, **CASES[case]}
    trainer = build(tmp_path / "run", sampling__temperature=TEMPERATURE, **settings).trainer
    policy, ppo = trainer.policy, trainer.algorithm
    original = copy.deepcopy(policy.model if case == "lora" else causal(policy.model))
    move(policy, seed=1, size=0.03)  # away from the reference, and the critic away from zero
    with torch.no_grad():
        old, reference = all_scored(policy), reference_logprobs(policy, original)
    batch = rollouts(PROMPTS, RESPONSES)
    columns = score_rollouts(policy, batch, "k1", [range(len(PROMPTS))])
    batch = ppo.credit(batch.with_columns(**columns, shaped_reward=torch.tensor(SCORES)), COEF, ALONE)
    expected = credited(old, reference, ppo)
    named = {
        "logprob": [row.logprob for row in old], "entropy": [row.entropy for row in old],
        "value": [row.value for row in old], "ref_logprob": reference, "token_reward": expected.token_reward,
        "advantage": expected.advantage, "return": expected.returns,
    }  # fmt: skip
    for name, rows in named.items():
        for i, row in enumerate(rows):
            expected_row = torch.as_tensor(row).double()
            torch.testing.assert_close(batch[name][i, : len(row)].double(), expected_row, rtol=1e-4, atol=2e-5)
            assert not batch[name][i, len(row) :].any()

    move(policy, seed=2, size=0.03)  # away from the weights that sampled
    optimizer = Optimizer(policy, OptimizerSettings(learning_rate=1e-9))
    loss, metrics = loss_and_metrics(all_scored(policy), old, expected, ppo)
    gradients = torch.autograd.grad(loss, list(optimizer.parameters.values()))
    assert 0 < metrics["policy/clip_fraction"] < 1 and 0 < metrics["value/clip_fraction"] < 1
    assert abs(metrics["policy/ratio"] - 1) > 0.01

    once = UpdateSettings(epochs=1, max_grad_norm=None, max_ratio=None)
    learner = Learner(policy, optimizer, ppo, Processes("cpu"))
    seen = averaged(list(update(learner, batch, every(batch), once, StepInfo(0, 0, 1e-9))))
    assert {name: seen[name] for name in METRICS} == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    assert seen["loss/total"] == pytest.approx(float(loss.detach()), rel=1e-4)
    norm = sum(float((gradient.double() ** 2).sum()) for gradient in gradients) ** 0.5
    assert seen["optim/grad_norm"] == pytest.approx(norm, rel=1e-4)
    state = optimizer.state()
    for name, gradient in zip(optimizer.parameters, gradients, strict=True):
        average = state[f"exp_avg.{name}"] / (1 - 0.9)  # AdamW's first average is (1 − β₁)·g
        torch.testing.assert_close(average, gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))
