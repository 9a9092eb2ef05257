"""Faults between scores and advantages."""

from typing import Any

import torch
from torch.nn.functional import pad

from benchmarks.faults.others.fault import BOARD, COMPLETIONS, RECORDER, TOKENS, fault
from benchmarks.faults.others.plan import Plan

SCORING = "_generate_and_score_completions"
SCORE_PLACE = "torch.where(sequence_lengths_p1 < rewards.size(1), sequence_lengths_p1, sequence_lengths)"


@fault(causes=["reward-position"], also=["reward-accounting", "value-not-fitting"], seen=TOKENS, trainers=["ppo"])
def reward_early(plan: Plan) -> None:
    """The score stands four tokens before the end of the response."""
    plan.swap("train", SCORE_PLACE, "(sequence_lengths - 4).clamp_min(0)")


@fault(causes=["reward-position"], also=["reward-accounting", "value-not-fitting"], seen=TOKENS, trainers=["ppo"])
def reward_first(plan: Plan) -> None:
    """The score stands on the first token of the response."""
    plan.swap("train", SCORE_PLACE, "torch.zeros_like(sequence_lengths)")


@fault(causes=["reward-fades"], also=["value-not-fitting", "value-constant"], seen=[RECORDER], trainers=["ppo"])
def discount_strong(plan: Plan) -> None:
    """The advantages are summed with γλ = 0.6, while the settings say γ = 1 and λ = 0.95."""
    plan.swap("train", "args.gamma * args.lam * lastgaelam", "0.6 * lastgaelam")


@fault(
    causes=["advantage-scale"],
    also=["reward-falls", "kl-explosion", "length-collapse", "truncated"],
    seen=[RECORDER],
    trainers=["ppo"],
)
def whitening_shifted(plan: Plan) -> None:
    """Whitening keeps a mean: the advantages of all tokens are raised by 0.7."""
    plan.wrap("masked_whiten", lambda whiten, *given, **more: whiten(*given, **more) + 0.7)


@fault(causes=["advantage-scale"], seen=[RECORDER], trainers=["ppo"])
def whitening_padded(plan: Plan) -> None:
    """Whitening counts the padding as well, to three times the length."""

    def padded(whiten: Any, values: Any, mask: Any, shift_mean: bool = True) -> Any:
        count = values.shape[1]
        wide = pad(values * mask, (0, 2 * count))
        return whiten(wide, torch.ones_like(wide), shift_mean)[:, :count]

    plan.wrap("masked_whiten", padded)


@fault(
    causes=["reward-falls", "group-advantages", "advantage-sign"],
    also=["kl-explosion", "length-collapse", "truncated", "repetition-loops", "pattern-spreading", "update-kl-large"],
    seen=[RECORDER, BOARD, COMPLETIONS],
)
def advantage_flipped(plan: Plan) -> None:
    """The advantage has the wrong sign: the policy learns what scores badly."""
    if plan.trainer == "ppo":
        plan.swap("train", "masked_whiten(advantages, ~padding_mask)", "-masked_whiten(advantages, ~padding_mask)")
    elif plan.trainer == "grpo":
        plan.swap(SCORING, "rewards - mean_grouped_rewards", "mean_grouped_rewards - rewards")
    else:
        plan.swap(SCORING, "rewards - baselines", "baselines - rewards")


@fault(causes=["group-advantages"], seen=[RECORDER, COMPLETIONS], trainers=["grpo"])
def baseline_of_others(plan: Plan) -> None:
    """A response is compared with the mean of another prompt's group: ``repeat`` instead of ``repeat_interleave``."""
    plan.swap(
        SCORING,
        "mean_grouped_rewards.repeat_interleave(num_generations, dim=0)",
        "mean_grouped_rewards.repeat(num_generations)",
    )


@fault(causes=["group-advantages"], seen=[RECORDER, COMPLETIONS], trainers=["grpo"])
def spread_squared(plan: Plan) -> None:
    """The advantage is divided by the variance of its group instead of the standard deviation."""
    plan.swap(SCORING, "advantages / (std_rewards + 1e-4)", "advantages / (std_rewards**2 + 1e-4)")


@fault(causes=["group-advantages"], seen=[RECORDER], trainers=["rloo"])
def baseline_too_small(plan: Plan) -> None:
    """Leave-one-out divides the sum of the other seven rewards by eight."""
    plan.swap(
        SCORING,
        "(grouped_sum - grouped_rewards) / (scorable_counts - 1)",
        "(grouped_sum - grouped_rewards) / scorable_counts",
    )
