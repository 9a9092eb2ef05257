"""The names of what the rules read: kinds of data, and the names of metrics and settings in other trainers."""

import re
from collections.abc import Iterator

KINDS = ("info", "steps", "rows", "tokens", "turns")
"""What a rule may need."""

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
    "finish/length": ("completions/clipped_ratio", "response_length/clip_ratio"),
    "group/zero_std": ("frac_reward_zero_std",),
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
UNCLEAR = frozenset(["kl"])
"""Names that say what was measured only if the trainer is known: this one may be the KL to the reference or that of an
update, before, during or after it, per token or per response."""
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


SETTINGS = {"kl.estimator": "config.kl_estimator", "config.ppo.whiten_rewards": "config.whiten_rewards"}
"""Entry of Cavesson's run.json → TRL's."""
