"""Train language models with human feedback, with every token of every rollout on record."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dressage.algorithms.ppo import PPORun
    from dressage.errors import UserError
    from dressage.record import Recorder, open
    from dressage.rewards import Reward
    from dressage.train.run import Training

__all__ = ["PPORun", "Recorder", "Reward", "Training", "UserError", "open"]

# Resolved on first use, so that `import dressage` needs neither torch nor a second.
_HOMES = {
    "PPORun": "dressage.algorithms.ppo",
    "Recorder": "dressage.record",
    "Reward": "dressage.rewards",
    "Training": "dressage.train.run",
    "UserError": "dressage.errors",
    "open": "dressage.record",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dressage' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
