"""The names that other trainers use for the metrics and settings that the rules read."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

ALIASES: dict[str, tuple[str, ...]] = {
    "kl/objective": ("objective/kl",),
    "kl/per_token": ("kl", "critic/kl", "actor/reward_kl_penalty", "policy/kl_mean"),
    "kl/coef": ("objective/kl_coef", "kl_coef", "actor/reward_kl_penalty_coeff", "actor/kl_coef"),
    "policy/ratio": ("val/ratio", "ppo/policy/ratio", "probs_ratio", "actor/ratio"),
    "policy/clip_fraction": (
        "policy/clipfrac_avg",
        "ppo/policy/clipfrac",
        "actor/pg_clipfrac",
        "clip_ratio",
        "clip_ratio/region_mean",
    ),
    "policy/approx_kl": ("policy/approxkl_avg", "ppo/policy/approxkl", "actor/ppo_kl", "ppo_kl"),
    "policy/entropy": ("policy/entropy_avg", "ppo/policy/entropy", "actor/entropy", "actor/entropy_loss", "entropy"),
    "length/response_mean": ("completions/mean_length", "response_length/mean", "response_length"),
    "loss/value": ("loss/value_avg", "ppo/loss/value", "critic/vf_loss", "critic_loss"),
    "value/explained_variance": ("ppo/val/var_explained", "critic/vf_explained_var"),
    "optim/grad_norm": ("grad_norm", "actor/grad_norm", "ppo/policy/grad_norm"),
    "optim/learning_rate": ("lr", "learning_rate", "actor/lr", "ppo/learning_rate"),
    "time/step": ("timing_s/step", "time/ppo/total", "step_time", "total_step_time"),
}
"""Cavesson's name → those of TRL (PPO 1.x, then 0.x), OpenRLHF, verl and NeMo-RL, with the same unit.

The KL to the reference is in nats per response in Cavesson and TRL's PPO, and in nats per token in the others, which
`kl/per_token` stands for; Cavesson does not log it.
"""
TRACKED = "train/"
"""What TRL's callbacks for trackers put before a metric's name."""
_UPDATE = re.compile(r"(?!(eval|val|valid|test)[/_])((.*/)?(kl|policy|loss|optim|value)/|.*(loss|grad_norm))")


def logged_as(name: str) -> Iterator[str]:
    """Yield the names under which a metric may be logged, Cavesson's first."""
    for known in (name, *ALIASES.get(name, ())):
        yield from (known, TRACKED + known)


def is_of_update(name: str) -> bool:
    """Return whether a metric measures the update, and so is a number at each step."""
    return name in _KNOWN or _UPDATE.match(name) is not None


_KNOWN = frozenset(known for name in ALIASES for known in logged_as(name))


class Entry(NamedTuple):
    """An entry of another trainer's run.json."""

    path: str
    values: Mapping[Any, Any] | None = None
    """The trainer's value → Cavesson's, which is not known for other values; None: they are the same."""


_MEANS = {
    "token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean-token-sum": "constant",
    "seq-mean-token-sum-norm": "constant",
}  # fmt: skip
_OF_TRL = {
    "grpo": "sequence", "sapo": "sequence", "dr_grpo": "constant", "luspo": "constant", "bnpo": "token",
    "dapo": "token", "cispo": "token", "vespo": "token",
}  # fmt: skip
SETTINGS: dict[str, tuple[Entry, ...]] = {
    "kl.estimator": (Entry("config.kl_estimator"),),
    "config.ppo.whiten_rewards": (Entry("config.whiten_rewards"),),
    "config.grpo.ratio": (
        Entry("config.importance_sampling_level"),
        Entry("config.actor_rollout_ref.actor.policy_loss.loss_mode", {"vanilla": "token", "gspo": "sequence"}),
        Entry("config.actor.policy_loss_type", {"ppo": "token", "gspo": "sequence"}),
    ),
    "advantage_estimator": (
        Entry("config.algorithm.adv_estimator"),
        Entry("config.algo.advantage.estimator"),
    ),
    "config.grpo.normalise": (
        Entry("config.loss_type", _OF_TRL),
        Entry("config.actor_rollout_ref.actor.loss_agg_mode", _MEANS),
        Entry("config.actor.loss_agg_mode", _MEANS),
    ),
}
"""Entry of Cavesson's run.json, or a name for what it does not have → those of TRL, verl and OpenRLHF."""
