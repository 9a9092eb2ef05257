"""Tokens that the policy did not sample, such as a tool's results, change nothing about those that it did."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from batch_helpers import ALONE
from group_helpers import uneven
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cavesson.algorithms.base import RolloutAlgorithm
from cavesson.algorithms.distill import Distill
from cavesson.algorithms.grpo import GRPO
from cavesson.algorithms.ppo import PPO
from cavesson.algorithms.raft import RAFT
from cavesson.algorithms.rloo import RLOO
from cavesson.models.policy import Policy
from cavesson.models.tiny import tiny_model
from cavesson.ops import kl
from cavesson.ops.advantages import gae
from cavesson.ops.masked import weighted_mean
from cavesson.ops.token_rewards import token_rewards
from cavesson.train.metrics import rollout_metrics, staleness_metrics
from cavesson.types import Batch, Rollouts, Scores

ALGORITHMS: dict[str, RolloutAlgorithm] = {
    "ppo": PPO(gamma=0.9, lam=0.8, entropy_coef=0.1),
    "ppo-whitened": PPO(whiten_rewards=True),
    "grpo": GRPO(longest=4),
    "grpo-sequence": GRPO(longest=4, normalise="sequence", ratio="sequence", importance=1.5),
    "grpo-constant": GRPO(longest=4, normalise="constant", kl_in="reward", overlong="penalty", overlong_buffer=2),
    "grpo-filter": GRPO(longest=4, overlong="filter", baseline="batch", scale="batch"),
    "rloo": RLOO(ratio="token"),
    "rloo-response": RLOO(ratio="sequence", importance=1.2),
    "raft": RAFT(k=2),
    "distill": Distill(),
}


def single() -> Batch:
    """Eight responses of 0 to 4 tokens, each in one piece."""
    generator = torch.Generator().manual_seed(5)

    def numbers() -> Tensor:
        return torch.randn(8, 4, generator=generator, dtype=torch.float64)

    batch = uneven(torch.float64)
    kept = batch["learned"]
    return batch.with_columns(
        value=numbers() * kept,
        kl_penalty=kl.k1(batch["logprob"], batch["ref_logprob"]) * kept,
        teacher_logprob=numbers() * kept,
        now=(batch["logprob"] + 0.3 * numbers()) * kept,
        entropy=numbers().abs() * kept,
        now_value=numbers() * kept,
        reward=batch["shaped_reward"],
        discarded=torch.zeros(8, dtype=torch.bool),
        chosen=torch.ones(8, dtype=torch.bool),
        response_ids=torch.randint(3, 90, (8, 4), generator=generator),
        sampler_version=torch.randint(0, 3, (8, 4), generator=generator),
    )


def with_holes(batch: Batch, holes: Sequence[Sequence[int]]) -> tuple[Batch, Tensor]:
    """Insert these numbers of tokens before each token and after the last; return the new place `[B, T]` of each."""
    before = torch.tensor(holes)  # [B, T + 1]
    lengths = batch["learned"].sum(1).long()
    place = torch.arange(4) + before[:, :4].cumsum(1)
    after = before.gather(1, lengths[:, None]).squeeze(1)
    last = torch.where(lengths > 0, place.gather(1, (lengths - 1).clamp_min(0)[:, None]).squeeze(1) + 1, 0)
    total = last + after
    width = int(max(total.max(), 2))
    is_token = batch["learned"] > 0
    columns = {}
    for name, column in batch.columns.items():
        if column.ndim == 1 or name.startswith("prompt_"):
            columns[name] = column
            continue
        column = column[:, : is_token.shape[1]]
        # What the models say of tokens that are not learned is 0; everything else about them is arbitrary.
        others = 0 if name in ("now", "entropy", "now_value", "value", "learned") else 7
        wide = torch.full((8, width), others, dtype=column.dtype)
        for row in range(8):
            wide[row, place[row][is_token[row]]] = column[row][is_token[row]]
        columns[name] = wide
    columns["attended"] = (torch.arange(width) < total[:, None]).double()
    return Batch(columns), place


HOLES = st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=8, max_size=8)


def learned(algorithm: RolloutAlgorithm, batch: Batch) -> tuple[Batch, float, Tensor, dict[str, float]]:
    """The credit of a step, and its loss, gradient and metrics."""
    credited = algorithm.credit(batch, 0.3, ALONE)
    now = batch["now"].clone().requires_grad_()
    weights = algorithm.weights(credited)
    result = algorithm.loss(Scores(now, batch["entropy"], batch["now_value"]), credited)
    loss = weighted_mean(result.loss, weights, float(algorithm.total(credited)))
    loss.backward()
    metrics = {name: float(weighted_mean(items.detach(), weights)) for name, items in result.means.items()}
    metrics |= {name: float(items.detach()[weights > 0].max()) for name, items in result.maxima.items()}
    assert now.grad is not None
    return credited, float(loss.detach()), now.grad, metrics | algorithm.metrics(credited, ALONE)


@pytest.mark.parametrize("name", ALGORITHMS)
@given(holes=HOLES)
def test_inserted_tokens_change_no_credit_loss_gradient_or_metric(name: str, holes: list[list[int]]) -> None:
    batch = single()
    wide, place = with_holes(batch, holes)
    credit, loss, gradient, metrics = learned(ALGORITHMS[name], batch)
    wide_credit, wide_loss, wide_gradient, wide_metrics = learned(ALGORITHMS[name], wide)
    assert wide_loss == pytest.approx(loss, abs=1e-12)
    assert wide_metrics == pytest.approx(metrics, abs=1e-9)
    is_token = batch["learned"] > 0
    for column in ("advantage", "return", "token_reward"):
        if column in credit:
            found = wide_credit[column]
            for row in range(8):
                torch.testing.assert_close(
                    found[row, place[row][is_token[row]]], credit[column][row][is_token[row]], atol=1e-12, rtol=0
                )
    for row in range(8):
        torch.testing.assert_close(
            wide_gradient[row, place[row][is_token[row]]], gradient[row][is_token[row]], atol=1e-12, rtol=0
        )
    assert not wide_gradient[wide["learned"] == 0].any()


def rollouts(batch: Batch) -> Rollouts:
    rows = range(len(batch))
    texts = [f"text {row % 3}" for row in rows]
    parts = [{"good": float(row)} for row in rows]
    return Rollouts(texts, [0] * 8, list(rows), texts, ["eos"] * 8, batch, reward_parts=parts)


@given(holes=HOLES)
def test_metrics_count_learned_tokens_alone(holes: list[list[int]]) -> None:
    batch = PPO().credit(single(), 0.3, ALONE)
    wide, _ = with_holes(single(), holes)
    expected = rollout_metrics(rollouts(batch), 0.3, "k1", ALONE) | staleness_metrics(rollouts(batch), 9, ALONE)
    credited = rollouts(PPO().credit(wide, 0.3, ALONE))
    found = rollout_metrics(credited, 0.3, "k1", ALONE) | staleness_metrics(credited, 9, ALONE)
    assert found == pytest.approx(expected, abs=1e-9)


def test_gae_over_turns_by_hand() -> None:
    """Two turns of two tokens and one, with a tool's answer between them."""
    mask = torch.tensor([[0.0, 1, 1, 0, 0, 1, 0]])
    values = torch.tensor([[9.0, 1.0, 2.0, 9.0, 9.0, 4.0, 9.0]])
    rewards = torch.tensor([[9.0, 0.5, 0.0, 9.0, 9.0, 1.0, 9.0]])
    # δ = 0.5 + ½·2 − 1, ½·4 − 2 and 1 − 4, and Â_t = δ_t + ¼·Â_{t+1}.
    expected = [[0.0, 0.5 + 0.25 * (0 - 0.25 * 3), 0 - 0.25 * 3, 0.0, 0.0, -3.0, 0.0]]
    assert gae(rewards, values, mask, 0.5, 0.5).tolist() == expected


def test_the_score_is_on_the_last_sampled_token() -> None:
    mask = torch.tensor([[0.0, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
    rewards = token_rewards(torch.tensor([2.0, 3.0, 4.0]), torch.ones(3, 6), mask, 0.1)
    expected = torch.tensor([[0, -0.1, 0, 1.9, 0, 0], [0.0] * 6, [-0.1] * 5 + [3.9]])
    torch.testing.assert_close(rewards, expected)


Turns = list[tuple[bool, float, float]]
"""Whether the policy sampled the token, its old log-probability, and its new one."""


def slow_grpo(episodes: list[Turns], rewards: list[float], clip: float) -> float:
    """DAPO's loss of a single group, token by token (arXiv:2503.14476, eq. 8)."""
    mean = sum(rewards) / len(rewards)
    std = (sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)) ** 0.5
    total, count = 0.0, 0
    for turns, reward in zip(episodes, rewards, strict=True):
        advantage = (reward - mean) / (std + 1e-4)
        for is_sampled, old, new in turns:
            if is_sampled:
                ratio = 2.718281828459045 ** (new - old)
                total -= min(ratio * advantage, min(max(ratio, 1 - clip), 1 + clip) * advantage)
                count += 1
    return total / count


@given(
    st.lists(
        st.lists(st.tuples(st.booleans(), st.floats(-3, 0), st.floats(-3, 0)), min_size=1, max_size=6),
        min_size=2,
        max_size=5,
    ).filter(lambda episodes: any(token[0] for turns in episodes for token in turns)),
    st.randoms(use_true_random=False),
)
def test_grpo_over_episodes_is_the_slow_sum(episodes: list[Turns], random: Any) -> None:
    rewards = [random.uniform(-1, 1) for _ in episodes]
    width = max(2, *map(len, episodes))
    padded = [turns + [(False, 0.0, 0.0)] * (width - len(turns)) for turns in episodes]
    mask, old, new = torch.tensor(padded, dtype=torch.float64).unbind(-1)
    batch = Batch(
        {
            "attended": torch.tensor([[float(t < len(turns)) for t in range(width)] for turns in episodes]).double(),
            "learned": mask,
            "logprob": old,
            "shaped_reward": torch.tensor(rewards, dtype=torch.float64),
            "group_in_step": torch.zeros(len(rewards), dtype=torch.long),
            "ended": torch.ones(len(rewards)),
        }
    )
    algorithm = GRPO(longest=6)
    credited = algorithm.credit(batch, 0.0, ALONE)
    loss = algorithm.loss(Scores(new, torch.zeros_like(new), None), credited).loss
    found = float(weighted_mean(loss, algorithm.weights(credited)))
    assert found == pytest.approx(slow_grpo(episodes, rewards, 0.2), abs=1e-9)


@pytest.mark.parametrize("shares_prompts", [False, True])
@pytest.mark.parametrize("value", ["trunk", None])
def test_all_tokens_are_attended_and_learned_ones_are_scored(shares_prompts: bool, value: str | None) -> None:
    """A tool's tokens are read, so they change what follows; but no number is given to them."""
    torch.manual_seed(0)
    policy = Policy(tiny_model(), value=value, shares_prompts=shares_prompts)
    ids = torch.randint(3, 90, (3, 6))
    every = torch.ones(3, 6)
    mask = torch.tensor([[1.0, 0, 0, 1, 1, 0], [0, 1, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0]])
    columns = {"prompt_ids": torch.tensor([[5, 6]] * 3), "prompt_mask": torch.ones(3, 2, dtype=torch.long)}
    whole = Batch({**columns, "response_ids": ids, "attended": every, "learned": every})
    part = whole.with_columns(learned=mask)
    for one, other in zip(policy(whole), policy(part), strict=True):
        if one is not None:
            torch.testing.assert_close(other, one * mask)
    another = part.with_columns(response_ids=torch.where(mask > 0, ids, ids + 1))
    assert (policy(another).logprob - policy(part).logprob).abs().max() > 1e-4


def test_rows_are_cut_to_the_tokens_that_exist() -> None:
    """A row may end with a token that is not learned, such as the end of a turn."""
    attended = torch.tensor([[1.0, 1, 1, 0], [1, 1, 0, 0]])
    batch = Batch({"attended": attended, "learned": attended * torch.tensor([1.0, 0, 0, 0])})
    assert batch.part([0])["learned"].shape == (1, 3)
    both = replace(rollouts_of(batch), sample=[1, 0])
    assert both.take([1])["attended"].tolist() == [[1.0, 1.0]]


def rollouts_of(batch: Batch) -> Rollouts:
    return Rollouts(["a", "b"], [0, 1], [0, 1], ["c", "d"], ["eos", "eos"], batch)
