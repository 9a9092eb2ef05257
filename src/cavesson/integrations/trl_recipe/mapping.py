"""The settings of TRL 1.16 in ours, its defaults, and what differs whatever the settings are, by trainer."""

from typing import Any

from cavesson.integrations.trl_recipe.common import Rule
from cavesson.integrations.trl_recipe.examples import CPO, DPO, KTO, ORPO, REWARD_MODEL, SFT
from cavesson.integrations.trl_recipe.rollouts import DISTILL, GRPO, RLOO

RULES: dict[str, dict[str, Rule]] = {
    "sft": SFT, "reward-model": REWARD_MODEL, "dpo": DPO, "cpo": CPO, "orpo": ORPO, "kto": KTO, "grpo": GRPO,
    "rloo": RLOO, "distill": DISTILL,
}  # fmt: skip
"""By the keys of `given.TRAINERS`."""

_TRAINING = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "lr_scheduler_type": "linear",
    "num_train_epochs": 3.0, "max_steps": -1, "warmup_steps": 0, "adam_beta1": 0.9, "adam_beta2": 0.999,
    "adam_epsilon": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0,
}  # fmt: skip
_ROLLOUTS = {
    "max_completion_length": 512, "shuffle_dataset": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
    "use_vllm": False, "num_iterations": 1, "epsilon": 0.2, "epsilon_high": None,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "sft": {**_TRAINING, "learning_rate": 2e-5, "max_length": 1024},
    "reward-model": {**_TRAINING, "learning_rate": 1e-4, "max_length": 1024},
    "dpo": {**_TRAINING, "learning_rate": 1e-6, "max_length": 1024, "beta": 0.1, "loss_type": "sigmoid"},
    "cpo": {
        **_TRAINING, "learning_rate": 1e-6, "max_length": 1024, "beta": 0.1, "loss_type": "sigmoid", "cpo_alpha": 1.0,
        "simpo_gamma": 0.5,
    },
    "orpo": {**_TRAINING, "learning_rate": 1e-6, "max_length": 1024, "beta": 0.1},
    "kto": {
        **_TRAINING, "learning_rate": 1e-6, "max_length": 1024, "beta": 0.1, "loss_type": "kto",
        "desirable_weight": 1.0, "undesirable_weight": 1.0, "train_sampling_strategy": "sequential",
    },
    "grpo": {
        **_TRAINING, **_ROLLOUTS, "learning_rate": 1e-6, "num_generations": 8, "beta": 0.0, "loss_type": "dapo",
        "scale_rewards": "group", "importance_sampling_level": "token", "use_bias_correction_kl": True,
        "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 3.0,
    },
    "rloo": {**_TRAINING, **_ROLLOUTS, "learning_rate": 1e-6, "num_generations": 2, "beta": 0.05},
    "distill": {
        **_TRAINING, "learning_rate": 2e-5, "num_generations": 1, "beta": 0.5, "lmbda": 0.5, "temperature": 0.9,
        "max_new_tokens": 128, "max_length": 1024,
    },
}  # fmt: skip
"""Of TRL 1.16, as far as they reach the recipe."""

_WARM_UP = "The first of n steps of warm-up has 1/n of the peak learning rate, in TRL 0."
_PASSES = "With `steps`, batches go on into the next pass over the data; TRL's last batch of a pass may be smaller."
DIFFERENCES: dict[str, list[str]] = {
    "sft": [
        "Of conversations (a column `messages`), only the assistant's turns are learned; TRL learns all tokens unless "
        'assistant_only_loss is set. data.learn = "all" learns all.',
        "Dropout is always off.",
        _WARM_UP,
        _PASSES,
    ],
    "reward-model": [
        "The reward is read at the last token of the text; TRL appends an end token and reads it there.",
        "A new score head starts with a standard deviation of 1/√(hidden size), in TRL of 0.02.",
        _WARM_UP,
        _PASSES,
    ],
    "dpo": ["The reference scores all pairs once, before the first step.", _WARM_UP, _PASSES],
    "cpo": ["Pairs of identical responses are dropped.", _WARM_UP, _PASSES],
    "orpo": [
        "Only chosen responses are learned, and every pair counts once; TRL learns their prompts, too, and takes the "
        "mean over all tokens of a micro-batch.",
        "Pairs of identical responses are dropped.",
        _WARM_UP,
        _PASSES,
    ],
    "kto": [
        "The reference point is estimated from a whole batch; TRL has one for each micro-batch.",
        "A response to the same prompt never stands in for a mismatched one.",
        "The reference scores all responses once, before the first step.",
        _WARM_UP,
        _PASSES,
    ],
    "grpo": [
        "Dropout is always off.",
        "An optimiser step whose mean ratio is above update.max_ratio is skipped.",
        _WARM_UP,
    ],
    "distill": [
        "Which responses are the model's own is drawn for each of them; TRL draws once for a batch.",
        "Responses of the data are cut at sampling.max_new_tokens; TRL cuts prompt and response at max_length.",
        "Dropout is always off.",
        "An optimiser step whose mean ratio is above update.max_ratio is skipped.",
        _WARM_UP,
    ],
    "rloo": [
        "Dropout is always off.",
        "An optimiser step whose mean ratio is above update.max_ratio is skipped.",
        _WARM_UP,
    ],
}
"""What differs whatever the settings are."""
