"""Runs without a fault: other settings, all of them fine."""

from collections.abc import Callable
from typing import Any

from benchmarks.faults.others.plan import Plan


def usual(plan: Plan) -> None:
    """The settings of the task."""


def no_penalty(plan: Plan) -> None:
    """No KL penalty, at half the learning rate."""
    plan.settings["kl_coef" if plan.trainer == "ppo" else "beta"] = 0.0
    plan.settings["learning_rate"] /= 2


def cooler(plan: Plan) -> None:
    """Sampled at temperature 0.8, and scored at 0.8 too."""
    plan.settings["temperature"] = 0.8


def gentle(plan: Plan) -> None:
    """A third of the learning rate: little happens."""
    plan.settings["learning_rate"] /= 3


def strict(plan: Plan) -> None:
    """Three times the KL penalty."""
    plan.settings["kl_coef" if plan.trainer == "ppo" else "beta"] = 0.15


def other_passes(plan: Plan) -> None:
    """PPO passes over its responses once, GRPO and RLOO twice."""
    plan.settings |= {"num_ppo_epochs": 1} if plan.trainer == "ppo" else {"num_iterations": 2}


def other_options(plan: Plan) -> None:
    """Options that papers recommend: whitened rewards and k3, Dr. GRPO, advantages normalised over the batch."""
    plan.settings |= {
        "ppo": {"whiten_rewards": True, "kl_estimator": "k3"},
        "grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
        "rloo": {"normalize_advantages": True},
    }[plan.trainer]


def smaller_batch(plan: Plan) -> None:
    """Half of the responses per step; GRPO and RLOO have groups of four."""
    plan.settings["per_device_train_batch_size"] //= 2
    if plan.trainer == "ppo":
        plan.settings["total_episodes"] //= 2
    else:
        plan.settings["num_generations"] = 4


def scheduled(plan: Plan) -> None:
    """The learning rate warms up over five steps and falls to 0 along a cosine."""
    plan.settings |= {"lr_scheduler_type": "cosine", "warmup_steps": 5}


def roomy(plan: Plan) -> None:
    """Twice the room for a response; λ = 1 and a narrower clip for PPO, GSPO for GRPO."""
    plan.settings["response_length" if plan.trainer == "ppo" else "max_completion_length"] = 2 * plan.world.limit
    plan.settings |= {
        "ppo": {"lam": 1.0, "cliprange": 0.1},
        "grpo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        "rloo": {},
    }[plan.trainer]


def clip_higher(plan: Plan) -> None:
    """More room to raise a probability than to lower it and two passes, as in DAPO; PPO has more in both directions."""
    plan.settings |= {"cliprange": 0.28} if plan.trainer == "ppo" else {"epsilon_high": 0.28, "num_iterations": 2}


def other_optimiser(plan: Plan) -> None:
    """Adam with β₂ = 0.95 and a weight decay of 0.1, as in many papers, and a warm-up of ten steps."""
    plan.settings |= {"adam_beta2": 0.95, "weight_decay": 0.1, "warmup_steps": 10}
    plan.settings["lr_scheduler_type"] = "constant_with_warmup"

    def change(trainer: Any) -> None:  # PPO gets an optimiser that is made already
        for group in trainer.optimizer.param_groups if plan.trainer == "ppo" else ():
            group |= {"betas": (0.9, 0.95), "weight_decay": 0.1}

    plan.built.append(change)


def accumulated(plan: Plan) -> None:
    """The gradient of an update is added up over parts of eight or sixteen responses; PPO makes one update per pass."""
    plan.settings |= (
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 8, "num_mini_batches": 1}
        if plan.trainer == "ppo"
        else {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4}
    )


def other_loss(plan: Plan) -> None:
    """A heavier, less clipped loss of PPO's critic; SAPO for GRPO; groups of 16 and rewards clipped at ±5 for RLOO."""
    options: dict[str, dict[str, Any]] = {
        "ppo": {"vf_coef": 0.5, "cliprange_value": 0.5, "lam": 0.9},
        "grpo": {"loss_type": "sapo", "scale_rewards": "batch"},
        "rloo": {"reward_clip_range": (-5.0, 5.0), "num_generations": 16},
    }
    plan.settings |= options[plan.trainer]


KINDS = (
    usual, no_penalty, cooler, gentle, strict, other_passes, other_options, smaller_batch, scheduled, roomy,
    clip_higher, other_optimiser, accumulated, other_loss,
)  # fmt: skip
HEALTHY: dict[str, Callable[[Plan], None]] = {one.__name__.replace("_", "-"): one for one in KINDS}
