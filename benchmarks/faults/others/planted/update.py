"""Faults of the update and of what it is computed from."""

from typing import Any

import torch

from benchmarks.faults.others.fault import RECORDER, TOKENS, fault
from benchmarks.faults.others.plan import Plan

LOSS = "pg_loss + args.vf_coef * vf_loss"
OLD_SCORES = "selective_log_softmax(logits, response)"
NEW_SCORES = "selective_log_softmax(logits, mb_responses)"
RUINED = (
    "entropy-collapse", "entropy-explosion", "distinct-collapse", "template-collapse", "repetition-loops",
    "reward-falls", "reward-exhausted", "length-collapse", "stops-generating", "truncated", "garbled",
    "gradient-spike", "value-loss-spike", "value-not-fitting", "verifier-dead", "pattern-spreading",
    "zero-variance-groups",
)  # fmt: skip
"""What may happen to a run whose policy is destroyed."""


@fault(
    causes=["update-kl-large", "kl-explosion", "ratio-blow-up", "clip-fraction-high"],
    also=RUINED,
    seen=TOKENS,
)
def learning_rate_high(plan: Plan) -> None:
    """Thirty times the learning rate."""

    def raise_rate(trainer: Any) -> None:
        scheduler = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
        scheduler.base_lrs = [30 * rate for rate in scheduler.base_lrs]
        for group in trainer.optimizer.param_groups:
            group["lr"] *= 30

    if plan.onset:
        plan.at_onset(raise_rate)
    else:  # the trainer makes its optimizer when it begins to train
        plan.settings["learning_rate"] *= 30


@fault(causes=["not-finite"], also=RUINED, seen=TOKENS, begins=0.5)
def nan_logprob(plan: Plan) -> None:
    """A single log-probability of a step is not a number. The update spreads it, and sampling ends the run."""

    def spoiled(logprobs: torch.Tensor) -> torch.Tensor:
        found = logprobs.clone()
        found[0, 0] = torch.nan
        return found

    if plan.trainer == "ppo":
        where, place = "train", OLD_SCORES
    else:
        where, place = "_get_per_token_logps_and_entropies", "torch.cat(all_logps, dim=0)"
    plan.replace(where, place, f"(spoiled({place}) if planted() else {place})", spoiled=spoiled)


@fault(
    causes=["ratio-not-one", "kl-at-start"],
    also=["negative-kl", "update-kl-large", "clip-fraction-high", "ratio-blow-up"],
    seen=TOKENS,
    trainers=["ppo"],
)
def logprob_shifted(plan: Plan) -> None:
    """The old log-probabilities are those of the tokens before."""
    plan.swap("train", OLD_SCORES, f"{OLD_SCORES}.roll(1, 1)")


@fault(
    causes=["ratio-not-one", "temperature-missing"],
    also=["update-kl-large", "clip-fraction-high", "ratio-blow-up", *RUINED],
    seen=[RECORDER],
    trainers=["ppo"],
)
def temperature_twice(plan: Plan) -> None:
    """The update divides the logits by a temperature of 0.7 once more than the sampler."""
    plan.swap("train", NEW_SCORES, "selective_log_softmax(logits / 0.7, mb_responses)")


def _with_entropy(plan: Plan, weight: float) -> None:
    """Add the mean entropy of the batch to the loss."""

    def entropy_of(logits: torch.Tensor) -> torch.Tensor:
        logprobs = logits.log_softmax(-1)
        return -(logprobs.exp() * logprobs).sum(-1).mean()

    added = f"({weight} * entropy_of(logits) if planted() else 0.0)"
    plan.replace("train", LOSS, f"{LOSS} + {added}", entropy_of=entropy_of)


@fault(
    causes=["entropy-collapse", "distinct-collapse", "template-collapse"],
    also=["kl-explosion", "repetition-loops", "reward-exhausted", "pattern-spreading", "truncated", "length-collapse"],
    seen=TOKENS,
    trainers=["ppo"],
)
def entropy_punished(plan: Plan) -> None:
    """The entropy bonus has the wrong sign."""
    _with_entropy(plan, 1.0)


@fault(
    causes=["entropy-explosion"],
    also=["kl-explosion", "reward-falls", "truncated", "garbled"],
    seen=TOKENS,
    trainers=["ppo"],
)
def entropy_bonus_large(plan: Plan) -> None:
    """The entropy bonus outweighs the reward."""
    _with_entropy(plan, -1.0)


@fault(causes=["value-not-fitting", "value-constant"], seen=TOKENS, trainers=["ppo"])
def critic_frozen(plan: Plan) -> None:
    """The loss of the critic is left out."""
    plan.swap("train", "args.vf_coef * vf_loss", "0.0 * vf_loss")


@fault(causes=["value-not-fitting", "value-constant"], seen=TOKENS, trainers=["ppo"])
def critic_clipped(plan: Plan) -> None:
    """Predictions are clipped around 0 instead of around the old ones: beyond that, nothing is learned."""
    plan.swap("train", "torch.max(vf_losses1, vf_losses2)", "torch.square(vpred.clamp(-0.05, 0.05) - mb_return)")


LEFT_OUT = "per_token_loss + self.beta * per_token_kl"


@fault(causes=["estimator-misplaced", "penalty-wrong"], also=["kl-explosion"], seen=[], trainers=["grpo"])
def penalty_left_out(plan: Plan) -> None:
    """The loss has no KL term, although the settings say so."""
    plan.swap("_compute_loss", LEFT_OUT, "per_token_loss")
