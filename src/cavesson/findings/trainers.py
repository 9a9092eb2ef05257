"""What the settings that a fix names are called in other trainers."""

import re
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from cavesson.findings.finding import TrainerSettingNames

Name = str | Mapping[str, str]
"""Of a setting: one for all algorithms, or by algorithms; names.toml says how it is written."""
Names = Mapping[str, Name]
"""Cavesson's setting → the trainer's. A setting that the trainer lacks has no entry."""
TABLE: Mapping[str, Any] = tomllib.loads(files("cavesson.findings").joinpath("names.toml").read_text("utf-8"))
TRAINERS = {"trl": "TRL", "verl": "verl", "openrlhf": "OpenRLHF", "nemo-rl": "NeMo RL", "prime-rl": "prime-rl"}
"""What run.json calls a trainer, as ``trainer`` if a hook recorded the run, as ``format`` if it was imported → its
name."""
NAMES: Mapping[str, Names] = TABLE["trainers"]
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


def value_in(info: Mapping[str, Any], setting: str) -> Any:
    """Return the value that a run of another trainer has for a setting of Cavesson; None if it is not recorded."""
    trainer = trainer_of(info)
    if trainer not in NAMES:
        return None
    value = info.get("config")
    for key in name_in(trainer, info.get("algorithm"), setting).partition(" ")[0].removeprefix("--").split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _told_apart(names: Names) -> set[str]:
    """Return the algorithms for which a trainer has names of their own."""
    by_algorithm = (name for name in names.values() if not isinstance(name, str))
    return {one for name in by_algorithm for several in name for one in several.split(", ")}
