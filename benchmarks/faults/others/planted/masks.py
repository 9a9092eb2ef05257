"""Faults of masks: which tokens belong to a response."""

from benchmarks.faults.others.fault import RECORDER, TOKENS, fault
from benchmarks.faults.others.plan import Plan

LENGTH = "first_true_indices(postprocessed_response == processing_class.pad_token_id) - 1"
INSIDE = "sequence_indices <= eos_idx.unsqueeze(1)"


@fault(
    causes=["trained-behind-end"],
    also=["reward-position", "reward-accounting", "kl-at-start"],
    seen=TOKENS,
)
def padding_trained(plan: Plan) -> None:
    """The mask goes three tokens of padding too far."""
    if plan.trainer == "ppo":
        plan.swap("train", LENGTH, f"({LENGTH} + 3).clamp_max(postprocessed_response.shape[1] - 1)")
    else:
        plan.swap("_generate_single_turn", INSIDE, "sequence_indices <= eos_idx.unsqueeze(1) + 3")


@fault(
    causes=["end-not-trained"],
    also=["reward-position", "truncated", "false-truncation"],
    # Lines and texts without an end may be what was generated.
    seen={"ppo": [RECORDER], "grpo": [], "rloo": []},
)
def end_masked(plan: Plan) -> None:
    """The mask ends one token too early: the end of a response is not trained."""
    if plan.trainer == "ppo":
        plan.swap("train", LENGTH, f"({LENGTH} - 1).clamp_min(0)")
    else:
        plan.swap("_generate_single_turn", INSIDE, "sequence_indices < eos_idx.unsqueeze(1).clamp_min(1)")


@fault(causes=["trained-behind-end"], seen=[], trainers=["ppo"])
def padding_in_loss(plan: Plan) -> None:
    """The loss is a mean over the padding too, so that short responses count for less."""
    plan.swap("train", "masked_mean(pg_loss_max, ~padding_mask[micro_batch_inds])", "pg_loss_max.mean()")
