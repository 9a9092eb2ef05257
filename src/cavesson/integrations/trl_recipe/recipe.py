"""Write a recipe with TRL's name beside every line, and what has no counterpart below."""

from collections.abc import Iterator, Mapping
from typing import Any

from cavesson.config import describe
from cavesson.integrations.trl_recipe.common import ADAPTERS, NoCounterpart
from cavesson.integrations.trl_recipe.given import Given
from cavesson.integrations.trl_recipe.mapping import DEFAULTS, DIFFERENCES, RULES
from cavesson.registry import ALGORITHMS
from cavesson.text.toml_value import toml_value


def recipe(given: Given, processes: int = 1, prompts: int | None = None) -> str:
    """Return a recipe as TOML text.

    Args:
        given: what the configuration says.
        processes: of TRL's run; `per_device_…` settings are multiplied by them.
        prompts: rows of the data set, if their number is known.
    """
    values = {"processes": processes, "prompts": prompts, **DEFAULTS[given.trainer], **given.values}
    ours = {name: default for name, _, default, _ in describe(ALGORITHMS[given.command].settings)}
    lines: dict[str, tuple[Any, str]] = {}
    missing = {f"{name} = {text}": "it is not a constant: set it by hand" for name, text in given.unread.items()}
    for name, value in given.values.get("lora", {}).items():
        if name not in (*ADAPTERS, "task_type") and value not in (None, False, 0, "none"):
            missing[f"{name} = {value!r} of LoRA"] = "adapters have a rank, alpha, targets and DoRA"
    for name in [*given.values, *(name for name in DEFAULTS[given.trainer] if name not in given.values)]:
        is_given = name in given.values
        try:
            for setting, value in _converted(given.trainer, name, values).items():
                if is_given or (setting in ours and toml_value(value).strip('"') != ours[setting]):
                    lines.setdefault(setting, (value, name if is_given else f"TRL's default of {name}"))
        except NoCounterpart as reason:
            missing[f"{name} = {values[name]!r}"] = str(reason)
    head = [f"# cavesson {given.command} RECIPE, from a configuration of TRL. Beside every line: TRL's name."]
    return "\n".join([*head, *_tables(lines), *_rewards(given), *_remarks(missing, DIFFERENCES[given.trainer]), ""])


def _converted(trainer: str, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    rules = RULES[trainer]
    if name not in rules:
        if name in _IGNORED or name.startswith(_IGNORED_BEGINNINGS):
            return {}
        raise NoCounterpart("no setting of Cavesson does this")
    rule = rules[name]
    if rule is None:
        return {}
    return {rule: values[name]} if isinstance(rule, str) else rule(values[name], values)


_ORDER = ("", "model", "model.lora", "data", "sampling", "sampling.vllm", "environment", "optimizer", "update")


def _tables(lines: Mapping[str, tuple[Any, str]]) -> Iterator[str]:
    """Yield the settings outside tables, then every table."""
    groups: dict[str, list[str]] = {group: [] for group in _ORDER}
    if "data.path" not in lines:
        groups["data"].append('path = "FILE.jsonl"  # train_dataset: a file, a folder or a Hub name')
    for setting, (value, note) in lines.items():
        group, _, name = setting.rpartition(".")
        groups.setdefault(group, []).append(f"{name} = {toml_value(value)}  # {note}")
    for group, settings in groups.items():
        if settings:
            yield from [*(["", f"[{group}]"] if group else []), *settings]


def _rewards(given: Given) -> Iterator[str]:
    weights = given.values.get("reward_weights") or [1.0] * len(given.rewards)
    for reward, weight in zip(given.rewards, weights, strict=False):
        is_function = ":" in reward
        yield from ("", "[[rewards]]", f"use = {toml_value(reward if is_function else 'classifier')}  # reward_funcs")
        if not is_function:
            yield f"options = {{ path = {toml_value(reward)} }}"
        if weight != 1.0:
            yield f"weight = {toml_value(weight)}  # reward_weights"
    if not given.rewards and given.command in ("grpo", "rloo"):
        yield from (
            "",
            "[[rewards]]",
            'use = "FILE.py:FUNCTION"  # reward_funcs: functions of TRL are called unchanged',
        )


def _remarks(missing: Mapping[str, str], differences: list[str]) -> Iterator[str]:
    if missing:
        yield from ("", "# Without a counterpart:")
        yield from (f"# {name}: {reason}" for name, reason in missing.items())
    yield from ("", "# What differs from TRL whatever is set:")
    yield from (f"# {text}" for text in differences)


_IGNORED_BEGINNINGS = (
    "dataloader_", "logging_", "log_", "hub_", "ddp_", "torch_compile", "vllm_server_", "include_", "entropy_",
    "sapo_", "vespo_", "trackio_",
)  # fmt: skip
_IGNORED = {
    "accelerator_config", "attn_implementation", "cast_lm_head_to_fp32", "dataset_num_proc", "dataset_test_split",
    "debug", "disable_dropout", "disable_tqdm", "do_eval", "do_train", "ds3_gather_for_generation",
    "generate_during_eval", "generation_batch_size", "gradient_checkpointing_kwargs", "liger_kernel_config",
    "local_rank", "logging_dir", "model_revision", "num_completions_to_print", "num_generations_eval",
    "overwrite_output_dir", "packing_strategy", "pad_to_multiple_of", "pad_token", "padding_free", "padding_value",
    "per_device_eval_batch_size",
    "precompute_ref_batch_size", "precompute_ref_log_probs", "ref_model_mixup_alpha", "ref_model_sync_steps",
    "remove_unused_columns", "resume_from_checkpoint", "run_name", "steps_per_generation", "tf32", "use_cache",
    "use_liger_kernel", "use_transformers_paged", "vllm_group_port", "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_correction", "vllm_mode",
}  # fmt: skip
"""Settings that do not change what is learned, or that Cavesson does always or by itself."""
