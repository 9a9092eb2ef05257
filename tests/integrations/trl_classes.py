"""TRL's classes of configurations, in its main package or among its experimental ones."""

from importlib import import_module
from typing import Any

from cavesson.integrations.trl_recipe.given import TRAINERS

_EXPERIMENTAL = ("CPO", "ORPO", "GKD")


def config_class(trainer: str) -> Any:
    """Return the class of a key of `TRAINERS`."""
    name = TRAINERS[trainer].name
    module = import_module(f"trl.experimental.{name.lower()}" if name in _EXPERIMENTAL else "trl")
    return getattr(module, f"{name}Config")
