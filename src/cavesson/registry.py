"""The algorithms by name. A new algorithm is a module in `algorithms/` and a line in this table."""

from functools import reduce
from importlib import import_module
from operator import or_
from types import GenericAlias
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """Location of the settings of an algorithm's runs; they are imported on demand, because the import needs torch."""

    module: str
    name: str
    help: str

    @property
    def settings(self) -> Any:
        """The class of settings, a subclass of `cavesson.algorithms.runs.RunSettings`."""
        return getattr(import_module(self.module), self.name)


# First the algorithms that learn from examples, then those that learn from the policy's own responses.
ALGORITHMS = {
    "sft": Entry("cavesson.algorithms.sft", "SFTRun", "Fine-tune on examples of good responses."),
    "reward-model": Entry("cavesson.algorithms.reward_model", "RewardModelRun", "Train a reward model on pairs."),
    "dpo": Entry("cavesson.algorithms.dpo", "DPORun", "Train on pairs of a better and a worse response."),
    "ppo": Entry("cavesson.algorithms.ppo", "PPORun", "Reinforcement learning with a critic."),
    "grpo": Entry("cavesson.algorithms.grpo", "GRPORun", "Reinforcement learning that compares a group of responses."),
    "rloo": Entry("cavesson.algorithms.rloo", "RLOORun", "Reinforcement learning with a leave-one-out baseline."),
    "raft": Entry("cavesson.algorithms.raft", "RAFTRun", "Fine-tune on the best of the model's own responses."),
}


def any_recipe() -> Any:
    """Return the type of what a recipe may hold: the settings of any algorithm, or stages that have such settings."""
    settings = reduce(or_, (entry.settings for entry in ALGORITHMS.values()))
    return settings | GenericAlias(dict, (str, settings))


def name_of(settings: object) -> str:
    """Return the name of the algorithm with these settings, or the name of their class if it is not in the table."""
    known = {entry.name: name for name, entry in ALGORITHMS.items()}
    return known.get(type(settings).__name__, type(settings).__name__)
