"""The settings that all trainers of TRL 1.16 have, in ours: one function or name each; others say why there is none."""

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


def longest(length: int | None, _: Values) -> dict[str, Any]:
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
