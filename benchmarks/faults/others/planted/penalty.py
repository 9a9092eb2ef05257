"""Faults of the KL penalty.

TRL's PPO takes it off the reward of every token, RLOO off the reward of the response, and GRPO adds it to the loss.
"""

from benchmarks.faults.others.fault import RECORDER, TOKENS, fault
from benchmarks.faults.others.plan import Plan


@fault(
    causes=["penalty-wrong"],
    also=["kl-explosion", "estimator-misplaced", "update-kl-large", "reward-falls"],
    # GRPO records neither the loss of a token nor anything else that the sign decides.
    seen={"ppo": TOKENS, "rloo": [RECORDER], "grpo": []},
)
def penalty_flipped(plan: Plan) -> None:
    """Distance from the reference is rewarded instead of punished."""
    if plan.trainer == "ppo":
        plan.swap("train", "-args.kl_coef * kl", "args.kl_coef * kl")
    elif plan.trainer == "rloo":
        plan.swap("_generate_and_score_completions", "rewards - self.beta * kl", "rewards + self.beta * kl")
    else:
        added = "per_token_loss + self.beta * per_token_kl"
        plan.swap("_compute_loss", added, "per_token_loss - self.beta * per_token_kl")


@fault(
    causes=["penalty-wrong", "penalty-mis-scaled"],  # without settings, all that can be said is that it is too large
    also=["kl-explosion", "estimator-misplaced", "kl-flat", "reward-accounting"],
    seen={"ppo": TOKENS, "rloo": [RECORDER]},
)
def penalty_scaled(plan: Plan) -> None:
    """The penalty is ten times what the settings say."""
    if plan.trainer == "ppo":
        plan.swap("train", "-args.kl_coef * kl", "-10 * args.kl_coef * kl")
    else:
        plan.swap("_generate_and_score_completions", "rewards - self.beta * kl", "rewards - 10 * self.beta * kl")


@fault(
    causes=["penalty-wrong", "estimator-misplaced"],  # without settings, the size may be what was meant
    also=["kl-explosion", "reward-accounting"],
    seen=TOKENS,
    trainers=["ppo"],
)
def penalty_absolute(plan: Plan) -> None:
    """The penalty is on the size of the log-ratio, whatever its sign."""
    plan.swap("train", '-logr if args.kl_estimator == "k1" else (logr.exp() - 1) - logr', "logr.abs()")


@fault(causes=["penalty-mis-scaled"], also=["kl-flat"], seen=TOKENS, trainers=["ppo"])
def reward_tiny(plan: Plan) -> None:
    """The reward is a hundred times smaller than the penalty was chosen for."""
    plan.change_reward(lambda scores, *_: [score / 100 for score in scores])
    plan.settings["missing_eos_penalty"] = 0.01
