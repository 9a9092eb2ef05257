"""The settings of TRL's trainers on sampled responses in ours: GRPO, RLOO and GKD."""

from collections.abc import Callable
from typing import Any

from cavesson.integrations.trl_recipe.common import COMMON, NoCounterpart, Rule, Values, unless, updates


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
