"""Read what a TRL configuration says: YAML, JSON, or a Python file, which is parsed and never run."""

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cavesson.errors import UserError


class Trainer(NamedTuple):
    """One of TRL's trainers."""

    command: str
    """Ours, which trains as it does"""
    name: str
    """How the names of its class and its configuration begin"""
    telling: frozenset[str]
    """Settings that only this trainer has, for files that do not name theirs"""


TRAINERS = {
    "sft": Trainer(
        "sft", "SFT", frozenset({"packing", "completion_only_loss", "assistant_only_loss", "dataset_text_field"})
    ),
    "reward-model": Trainer("reward-model", "Reward", frozenset({"center_rewards_coefficient"})),
    "dpo": Trainer("dpo", "DPO", frozenset({"f_divergence_type", "use_weighting"})),
    "cpo": Trainer("dpo", "CPO", frozenset({"cpo_alpha", "simpo_gamma"})),
    "orpo": Trainer("dpo", "ORPO", frozenset({"padding_value"})),
    "kto": Trainer("kto", "KTO", frozenset({"desirable_weight", "undesirable_weight"})),
    "grpo": Trainer(
        "grpo",
        "GRPO",
        frozenset({"scale_rewards", "importance_sampling_level", "delta", "use_bias_correction_kl"}),
    ),
    "rloo": Trainer("rloo", "RLOO", frozenset({"normalize_advantages", "reward_clip_range"})),
    "distill": Trainer("distill", "GKD", frozenset({"lmbda", "seq_kd", "teacher_model_name_or_path"})),
}
"""By what `--trainer` calls them: our command, or the trainer's name where a command has several"""
_CLASSES = {f"{trainer.name}{kind}": one for one, trainer in TRAINERS.items() for kind in ("Config", "Trainer")}


@dataclass
class Given:
    """What a configuration says."""

    trainer: str
    """a key of TRAINERS"""
    values: dict[str, Any]
    """fields of the configuration, and what the trainer gets as `model`, `dataset` and `lora`, if that was found"""
    rewards: list[str] = field(default_factory=list)
    """`reward_funcs`: functions as file.py:name, or names of models"""
    unread: dict[str, str] = field(default_factory=dict)
    """arguments that are not constants, as they are written"""

    @property
    def command(self) -> str:
        """Our command that trains so."""
        return TRAINERS[self.trainer].command


def read(path: Path, trainer: str | None) -> Given:
    """Read a file.

    Args:
        path: .yaml, .yml, .json or .py.
        trainer: the key in TRAINERS of the trainer it configures; None = found out.

    Raises:
        UserError: it cannot be read, or it does not say which trainer it is for.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if path.suffix == ".py":
        return _of_script(path, text, trainer)
    values = _table(path, text)
    return _of_command_line(trainer or _trainer_of(path, values), values)


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


def _trainer_of(path: Path, values: Mapping[str, Any]) -> str:
    found = [key for key, trainer in TRAINERS.items() if trainer.telling & set(values)]
    if len(found) != 1:
        raise UserError(f"{path} does not say which trainer it is for: add --trainer {'|'.join(TRAINERS)}")
    return found[0]


def _of_command_line(trainer: str, values: dict[str, Any]) -> Given:
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
    return Given(trainer, values, rewards)


_LORA = ("r", "alpha", "dropout", "target_modules", "modules_to_save", "task_type")


def _function(name: str) -> str:
    """Return a reward function of TRL's commands, by its name in `trl.rewards` or by its path, as module:function."""
    module, _, function = name.rpartition(".")
    return f"{module or 'trl.rewards'}:{function}"


def _of_script(path: Path, text: str, trainer: str | None) -> Given:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise UserError(f"{path}, line {error.lineno}: {error.msg}") from None
    calls = [(_name(call), call) for call in ast.walk(tree) if isinstance(call, ast.Call)]
    configs = [(_CLASSES[name], call) for name, call in calls if name in _CLASSES and name.endswith("Config")]
    configs = [one for one in configs if trainer in (None, one[0])]
    if len(configs) != 1:
        found = f"{len(configs)} calls" if configs else "no call"
        raise UserError(
            f"{path} has {found} of {', '.join(name for name in _CLASSES if name.endswith('Config'))}; it needs one"
        )
    ((trainer, call),) = configs
    given = Given(trainer, {})
    given.values |= _constants(call, given.unread)
    for name, made in calls:
        if name == f"{TRAINERS[trainer].name}Trainer":
            _add_trainer(given, path, tree, made)
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
