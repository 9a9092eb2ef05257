"""Train language models with human feedback, with every token of every rollout on record."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dressage.algorithms.dpo import DPO, DPORun
    from dressage.algorithms.grouped import OnePassSettings
    from dressage.algorithms.grpo import GRPO, GRPORun, PenaltySettings
    from dressage.algorithms.ppo import PPO, PPORun
    from dressage.algorithms.raft import RAFT, RAFTRun
    from dressage.algorithms.reward_model import BradleyTerry, RewardModelRun
    from dressage.algorithms.rloo import RLOO, RLOORun
    from dressage.algorithms.sft import SFT, SFTRun
    from dressage.data.prompts import PromptSettings
    from dressage.data.settings import SourceSettings
    from dressage.data.tokens import PairSettings, TextSettings
    from dressage.errors import UserError
    from dressage.models.settings import (
        FrozenSettings,
        LoraSettings,
        ModelSettings,
        NewModelSettings,
        ReferenceSettings,
        ValueSettings,
    )
    from dressage.record import Recorder, Rollout, Run, open
    from dressage.rewards import Reward
    from dressage.rewards.settings import RewardSettings, ShapingSettings
    from dressage.sampling.settings import SamplingSettings
    from dressage.text.cleaning import CleaningSettings
    from dressage.train.doctor_settings import DoctorSettings
    from dressage.train.run import Result, Training
    from dressage.train.settings import (
        BatchSettings,
        CheckpointSettings,
        CoefficientSettings,
        EvaluationSettings,
        KLSettings,
        OptimizerSettings,
        RolloutCheckpointSettings,
        UpdateSettings,
    )

    __version__: str

__all__ = [
    "DPO", "GRPO", "PPO", "RAFT", "RLOO", "SFT", "BatchSettings", "BradleyTerry", "CheckpointSettings",
    "CleaningSettings", "CoefficientSettings", "DPORun", "DoctorSettings", "EvaluationSettings",
    "FrozenSettings", "GRPORun", "KLSettings", "LoraSettings", "ModelSettings", "NewModelSettings",
    "OnePassSettings", "OptimizerSettings", "PPORun", "PairSettings", "PenaltySettings", "PromptSettings",
    "RAFTRun", "RLOORun", "Recorder", "ReferenceSettings", "Result", "Reward", "RewardModelRun",
    "RewardSettings", "Rollout", "RolloutCheckpointSettings", "Run", "SFTRun", "SamplingSettings",
    "ShapingSettings", "SourceSettings", "TextSettings", "Training", "UpdateSettings", "UserError",
    "ValueSettings", "__version__", "open"
]  # fmt: skip

# Resolved on first use, so that `import dressage` needs neither torch nor a second.
_READING = {
    "dressage.errors": "UserError",
    "dressage.record": "Recorder Rollout Run open",
}
_TRAINING = {
    "dressage.algorithms.dpo": "DPO DPORun",
    "dressage.algorithms.grouped": "OnePassSettings",
    "dressage.algorithms.grpo": "GRPO GRPORun PenaltySettings",
    "dressage.algorithms.ppo": "PPO PPORun",
    "dressage.algorithms.raft": "RAFT RAFTRun",
    "dressage.algorithms.reward_model": "BradleyTerry RewardModelRun",
    "dressage.algorithms.rloo": "RLOO RLOORun",
    "dressage.algorithms.sft": "SFT SFTRun",
    "dressage.data.prompts": "PromptSettings",
    "dressage.data.settings": "SourceSettings",
    "dressage.data.tokens": "PairSettings TextSettings",
    "dressage.models.settings": (
        "FrozenSettings LoraSettings ModelSettings NewModelSettings ReferenceSettings ValueSettings"
    ),
    "dressage.rewards": "Reward",
    "dressage.rewards.settings": "RewardSettings ShapingSettings",
    "dressage.sampling.settings": "SamplingSettings",
    "dressage.text.cleaning": "CleaningSettings",
    "dressage.train.doctor_settings": "DoctorSettings",
    "dressage.train.run": "Result Training",
    "dressage.train.settings": (
        "BatchSettings CheckpointSettings CoefficientSettings EvaluationSettings KLSettings "
        "OptimizerSettings RolloutCheckpointSettings UpdateSettings"
    ),
}
_HOMES = {name: home for home, names in (_READING | _TRAINING).items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("dressage")
    if name not in _HOMES:
        raise AttributeError(f"module 'dressage' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names; in the light installation only what it can import."""
    if find_spec("torch") is not None:
        return sorted(__all__)
    return sorted(["__version__", *(name for names in _READING.values() for name in names.split())])
