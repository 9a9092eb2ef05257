"""Write a recipe with TRL's name beside every line, and what has no counterpart below."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cavesson.config import describe
from cavesson.integrations.trl_recipe.given import Given
from cavesson.integrations.trl_recipe.mapping import DEFAULTS, DIFFERENCES, RULES, NoCounterpart
from cavesson.registry import ALGORITHMS


def recipe(given: Given, processes: int = 1, prompts: int | None = None) -> str:
    """Return a recipe as TOML text.

    Args:
        given: what the configuration says.
        processes: of TRL's run; `per_device_…` settings are multiplied by them.
        prompts: rows of the data set, if their number is known.
    """
    values = {"processes": processes, "prompts": prompts, **DEFAULTS[given.command], **given.values}
    ours = {name: default for name, _, default, _ in describe(ALGORITHMS[given.command].settings)}
    lines: dict[str, tuple[Any, str]] = {}
    missing = {f"{name} = {text}": "it is not a constant: set it by hand" for name, text in given.unread.items()}
    for name in [*given.values, *(name for name in DEFAULTS[given.command] if name not in given.values)]:
        is_given = name in given.values
        try:
            for setting, value in _converted(given.command, name, values).items():
                if is_given or (setting in ours and _text(value).strip('"') != ours[setting]):
                    lines.setdefault(setting, (value, name if is_given else f"TRL's default of {name}"))
        except NoCounterpart as reason:
            missing[f"{name} = {values[name]!r}"] = str(reason)
    head = [f"# cavesson {given.command} RECIPE, from a configuration of TRL. Beside every line: TRL's name."]
    return "\n".join([*head, *_tables(lines), *_rewards(given), *_remarks(missing, DIFFERENCES[given.command]), ""])


def _converted(command: str, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    rules = RULES[command]
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
        groups.setdefault(group, []).append(f"{name} = {_text(value)}  # {note}")
    for group, settings in groups.items():
        if settings:
            yield from [*(["", f"[{group}]"] if group else []), *settings]


def _rewards(given: Given) -> Iterator[str]:
    weights = given.values.get("reward_weights") or [1.0] * len(given.rewards)
    for reward, weight in zip(given.rewards, weights, strict=False):
        is_function = ":" in reward
        yield from ("", "[[rewards]]", f"use = {_text(reward if is_function else 'classifier')}  # reward_funcs")
        if not is_function:
            yield f"options = {{ path = {_text(reward)} }}"
        if weight != 1.0:
            yield f"weight = {_text(weight)}  # reward_weights"
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


def _text(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(name)} = {_text(one)}" for name, one in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, Path):
        value = str(value)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, bool | str) else repr(value)


_IGNORED_BEGINNINGS = (
    "dataloader_", "logging_", "log_", "hub_", "push_to_hub", "ddp_", "torch_compile", "vllm_", "include_", "entropy_",
    "sapo_", "vespo_", "trackio_",
)  # fmt: skip
_IGNORED = {
    "gradient_checkpointing_kwargs", "disable_dropout", "remove_unused_columns", "dataset_num_proc", "packing",
    "packing_strategy", "padding_free", "pad_to_multiple_of", "pad_token", "run_name", "do_train", "do_eval", "tf32",
    "use_liger_kernel", "liger_kernel_config", "disable_tqdm", "precompute_ref_log_probs", "precompute_ref_batch_size",
    "per_device_eval_batch_size", "steps_per_generation", "generation_batch_size", "num_completions_to_print",
    "ds3_gather_for_generation", "cast_lm_head_to_fp32", "resume_from_checkpoint", "overwrite_output_dir", "use_cache",
    "train_sampling_strategy", "ref_model_mixup_alpha", "ref_model_sync_steps", "num_generations_eval", "local_rank",
    "accelerator_config", "debug",
    "dataset_test_split", "attn_implementation", "use_transformers_paged", "model_revision", "logging_dir",
}  # fmt: skip
"""Settings that do not change what is learned, or that Cavesson does always or by itself."""
