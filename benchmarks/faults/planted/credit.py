"""Faults between scores and advantages."""

from typing import Any

import torch

from benchmarks.faults.fault import fault
from benchmarks.faults.setup import Setup
from cavesson.algorithms import ppo as ppo_module
from cavesson.ops import kl as kl_module
from cavesson.train import online as online_module


@fault(causes=["reward-position"], levels=("before-last", "middle", "first"), algorithms=["ppo"])
def reward_misplaced(setup: Setup, level: str) -> None:
    """The score of a response stands on another of its tokens."""

    def token_rewards(original: Any, score: Any, kl: Any, mask: Any, coef: float, *rest: Any) -> Any:
        length = mask.sum(1).long()
        place = {"before-last": length - 2, "middle": length // 2, "first": torch.zeros_like(length)}[level]
        at = torch.arange(mask.shape[1]) == place.clamp_min(0)[:, None]
        return original(torch.zeros_like(score), kl, mask, coef, *rest) + score[:, None] * at * mask

    setup.wrap(ppo_module, "token_rewards", token_rewards)


@fault(causes=["reward-position", "reward-accounting"], levels=(0.1, 0.4, 1.0), algorithms=["ppo"])
def reward_on_padding(setup: Setup, level: float) -> None:
    """The score of a share of the responses stands on the token behind the last one, which is padding."""

    def token_rewards(original: Any, score: Any, kl: Any, mask: Any, coef: float, *rest: Any) -> Any:
        found = original(score, kl, mask, coef, *rest)
        length = mask.sum(1).long()
        for row in range(len(score)):
            if (7 * row) % 10 < 10 * level and length[row] < mask.shape[1]:
                found[row, length[row] - 1] -= score[row]
                found[row, length[row]] += score[row]
        return found

    setup.wrap(ppo_module, "token_rewards", token_rewards)


@fault(causes=["penalty-wrong"], levels=(0.02, 0.05, 0.1), algorithms=["ppo"])
def penalty_flipped(setup: Setup, level: float) -> None:
    """The KL penalty is added instead of taken away, at this β."""
    setup.set("kl.coef", level)

    def token_rewards(original: Any, score: Any, kl: Any, mask: Any, coef: float, *rest: Any) -> Any:
        return original(score, -kl, mask, coef, *rest)

    setup.wrap(ppo_module, "token_rewards", token_rewards)


@fault(causes=["penalty-wrong"], levels=("abs", "k2", "k3"), algorithms=["ppo"])
def penalty_estimator(setup: Setup, level: str) -> None:
    """The penalty is computed by another estimator than the run says."""
    setup.patches.append(_in(kl_module.ESTIMATORS, {"k1": kl_module.ESTIMATORS[level]}))


@fault(causes=["penalty-wrong"], levels=(1.3, 2.0, 10.0), algorithms=["ppo"])
def penalty_scaled(setup: Setup, level: float) -> None:
    """The penalty is taken off so many times too large (summed over processes, say)."""

    def token_rewards(original: Any, score: Any, kl: Any, mask: Any, coef: float, *rest: Any) -> Any:
        return original(score, kl, mask, coef * level, *rest)

    setup.wrap(ppo_module, "token_rewards", token_rewards)


@fault(causes=["reward-accounting"], levels=(1.0, 0.5, 0.2), algorithms=["ppo"])
def reward_clipped_unsaid(setup: Setup, level: float) -> None:
    """The score is clipped inside the credit, and nobody is told."""

    def token_rewards(original: Any, score: Any, kl: Any, mask: Any, coef: float, *rest: Any) -> Any:
        return original(score.clamp(-level, level), kl, mask, coef, *rest)

    setup.wrap(ppo_module, "token_rewards", token_rewards)


@fault(causes=["advantage-scale"], levels=("padding", "unscaled", "shifted"), algorithms=["ppo"])
def whitening_wrong(setup: Setup, level: str) -> None:
    """Advantages are whitened over the padding too, not at all (a larger reward), or keep a mean."""

    def whiten(original: Any, values: Any, mask: Any, **options: Any) -> Any:
        if level == "padding":
            return original(values * mask, torch.ones_like(mask), **options) * mask
        if level == "unscaled":
            return 5 * values * mask
        return original(values, mask, **options) + 0.7 * mask

    setup.wrap(ppo_module, "whiten", whiten)


@fault(causes=["reward-falls", "group-advantages", "advantage-sign"], levels=(0.6, 0.8, 1.0))
def advantage_flipped(setup: Setup, level: float) -> None:
    """The advantage of a share of the responses has the wrong sign."""

    def credited(original: Any, self: Any, rollouts: Any, *rest: Any) -> Any:
        batch = original(self, rollouts, *rest)
        wrong = (7 * torch.arange(len(batch))) % 10 < 10 * level
        sign = torch.where(wrong, -1.0, 1.0)[:, None]
        return batch.with_columns(advantage=batch["advantage"] * sign)

    from cavesson.algorithms.grpo import GRPO
    from cavesson.algorithms.ppo import PPO
    from cavesson.algorithms.rloo import RLOO

    setup.wrap({"ppo": PPO, "grpo": GRPO, "rloo": RLOO}[setup.algorithm], "credit", credited)


@fault(causes=["ratio-not-one"], levels=(0.1, 0.4, 1.0))
def logprob_shifted(setup: Setup, level: float) -> None:
    """The old log-probabilities of a share of the responses are those of the neighbouring tokens."""

    def scored(original: Any, policy: Any, batch: Any, *args: Any) -> Any:
        columns = original(policy, batch, *args)
        logprob = columns["logprob"]
        wrong = (7 * torch.arange(len(batch))) % 10 < 10 * level
        shifted = torch.where(wrong[:, None], logprob.roll(1, 1), logprob) * batch["learned"]
        return columns | {"logprob": shifted}

    setup.wrap(online_module, "score_rollouts", scored)


def _in(table: dict[str, Any], changed: dict[str, Any]) -> Any:
    from unittest.mock import patch

    return patch.dict(table, changed)
