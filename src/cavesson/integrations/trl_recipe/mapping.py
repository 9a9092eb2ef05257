"""The settings of TRL 1.16 in ours, one function or name each; what has no counterpart says why."""

import math
from collections.abc import Callable, Mapping
from typing import Any


class NoCounterpart(Exception):
    """A value that Cavesson cannot express; the message is the reason, or what to do instead."""


Values = Mapping[str, Any]
"""All values of a configuration: those that were given, and TRL's defaults"""
Rule = str | Callable[[Any, Values], dict[str, Any]] | None
"""Our name for the same value; a function from the value to our settings; or None for what changes nothing that is
learned, such as the number of workers that load data"""


def updates(values: Values) -> int:
    """Return the optimiser steps of TRL in a training step of ours."""
    return mini_batches(values) * int(values.get("num_iterations") or 1)


def mini_batches(values: Values) -> int:
    """Return how many optimiser steps TRL makes of the responses that it generates together."""
    accumulated = int(values["gradient_accumulation_steps"])
    together = values.get("steps_per_generation") or accumulated
    if values.get("generation_batch_size"):
        together = values["generation_batch_size"] // (values["per_device_train_batch_size"] * values["processes"])
    if "num_generations" not in values:
        return 1
    if together % accumulated:
        raise NoCounterpart("TRL then mixes the responses of several generations in an optimiser step")
    return int(together) // accumulated


def _batch_size(per_device: int, values: Values) -> dict[str, Any]:
    whole = per_device * values["gradient_accumulation_steps"] * values["processes"]
    if "num_generations" not in values:
        return {"batch_size": whole}
    return {"batch_size": whole * mini_batches(values), "update.mini_batches": mini_batches(values)}


def _micro_batch_size(values: Values) -> dict[str, Any]:
    """A micro-batch has no effect on the result, but on the memory: TRL's size fits."""
    return {"update.micro_batch_size": values["per_device_train_batch_size"]}


def _steps(steps: int, values: Values) -> dict[str, Any]:
    return {} if steps <= 0 else {"steps": math.ceil(steps / updates(values))}


def _epochs(epochs: float, values: Values) -> dict[str, Any]:
    if values["max_steps"] > 0:
        return {}
    if "num_generations" not in values:
        return {"epochs": float(epochs)}
    size = _batch_size(values["per_device_train_batch_size"], values)["batch_size"]
    if values["prompts"] is not None:
        return {"steps": math.ceil(epochs * values["prompts"] * values["num_generations"] / size)}
    raise NoCounterpart(
        f"set steps to {epochs:g} · prompts · {values['num_generations']} / {size}: Cavesson counts steps, not passes"
    )


def _warmup(steps: float, values: Values) -> dict[str, Any]:
    if steps >= 1 or not steps:
        return {"optimizer.warmup_steps": math.ceil(steps / updates(values))}
    if values["max_steps"] > 0:
        return {"optimizer.warmup_steps": math.ceil(steps * values["max_steps"] / updates(values))}
    raise NoCounterpart(f"set optimizer.warmup_steps to {steps:g} · the number of steps")


def _schedule(name: Any, _: Values) -> dict[str, Any]:
    names = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
    schedule = names.get(str(getattr(name, "value", name)))
    if schedule is None:
        raise NoCounterpart("schedules are constant, linear and cosine")
    return {"optimizer.schedule": schedule}


def _betas(_: float, values: Values) -> dict[str, Any]:
    return {"optimizer.betas": [values["adam_beta1"], values["adam_beta2"]]}


def _max_grad_norm(norm: float, _: Values) -> dict[str, Any]:
    if not norm:
        raise NoCounterpart("call cavesson with --update.max_grad_norm none")
    return {"update.max_grad_norm": float(norm)}


def _optimiser(name: Any, _: Values) -> dict[str, Any]:
    if not str(getattr(name, "value", name)).startswith(("adamw_torch", "adamw_hf")):
        raise NoCounterpart("the optimiser is AdamW")
    return {}


def _dtype(is_on: bool | None, _: Values) -> dict[str, Any]:
    return {"model.dtype": "bfloat16"} if is_on else {}


def _model_arguments(arguments: Any, _: Values) -> dict[str, Any]:
    arguments = {"dtype": arguments} if isinstance(arguments, str) else dict(arguments or {})
    dtype = str(arguments.pop("dtype", arguments.pop("torch_dtype", ""))).removeprefix("torch.")
    others = sorted(set(arguments) - {"attn_implementation", "use_cache", "device_map", "low_cpu_mem_usage"})
    if others or dtype not in ("", "auto", "bfloat16", "float32"):
        raise NoCounterpart(f"model settings are path, dtype and quantization; {', '.join(others) or dtype} is none")
    return {"model.dtype": dtype} if dtype in ("bfloat16", "float32") else {}


ADAPTERS = ("r", "alpha", "target_modules", "use_dora")
"""What of PEFT's LoRA has a counterpart."""


def _lora(arguments: Mapping[str, Any], _: Values) -> dict[str, Any]:
    """PEFT's defaults: rank 8, alpha 8, and modules by architecture."""
    targets = arguments.get("target_modules")
    lora = {"rank": arguments.get("r", 8), "alpha": arguments.get("alpha", 8)}
    if targets is not None:
        lora["targets"] = targets if isinstance(targets, str) else list(targets)
    if arguments.get("use_dora"):
        lora["dora"] = True
    return {f"model.lora.{name}": value for name, value in lora.items()}


def _trackers(names: Any, _: Values) -> dict[str, Any]:
    names = [names] if isinstance(names, str) else list(names or [])
    known = [name for name in names if name in ("tensorboard", "wandb", "trackio", "mlflow")]
    if others := [name for name in names if name not in (*known, "none")]:
        raise NoCounterpart(f"trackers are tensorboard, wandb, trackio and mlflow, not {', '.join(others)}")
    return {"trackers": known} if known else {}


def _saving(strategy: Any, _: Values) -> dict[str, Any]:
    strategy = str(getattr(strategy, "value", strategy))
    if strategy == "epoch":
        raise NoCounterpart("checkpoints are counted in steps: set checkpoint.every")
    return {"checkpoint.every": 0} if strategy == "no" else {}


def _evaluation(_: Any, values: Values) -> dict[str, Any]:
    raise NoCounterpart("hold out rows with data.validation or data.validation_path; evaluation.every sets the steps")


def _order(strategy: Any, _: Values) -> dict[str, Any]:
    strategy = str(getattr(strategy, "value", strategy))
    if strategy not in ("random", "sequential"):
        raise NoCounterpart("rows come shuffled or in their order; update.layout arranges them in memory")
    return {"data.shuffle": strategy == "random"}


def unless(usual: Any, why: str) -> Callable[[Any, Values], dict[str, Any]]:
    """Return a rule for a setting that Cavesson has only in one form."""

    def rule(value: Any, _: Values) -> dict[str, Any]:
        if value not in (usual, None, False, "") and value != [usual]:
            raise NoCounterpart(why)
        return {}

    return rule


def _longest(length: int | None, _: Values) -> dict[str, Any]:
    if length is None:
        raise NoCounterpart("set data.max_length above the longest example")
    return {"data.max_length": length}


COMMON: dict[str, Rule] = {
    "model": "model.path",
    "model_init_kwargs": _model_arguments,
    "dtype": _model_arguments,
    "torch_dtype": _model_arguments,
    "lora": _lora,
    "load_in_4bit": lambda on, _: {"model.quantization": "nf4"} if on else {},
    "load_in_8bit": lambda on, _: {"model.quantization": "int8"} if on else {},
    "trust_remote_code": unless(False, "code from model repositories is never run"),
    "dataset": "data.path",
    "datasets": unless(None, "name the sources in data.mix"),
    "dataset_config": "data.subset",
    "dataset_train_split": "data.split",
    "output_dir": "run",
    "seed": "seed",
    "learning_rate": "optimizer.learning_rate",
    "lr_scheduler_type": _schedule,
    "warmup_steps": _warmup,
    "warmup_ratio": _warmup,
    "adam_beta1": _betas,
    "adam_beta2": _betas,
    "adam_epsilon": "optimizer.eps",
    "weight_decay": "optimizer.weight_decay",
    "max_grad_norm": _max_grad_norm,
    "optim": _optimiser,
    "train_sampling_strategy": _order,
    "per_device_train_batch_size": _batch_size,
    "gradient_accumulation_steps": lambda steps, values: _micro_batch_size(values) if steps > 1 else {},
    "max_steps": _steps,
    "num_train_epochs": _epochs,
    "bf16": _dtype,
    "fp16": unless(False, "dtypes are float32 and bfloat16"),
    "gradient_checkpointing": "model.gradient_checkpointing",
    "activation_checkpointing": "model.gradient_checkpointing",
    "use_cpu": lambda on, _: {"model.device": "cpu"} if on else {},
    "report_to": _trackers,
    "project": "project",
    "save_strategy": _saving,
    "save_steps": lambda steps, values: {"checkpoint.every": math.ceil(steps / updates(values))} if steps >= 1 else {},
    "save_total_limit": lambda count, _: {"checkpoint.keep": count} if count else {},
    "eval_strategy": lambda strategy, values: {} if strategy == "no" else _evaluation(strategy, values),
    "eval_steps": _evaluation,
    "deepspeed": unless(None, 'set parallel.shard = "full", and call cavesson with --processes N'),
    "fsdp": unless(None, 'set parallel.shard = "full", and call cavesson with --processes N'),
    "neftune_noise_alpha": unless(None, "only SFT adds noise to embeddings"),
    "chat_template_path": "data.template",
    "push_to_hub": unless(False, "publish the run afterwards with cavesson push-to-hub"),
    "sync_ref_model": unless(False, "the reference does not change during a run"),
    "router_aux_loss_coef": unless(0.0, "there is no auxiliary loss for experts"),
    "activation_offloading": unless(False, "parallel.offload keeps the optimiser's state on the host"),
}

SFT: dict[str, Rule] = {
    **COMMON,
    "max_length": _longest,
    "truncation_mode": unless("keep_start", "longer examples lose their end"),
    "completion_only_loss": lambda only, _: {"data.learn": "all"} if only is False else {},
    "assistant_only_loss": unless(True, "of conversations, only the assistant's turns are learned: the same"),
    "dataset_text_field": lambda name, _: {} if name == "text" else {"data.columns": {"text": name}},
    "packing": unless(False, "a batch counts examples and not packed sequences: set batch_size"),
    "neftune_noise_alpha": lambda alpha, _: {"sft.neftune_alpha": float(alpha)} if alpha else {},
    "loss_type": lambda name, _: {} if name in ("nll", "chunked_nll") else unless("nll", "the loss is −log π")(name, _),
    "eos_token": unless(None, "the end token is that of the tokenizer and its chat template"),
}

REWARD_MODEL: dict[str, Rule] = {
    **COMMON,
    # TRL drops pairs that are too long; ours are cut unless told otherwise.
    "max_length": lambda length, values: {**_longest(length, values), "data.overlong": "drop"},
    "center_rewards_coefficient": lambda weight, _: {"reward_model.centring_coef": float(weight)} if weight else {},
}


def _dpo_loss(names: Any, values: Values) -> dict[str, Any]:
    names = [names] if isinstance(names, str) else list(names)
    losses: dict[str, dict[str, Any]] = {
        "sigmoid": {},
        "hinge": {"dpo.loss_type": "hinge"},
        "ipo": {"dpo.loss_type": "ipo", "dpo.length_normalised": True},  # TRL's log-ratios are per token
        "sigmoid_norm": {"dpo.length_normalised": True},
    }
    if len(names) != 1 or names[0] not in losses:
        raise NoCounterpart(f"losses are {', '.join(losses)}")
    return losses[names[0]]


DPO: dict[str, Rule] = {
    **COMMON,
    "beta": "dpo.beta",
    "loss_type": _dpo_loss,
    "label_smoothing": unless(0.0, "TRL's default loss ignores it; dpo.label_smoothing is that of conservative DPO"),
    "max_length": _longest,
    "truncation_mode": unless("keep_start", "longer examples lose their end"),
    "f_divergence_type": unless("reverse_kl", "only the reverse KL"),
    "ld_alpha": unless(None, "no loss has it"),
    "loss_weights": unless(None, "a run has one loss"),
    "use_weighting": unless(False, "pairs have equal weights"),
}


def _cpo_loss(name: str, _: Values) -> dict[str, Any]:
    losses: dict[str, dict[str, Any]] = {
        "sigmoid": {},
        "hinge": {"dpo.loss_type": "hinge"},
        "ipo": {"dpo.loss_type": "ipo", "dpo.length_normalised": True},
        "simpo": {"dpo.length_normalised": True},
    }
    if name not in losses:
        raise NoCounterpart(f"losses are {', '.join(losses)}")
    return {"dpo.reference_free": True, **losses[name]}


def _likelihood(weight: float, _: Values) -> dict[str, Any]:
    if weight:
        raise NoCounterpart('only dpo.loss_type = "orpo" learns the likelihood of the chosen response, too')
    return {}


_SMOOTH = ("sigmoid", "simpo")
"""Losses of CPO with a log σ, which label smoothing and, in SimPO, the margin belong to."""


def _pair_length(length: int | None, _: Values) -> dict[str, Any]:
    return {"data.max_length": 512 if length is None else length}  # what these trainers take for None


_WITHOUT_REFERENCE: dict[str, Rule] = {
    **COMMON,
    "beta": "dpo.beta",
    "max_length": _pair_length,
    "max_completion_length": unless(None, "TRL limits only the responses of encoder-decoder models so"),
    "is_encoder_decoder": unless(False, "models have a decoder only"),
}

CPO: dict[str, Rule] = {
    **_WITHOUT_REFERENCE,
    "loss_type": _cpo_loss,
    "cpo_alpha": _likelihood,
    "simpo_gamma": lambda margin, values: {"dpo.margin": float(margin)} if values["loss_type"] == "simpo" else {},
    "label_smoothing": lambda share, values: (
        {"dpo.label_smoothing": float(share)} if share and values["loss_type"] in _SMOOTH else {}
    ),
    "alpha": unless(0.0, "AlphaPO is not a loss of dpo.loss_type"),
}

ORPO: dict[str, Rule] = {
    **_WITHOUT_REFERENCE,
    "beta": lambda beta, _: {"dpo.loss_type": "orpo", "dpo.beta": float(beta)},
}

KTO: dict[str, Rule] = {
    **COMMON,
    "beta": "kto.beta",
    "loss_type": "kto.loss_type",
    "desirable_weight": "kto.desirable_weight",
    "undesirable_weight": "kto.undesirable_weight",
    "max_length": _longest,
}


def _top_k(k: int | None, _: Values) -> dict[str, Any]:
    return {"sampling.top_k": max(0, k or 0)}


def _engine(is_on: bool, values: Values) -> dict[str, Any]:
    if not is_on:
        return {}
    if values.get("vllm_mode") == "server":
        raise NoCounterpart('set sampling.engine = "vllm" and sampling.servers to the URLs of plain vLLM servers')
    return {"sampling.engine": "vllm"}


_SERVER = {
    "vllm_gpu_memory_utilization": "gpu-memory-utilization",
    "vllm_tensor_parallel_size": "tensor-parallel-size",
    "vllm_max_model_length": "max-model-len",
    "vllm_model_impl": "model-impl",
}
"""Settings that become arguments of the server that the run starts."""


def _server_arguments(_: Any, values: Values) -> dict[str, Any]:
    given = [f"--{argument}={values[name]}" for name, argument in _SERVER.items() if values.get(name) is not None]
    return {"sampling.vllm.arguments": given} if values["use_vllm"] else {}


def _turns(calls: int | None, _: Values) -> dict[str, Any]:
    return {} if calls is None else {"environment.max_turns": calls + 1}


ONLINE: dict[str, Rule] = {
    **COMMON,
    "num_generations": "samples_per_prompt",
    "max_completion_length": "sampling.max_new_tokens",
    "shuffle_dataset": "data.shuffle",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": _top_k,
    "min_p": unless(0.0, "filters are top_k and top_p"),
    "repetition_penalty": unless(1.0, "a penalty would make the recorded probabilities those of another policy"),
    "generation_kwargs": unless({}, "filters are top_k, top_p and min_new_tokens"),
    "chat_template_kwargs": lambda options, _: {"data.template_options": options} if options else {},
    "use_vllm": _engine,
    "vllm_enable_sleep_mode": lambda on, values: {"sampling.vllm.sleep": True} if on and values["use_vllm"] else {},
    **dict.fromkeys(_SERVER, _server_arguments),
    "vllm_importance_sampling_cap": unless(None, "TRL now calls it vllm_importance_sampling_clip_max"),
    "vllm_structured_outputs_regex": unless(None, "responses are not constrained"),
    "beta": "kl.coef",
    "num_iterations": "update.epochs",
    "max_tool_calling_iterations": _turns,
    "reward_weights": None,  # rewards have their weights beside them
}


def _clip_high(section: str) -> Callable[[Any, Values], dict[str, Any]]:
    def rule(high: float | None, values: Values) -> dict[str, Any]:
        if values.get("loss_type") == "cispo":  # there, TRL's limit is the largest ratio itself
            return {f"{section}.clip_high": (high if high is not None else values["epsilon"]) - 1}
        return {f"{section}.clip_high": high if high is not None else values["epsilon"]}

    return rule


def _grpo_loss(name: str, _: Values) -> dict[str, Any]:
    losses: dict[str, dict[str, Any]] = {
        "dapo": {},
        "bnpo": {},
        "grpo": {"grpo.normalise": "sequence"},
        "dr_grpo": {"grpo.normalise": "constant"},
        "cispo": {"grpo.loss_type": "cispo"},
    }
    if name not in losses:
        raise NoCounterpart(f"losses are {', '.join(losses)}")
    return losses[name]


def _scale(scale: Any, values: Values) -> dict[str, Any]:
    if values.get("multi_objective_aggregation") == "normalize_then_sum":
        return {"grpo.scale": "batch"}
    return {"grpo.scale": {True: "group", False: "none"}.get(scale, scale)}


def _importance(mode: str, values: Values) -> dict[str, Any]:
    if not values["use_vllm"]:
        return {}
    if not values["vllm_importance_sampling_correction"]:
        return {"grpo.importance": 0.0}
    level, what = str(mode).split("_")
    cap = values["vllm_importance_sampling_clip_max"]
    if cap is None:
        raise NoCounterpart("weights need a cap: set grpo.importance")
    return {"grpo.importance": float(cap), "grpo.importance_level": level, "grpo.importance_mode": what}


def _off_policy(limit: float | None, values: Values) -> dict[str, Any]:
    has_effect = limit is not None and (updates(values) > 1 or values["use_vllm"])
    return {"grpo.off_policy_kl": limit} if has_effect else {}


GRPO: dict[str, Rule] = {
    **ONLINE,
    "epsilon": lambda low, values: {} if values["loss_type"] == "cispo" else {"grpo.clip_low": low},
    "epsilon_high": _clip_high("grpo"),
    "delta": lambda limit, _: {} if limit is None else {"grpo.dual_clip": limit},
    "loss_type": _grpo_loss,
    "scale_rewards": _scale,
    "multi_objective_aggregation": lambda how, _: (
        {} if how == "sum_then_normalize" else {"shaping.parts": "normalised", "grpo.baseline": "batch"}
    ),
    "importance_sampling_level": "grpo.ratio",
    "mask_truncated_completions": lambda on, _: {"grpo.overlong": "filter"} if on else {},
    "entropy_coef": "grpo.entropy_coef",
    "use_adaptive_entropy": unless(False, "grpo.entropy_coef is constant"),
    "top_entropy_quantile": unless(1.0, "all tokens are learned"),
    "use_bias_correction_kl": lambda on, values: {"grpo.kl_unbiased": True} if on and values["beta"] else {},
    "vllm_importance_sampling_mode": _importance,
    "vllm_importance_sampling_clip_min": unless(None, "weights have an upper limit only"),
    "off_policy_mask_threshold": _off_policy,
}


def _reward_clip(limits: Any, _: Values) -> dict[str, Any]:
    if limits is None:
        return {}
    low, high = limits
    if low != -high:
        raise NoCounterpart("shaping.clip is symmetric")
    return {"shaping.clip": float(high)}


RLOO: dict[str, Rule] = {
    **ONLINE,
    "epsilon": "rloo.clip_low",
    "epsilon_high": _clip_high("rloo"),
    "normalize_advantages": "rloo.whiten_advantages",
    "reward_clip_range": _reward_clip,
    "mask_truncated_completions": unless(False, "set shaping.missing_eos_penalty, or use GRPO"),
    "use_vllm": lambda on, values: {**_engine(on, values), **({"rloo.importance": 0.0} if on else {})},
}


DISTILL: dict[str, Rule] = {
    **COMMON,
    "num_generations": None,  # TRL samples one response to a prompt, as we do by default
    "teacher_model": "teacher.path",
    "teacher_model_name_or_path": "teacher.path",
    "teacher_model_init_kwargs": unless(None, "the teacher has the dtype of the model"),
    "beta": lambda beta, _: {"distill.loss_type": "full", "distill.beta": float(beta)},
    "lmbda": "distill.own_share",
    "seq_kd": unless(False, "fine-tune on the teacher's responses with cavesson sft"),
    "temperature": "sampling.temperature",
    "max_new_tokens": "sampling.max_new_tokens",
    "max_length": lambda length, _: {} if length is None else {"data.max_prompt_tokens": length},
}

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
