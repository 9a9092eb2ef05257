"""What the settings that a fix names are called in other trainers."""

import re
from collections.abc import Mapping
from typing import Any

from cavesson.findings.finding import TrainerSettingNames

Name = str | Mapping[str, str]
"""Of a setting: one for all algorithms, or by algorithms. In brackets are values that differ (Cavesson's → the
trainer's) and settings that it depends on, without their groups if these are the same."""
Names = Mapping[str, Name]
"""Cavesson's setting → the trainer's. A setting that the trainer lacks has no entry."""

# Fields of GRPOConfig and RLOOConfig of TRL 1.16, and of PPOConfig of TRL 1.10, the last version with PPO.
TRL: Names = {
    "environment.max_turns": {"GRPO": "max_tool_calling_iterations"},
    "grpo.clip_high": {"GRPO, RLOO": "epsilon_high"},
    "grpo.importance": {"GRPO": 'vllm_importance_sampling_clip_max (vllm_importance_sampling_mode = "token_truncate")'},
    "grpo.normalise": {"GRPO": 'loss_type ("token" → "dapo", "constant" → "dr_grpo")'},
    "grpo.ratio": {"GRPO": "importance_sampling_level"},
    "kl.coef": {"GRPO, RLOO": "beta", "PPO": "kl_coef"},
    "kl.estimator": {"PPO": "kl_estimator"},
    "optimizer.learning_rate": "learning_rate",
    "ppo.entropy_coef": {"GRPO": "entropy_coef"},
    "ppo.gamma": {"PPO": "gamma"},
    "ppo.lam": {"PPO": "lam"},
    "ppo.value_clip": {"PPO": "cliprange_value"},
    "ppo.value_coef": {"PPO": "vf_coef"},
    "rewards.weight": {"GRPO, RLOO": "reward_weights"},
    "sampling.eos_token_ids": {"PPO": "stop_token_id"},
    "sampling.max_new_tokens": {"GRPO, RLOO": "max_completion_length", "PPO": "response_length"},
    "sampling.min_new_tokens": {"GRPO, RLOO": 'generation_kwargs["min_new_tokens"] (vLLM: "min_tokens")'},
    "sampling.temperature": "temperature",
    "sampling.top_k": {"GRPO, RLOO": "top_k"},
    "sampling.top_p": {"GRPO, RLOO": "top_p"},
    "shaping.clip": {"RLOO": "reward_clip_range"},
    "shaping.missing_eos_penalty": {"PPO": "missing_eos_penalty"},
    "update.epochs": {"GRPO, RLOO": "num_iterations", "PPO": "num_ppo_epochs"},
    "update.max_grad_norm": {"GRPO, RLOO": "max_grad_norm"},
}

# Keys of ppo_trainer.yaml of verl 0.9.1.
VERL: Names = {
    "environment.max_turns": "actor_rollout_ref.rollout.multi_turn.max_assistant_turns",
    "grpo.clip_high": "actor_rollout_ref.actor.clip_ratio_high",
    "grpo.importance": "algorithm.rollout_correction.rollout_is_threshold (rollout_is: token)",
    "grpo.kl_estimator": "actor_rollout_ref.actor.kl_loss_type (use_kl_loss: true)",
    "grpo.normalise": "actor_rollout_ref.actor.loss_agg_mode "
    '("token" → token-mean, "constant" → seq-mean-token-sum-norm)',
    "grpo.overlong": "reward.reward_kwargs.overlong_buffer_cfg.enable (reward.reward_manager.name: dapo)",
    "grpo.ratio": 'actor_rollout_ref.actor.policy_loss.loss_mode ("sequence" → gspo)',
    "grpo.resample": "algorithm.filter_groups.enable",
    "kl.coef": "algorithm.kl_ctrl.kl_coef (algorithm.use_kl_in_reward: true), "
    "actor_rollout_ref.actor.kl_loss_coef (use_kl_loss: true)",
    "kl.estimator": "algorithm.kl_penalty (use_kl_in_reward: true)",
    "kl.horizon": "algorithm.kl_ctrl.horizon",
    "kl.target": "algorithm.kl_ctrl.target_kl (type: adaptive; in nats per token)",
    "optimizer.learning_rate": "actor_rollout_ref.actor.optim.lr",
    "ppo.entropy_coef": "actor_rollout_ref.actor.entropy_coeff",
    "ppo.gamma": "algorithm.gamma",
    "ppo.lam": "algorithm.lam",
    "ppo.value_clip": "critic.cliprange_value",
    "sampling.max_new_tokens": "data.max_response_length",
    "sampling.temperature": "actor_rollout_ref.rollout.temperature",
    "sampling.top_k": "actor_rollout_ref.rollout.top_k (0 → -1)",
    "sampling.top_p": "actor_rollout_ref.rollout.top_p",
    "update.epochs": "actor_rollout_ref.actor.ppo_epochs",
    "update.max_grad_norm": "actor_rollout_ref.actor.optim.clip_grad",
}

# Flags of openrlhf.cli.train_ppo_ray of OpenRLHF 0.11.2.
OPENRLHF: Names = {
    "grpo.clip_high": "--actor.eps_clip_low_high (two numbers: grpo.clip_low, then grpo.clip_high)",
    "grpo.importance": "--algo.advantage.is_correction_threshold "
    "(--algo.advantage.is_correction_level token --algo.advantage.is_correction_mode clip)",
    "grpo.kl_estimator": "--algo.kl.estimator",
    "grpo.normalise": '--actor.loss_agg_mode ("token" → token-mean)',
    "grpo.overlong": "--reward.overlong_buffer_len",
    "grpo.ratio": '--actor.policy_loss_type ("sequence" → gspo)',
    "grpo.resample": "--algo.dynamic_filtering_enable",
    "kl.coef": "--algo.kl.init_coef",
    "kl.estimator": "--algo.kl.estimator",
    "kl.horizon": "--algo.kl.horizon",
    "kl.target": "--algo.kl.target",
    "optimizer.learning_rate": "--actor.adam.lr",
    "ppo.entropy_coef": "--actor.entropy_coef",
    "ppo.gamma": "--algo.advantage.gamma",
    "ppo.lam": "--algo.advantage.lambd",
    "ppo.value_clip": "--critic.value_clip",
    "sampling.max_new_tokens": "--rollout.max_new_tokens",
    "sampling.temperature": "--rollout.temperature",
    "sampling.top_p": "--rollout.top_p",
    "shaping.clip": "--reward.clip_range",
    "update.epochs": "--train.max_epochs",
    "update.max_grad_norm": "--actor.max_norm",
}

# Keys of grpo_math_1B.yaml and ppo_math_1B.yaml of NeMo RL's source of August 2026.
NEMO_RL: Names = {
    "grpo.clip_high": "loss_fn.ratio_clip_max",
    "grpo.importance": "loss_fn.truncated_importance_sampling_ratio "
    "(truncated_importance_sampling_type: tis, use_importance_sampling_correction: true)",
    "grpo.kl_estimator": "loss_fn.reference_policy_kl_type",
    "grpo.normalise": 'loss_fn.token_level_loss ("token" → true)',
    "grpo.overlong": {
        "GRPO": "grpo.reward_shaping.overlong_buffer_length (enabled: true)",
        "PPO": "ppo.reward_shaping.overlong_buffer_length (enabled: true)",
    },
    "grpo.ratio": 'loss_fn.sequence_level_importance_ratios ("sequence" → true)',
    "grpo.resample": "grpo.use_dynamic_sampling",
    "kl.coef": "loss_fn.reference_policy_kl_penalty",
    "kl.estimator": "loss_fn.reference_policy_kl_type",
    "optimizer.learning_rate": "policy.optimizer.kwargs.lr, policy.megatron_cfg.optimizer.lr (Megatron)",
    "ppo.gamma": "ppo.adv_estimator.gae_gamma",
    "ppo.lam": "ppo.adv_estimator.gae_lambda",
    "ppo.value_clip": "value_loss_fn.cliprange",
    "ppo.value_coef": "value_loss_fn.scale",
    "rewards.weight": "grpo.adv_estimator.reward_weights (name: gdpo)",
    "sampling.eos_token_ids": "policy.generation.stop_token_ids",
    "sampling.max_new_tokens": "policy.generation.max_new_tokens",
    "sampling.temperature": "policy.generation.temperature",
    "sampling.top_k": "policy.generation.top_k (0 → null)",
    "sampling.top_p": "policy.generation.top_p",
    "update.epochs": {"PPO": "ppo.ppo_epochs"},
    "update.max_grad_norm": "policy.max_grad_norm",
}

# Keys of rl.toml of prime-rl's source of August 2026. Its loss has no KL to a reference, and limits probabilities, not
# ratios.
PRIME_RL: Names = {
    "grpo.resample": 'orchestrator.train.source.curriculum.gates (type = "advantage_range")',
    "optimizer.learning_rate": "trainer.optim.lr",
    "sampling.max_new_tokens": "orchestrator.train.sampling.max_completion_tokens",
    "sampling.temperature": "orchestrator.train.sampling.temperature",
    "sampling.top_k": "orchestrator.train.sampling.extra_body.top_k (0 → -1)",
    "update.max_grad_norm": "trainer.optim.max_norm",
}

TRAINERS = {"trl": "TRL", "verl": "verl", "openrlhf": "OpenRLHF", "nemo-rl": "NeMo RL", "prime-rl": "prime-rl"}
"""What run.json calls a trainer, as ``trainer`` if a hook recorded the run, as ``format`` if it was imported → its
name."""
NAMES = {"trl": TRL, "verl": VERL, "openrlhf": OPENRLHF, "nemo-rl": NEMO_RL, "prime-rl": PRIME_RL}
"""By what run.json calls the trainer."""
_SETTING = re.compile(r"[a-z_]+(?:\.[a-z_]+)+")


def trainer_of(info: Mapping[str, Any]) -> str:
    """Return what run.json calls the trainer, as in ``TRAINERS``; empty if it names none."""
    return str(info.get("format") or info.get("trainer") or "").partition(" ")[0]


def trainer_setting_names(info: Mapping[str, Any], fix: str) -> TrainerSettingNames | None:
    """Return what the settings that a fix names are called in the trainer of the run.

    Args:
        info: The content of run.json.
        fix: The text.

    Returns:
        None if the trainer is not known, is Cavesson, or has none of these settings.
    """
    trainer, algorithm = trainer_of(info), info.get("algorithm")
    names = NAMES.get(trainer, {})
    found = {name: name_in(trainer, algorithm, name) for name in _SETTING.findall(fix) if name in names}
    settings = {name: called for name, called in found.items() if called}
    return TrainerSettingNames(TRAINERS[trainer], settings) if settings else None


def name_in(trainer: str, algorithm: Any, setting: str) -> str:
    """Return what a trainer calls a setting of Cavesson; empty if it has none, and all names if it may be several."""
    name, own = NAMES[trainer].get(setting, ""), str(algorithm).upper()
    if isinstance(name, str):
        return name
    if own in _told_apart(NAMES[trainer]):
        return next((one for several, one in name.items() if own in several.split(", ")), "")
    return ", ".join(f"{one} ({several})" for several, one in name.items())


def _told_apart(names: Names) -> set[str]:
    """Return the algorithms for which a trainer has names of their own."""
    by_algorithm = (name for name in names.values() if not isinstance(name, str))
    return {one for name in by_algorithm for several in name for one in several.split(", ")}
