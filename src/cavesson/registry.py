"""The algorithms and the sampling engines by name.

A new one is a module and a line in one of these tables, or an entry point of an installed package.
"""

from collections.abc import Mapping
from functools import cache, reduce
from importlib import import_module
from operator import or_
from types import GenericAlias
from typing import Any, NamedTuple

from cavesson.plugins import installed, loaded


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
    "kto": Entry("cavesson.algorithms.kto", "KTORun", "Train on responses that are labelled as good or bad."),
    "ppo": Entry("cavesson.algorithms.ppo", "PPORun", "Reinforcement learning with a critic."),
    "grpo": Entry("cavesson.algorithms.grpo", "GRPORun", "Reinforcement learning that compares a group of responses."),
    "rloo": Entry("cavesson.algorithms.rloo", "RLOORun", "Reinforcement learning with a leave-one-out baseline."),
    "distill": Entry("cavesson.algorithms.distill", "DistillRun", "Learn from a teacher on the model's own responses."),
    "raft": Entry("cavesson.algorithms.raft", "RAFTRun", "Fine-tune on the best of the model's own responses."),
}
ALGORITHMS |= {
    name: Entry(entry.module, entry.attr, f"An algorithm of {entry.dist.name}." if entry.dist else "An algorithm.")
    for name, entry in installed("algorithms", ALGORITHMS).items()
}


class EngineEntry(NamedTuple):
    """An engine that samples: where it is built, and what it cannot do. All else asks this, and never its name."""

    module: str
    name: str
    """of the function that builds it from `cavesson.rollout.engines.building.EngineParts`; it is imported on demand"""
    cannot: Mapping[str, str] = {}
    """settings of a run that have no effect with it, by their dotted names, and the end of the message that says so"""
    local: bool = False
    """it samples in the training process, from the policy's own weights and in its memory; otherwise in servers"""
    exact: bool = False
    """its log-probabilities are those of scoring, so that no importance weights are needed"""

    def can(self, setting: str) -> bool:
        """Return whether a setting, by its dotted name in a run, has an effect."""
        return setting not in self.cannot

    @property
    def build(self) -> Any:
        """The function that builds it."""
        return getattr(import_module(self.module), self.name)


ENGINES = {
    "transformers": EngineEntry(
        "cavesson.rollout.engines.building",
        "transformers_engine",
        dict.fromkeys(("sampling.servers", "sampling.vllm", "sampling.max_staleness"), 'without engine "vllm"'),
        local=True,
        exact=True,
    ),
    "vllm": EngineEntry(
        "cavesson.rollout.engines.building",
        "vllm_engine",
        {
            "sampling.batch_size": 'with engine "vllm", which forms its own batches',
            "sampling.merge_adapters": 'with engine "vllm", which gets them as they are',
            "model.quantization": 'with sampling.engine "vllm", which would sample from other weights',
            "model.lora.dora": 'with sampling.engine "vllm", which has no such adapters',
        },
    ),
}


def engines() -> dict[str, EngineEntry]:
    """Return the engines of the table, and those of installed packages."""
    return ENGINES | _installed_engines()


@cache
def _installed_engines() -> dict[str, EngineEntry]:
    return loaded("engines", EngineEntry, ENGINES)


def chosen_by_plan(settings: Any, device: Any) -> tuple[dict[str, Any], list[str]]:
    """Return what the plan chooses for a run on a device: values of settings by dotted names, and notes on them.

    It is imported on demand: a plan simulates a whole step, and so imports everything that trains.
    """
    found: tuple[dict[str, Any], list[str]] = import_module("cavesson.plan.predict").choose(settings, device)
    return found


def any_recipe() -> Any:
    """Return the type of what a recipe may hold: the settings of any algorithm, or stages that have such settings."""
    settings = reduce(or_, (entry.settings for entry in ALGORITHMS.values()))
    return settings | GenericAlias(dict, (str, settings))


def name_of(settings: object) -> str:
    """Return the name of the algorithm with these settings, or the name of their class if it is not in the table."""
    known = {entry.name: name for name, entry in ALGORITHMS.items()}
    return known.get(type(settings).__name__, type(settings).__name__)
