"""Read what a TRL configuration says: YAML, JSON, or a Python file, which is parsed and never run."""

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cavesson.errors import UserError

TRAINERS = {
    "sft": "SFT",
    "reward-model": "Reward",
    "dpo": "DPO",
    "kto": "KTO",
    "grpo": "GRPO",
    "rloo": "RLOO",
    "distill": "GKD",
}
"""Commands, and how the names of TRL's trainers and configurations begin."""
_TELLING = {
    "grpo": {
        "scale_rewards",
        "importance_sampling_level",
        "delta",
        "use_bias_correction_kl",
        "mask_truncated_completions",
    },
    "rloo": {"normalize_advantages", "reward_clip_range"},
    "reward-model": {"center_rewards_coefficient"},
    "sft": {"packing", "completion_only_loss", "assistant_only_loss", "dataset_text_field"},
    "distill": {"lmbda", "seq_kd", "teacher_model_name_or_path"},
    "dpo": {"label_smoothing", "f_divergence_type"},
    "kto": {"desirable_weight", "undesirable_weight"},
}
"""Settings that only one trainer has, for files that do not name theirs."""


@dataclass
class Given:
    """What a configuration says."""

    command: str
    """sft, reward-model, dpo, kto, grpo, rloo or distill"""
    values: dict[str, Any]
    """fields of the configuration, and what the trainer gets as `model`, `dataset` and `lora`, if that was found"""
    rewards: list[str] = field(default_factory=list)
    """`reward_funcs`: functions as file.py:name, or names of models"""
    unread: dict[str, str] = field(default_factory=dict)
    """arguments that are not constants, as they are written"""


def read(path: Path, command: str | None) -> Given:
    """Read a file.

    Args:
        path: .yaml, .yml, .json or .py.
        command: whose trainer it configures; None = found out.

    Raises:
        UserError: it cannot be read, or it does not say which trainer it is for.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if path.suffix == ".py":
        return _of_script(path, text, command)
    values = _table(path, text)
    return _of_command_line(command or _command_of(path, values), values)


def _table(path: Path, text: str) -> dict[str, Any]:
    import yaml

    if path.suffix not in (".yaml", ".yml", ".json"):
        raise UserError(f"{path}: give a .yaml, .json or .py file")
    try:
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no table of settings")
    return values


def _command_of(path: Path, values: Mapping[str, Any]) -> str:
    found = [command for command, names in _TELLING.items() if names & set(values)]
    if len(found) != 1:
        raise UserError(f"{path} does not say which trainer it is for: add --trainer {'|'.join(TRAINERS)}")
    return found[0]


def _of_command_line(command: str, values: dict[str, Any]) -> Given:
    """Return what a file for `trl sft --config` and the like says, with the trainer's arguments under our names."""
    values = dict(values)
    lora = {name: values.pop(f"lora_{name}") for name in _LORA if f"lora_{name}" in values}
    lora["use_dora"] = values.pop("use_dora", False)
    if values.pop("use_peft", False):
        values["lora"] = {"r": 16, "alpha": 32, **lora}  # the defaults of TRL's commands, which are not PEFT's
    for theirs, ours in {"model_name_or_path": "model", "dataset_name": "dataset"}.items():
        if theirs in values:
            values[ours] = values.pop(theirs)
    rewards = [_function(name) for name in values.pop("reward_funcs", None) or []]
    if model := values.pop("reward_model_name_or_path", None):
        rewards.append(model)
    return Given(command, values, rewards)


_LORA = ("r", "alpha", "dropout", "target_modules", "modules_to_save", "task_type")


def _function(name: str) -> str:
    """Return a reward function of TRL's commands, by its name in `trl.rewards` or by its path, as module:function."""
    module, _, function = name.rpartition(".")
    return f"{module or 'trl.rewards'}:{function}"


def _of_script(path: Path, text: str, command: str | None) -> Given:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise UserError(f"{path}, line {error.lineno}: {error.msg}") from None
    names = {f"{begin}{kind}": one for one, begin in TRAINERS.items() for kind in ("Config", "Trainer")}
    calls = [(_name(call), call) for call in ast.walk(tree) if isinstance(call, ast.Call)]
    configs = [(names[name], call) for name, call in calls if name in names and name.endswith("Config")]
    configs = [one for one in configs if command in (None, one[0])]
    if len(configs) != 1:
        found = f"{len(configs)} calls" if configs else "no call"
        raise UserError(
            f"{path} has {found} of {', '.join(f'{begin}Config' for begin in TRAINERS.values())}; it needs one"
        )
    ((command, call),) = configs
    given = Given(command, {})
    given.values |= _constants(call, given.unread)
    for name, trainer in calls:
        if name == f"{TRAINERS[command]}Trainer":
            _add_trainer(given, path, tree, trainer)
    given.values |= _data(calls)
    for name, lora in calls:
        if name == "LoraConfig":
            given.values["lora"] = {
                one.removeprefix("lora_"): value for one, value in _constants(lora, given.unread).items()
            }
    return given


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def _constants(call: ast.Call, unread: dict[str, str]) -> dict[str, Any]:
    """Return the keyword arguments of a call that are constants, and add the others to `unread`."""
    values = {}
    for keyword in call.keywords:
        name = keyword.arg or f"**{ast.unparse(keyword.value)}"
        try:
            values[name] = ast.literal_eval(keyword.value)
        except ValueError:
            unread[name] = ast.unparse(keyword.value)
    return values


def _add_trainer(given: Given, path: Path, tree: ast.Module, call: ast.Call) -> None:
    """Add what the call of the trainer says of model, data and rewards."""
    arguments = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    arguments |= dict(zip(("model",), call.args, strict=False))
    for argument in ("model", "teacher_model"):
        if (model := _text(arguments.get(argument))) is not None:
            given.values[argument] = model
            del arguments[argument]
    others = set(arguments) - {"model", "args", "reward_funcs", "train_dataset", "peft_config", "processing_class"}
    given.unread |= {f"{name} of the trainer": ast.unparse(arguments[name]) for name in sorted(others)}
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for reward in _listed(arguments.get("reward_funcs")):
        name = _text(reward)
        if name is None and isinstance(reward, ast.Name):
            name = f"{path.name}:{reward.id}" if reward.id in functions else f"FILE.py:{reward.id}"
        given.rewards.append(name or f"FILE.py:{ast.unparse(reward)}")


def _data(calls: list[tuple[str, ast.Call]]) -> dict[str, Any]:
    """Return the data set that a script loads, if it is one of a constant name."""
    loads = [call for name, call in calls if name == "load_dataset"]
    names = {_text(call.args[0]) for call in loads if call.args} - {None}
    if len(names) != 1:
        return {}
    found: dict[str, Any] = {"dataset": names.pop()}
    splits = {_text(keyword.value) for call in loads for keyword in call.keywords if keyword.arg == "split"} - {None}
    return found | ({"dataset_train_split": splits.pop()} if len(splits) == 1 else {})


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _listed(node: ast.expr | None) -> Iterator[ast.expr]:
    if isinstance(node, ast.List | ast.Tuple):
        yield from node.elts
    elif node is not None:
        yield node
