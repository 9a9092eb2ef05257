"""Train language models with human feedback, with every token of every rollout on record."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cavesson.algorithms.dpo import DPO, DPORun
    from cavesson.algorithms.grouped import OnePassSettings
    from cavesson.algorithms.grpo import GRPO, GRPORun, PenaltySettings
    from cavesson.algorithms.ppo import PPO, PPORun
    from cavesson.algorithms.raft import RAFT, RAFTRun
    from cavesson.algorithms.reward_model import BradleyTerry, RewardModelRun
    from cavesson.algorithms.rloo import RLOO, RLOORun
    from cavesson.algorithms.settings import (
        BatchSettings,
        CheckpointSettings,
        CoefficientSettings,
        DoctorSettings,
        EvaluationSettings,
        KLSettings,
        LearnerSettings,
        OptimizerSettings,
        ParallelSettings,
        RaySettings,
        RewardWorkerSettings,
        RolloutCheckpointSettings,
        RolloutRaySettings,
        ServerSettings,
        UpdateSettings,
    )
    from cavesson.algorithms.sft import SFT, SFTRun
    from cavesson.data.settings import PairSettings, PromptSettings, SourceSettings, TextSettings
    from cavesson.errors import UserError
    from cavesson.models.settings import (
        FrozenSettings,
        LoraSettings,
        ModelSettings,
        NewModelSettings,
        ReferenceSettings,
        ValueSettings,
    )
    from cavesson.record import Recorder, Rollout, Run, open
    from cavesson.rewards.cleaning import CleaningSettings
    from cavesson.rewards.settings import RewardSettings, ShapingSettings
    from cavesson.rewards.table import Reward
    from cavesson.sampling.settings import SamplingSettings, VllmSettings
    from cavesson.train.run import Result, Training

    __version__: str

__all__ = [
    "DPO",
    "GRPO",
    "PPO",
    "RAFT",
    "RLOO",
    "SFT",
    "BatchSettings",
    "BradleyTerry",
    "CheckpointSettings",
    "CleaningSettings",
    "CoefficientSettings",
    "DPORun",
    "DoctorSettings",
    "EvaluationSettings",
    "FrozenSettings",
    "GRPORun",
    "KLSettings",
    "LearnerSettings",
    "LoraSettings",
    "ModelSettings",
    "NewModelSettings",
    "OnePassSettings",
    "OptimizerSettings",
    "PPORun",
    "PairSettings",
    "ParallelSettings",
    "PenaltySettings",
    "PromptSettings",
    "RAFTRun",
    "RLOORun",
    "RaySettings",
    "Recorder",
    "ReferenceSettings",
    "Result",
    "Reward",
    "RewardModelRun",
    "RewardSettings",
    "RewardWorkerSettings",
    "Rollout",
    "RolloutCheckpointSettings",
    "RolloutRaySettings",
    "Run",
    "SFTRun",
    "SamplingSettings",
    "ServerSettings",
    "ShapingSettings",
    "SourceSettings",
    "TextSettings",
    "Training",
    "UpdateSettings",
    "UserError",
    "ValueSettings",
    "VllmSettings",
    "__version__",
    "open"
]  # fmt: skip

# Resolved on first use, so that `import cavesson` is fast and does not need torch.
_READING = {
    "cavesson.errors": "UserError",
    "cavesson.record": "Recorder Rollout Run open",
}
_TRAINING = {
    "cavesson.algorithms.dpo": "DPO DPORun",
    "cavesson.algorithms.grouped": "OnePassSettings",
    "cavesson.algorithms.grpo": "GRPO GRPORun PenaltySettings",
    "cavesson.algorithms.ppo": "PPO PPORun",
    "cavesson.algorithms.raft": "RAFT RAFTRun",
    "cavesson.algorithms.reward_model": "BradleyTerry RewardModelRun",
    "cavesson.algorithms.rloo": "RLOO RLOORun",
    "cavesson.algorithms.sft": "SFT SFTRun",
    "cavesson.data.settings": "PairSettings PromptSettings SourceSettings TextSettings",
    "cavesson.models.settings": (
        "FrozenSettings LoraSettings ModelSettings NewModelSettings ReferenceSettings ValueSettings"
    ),
    "cavesson.rewards.settings": "RewardSettings ShapingSettings",
    "cavesson.rewards.table": "Reward",
    "cavesson.sampling.settings": "SamplingSettings VllmSettings",
    "cavesson.rewards.cleaning": "CleaningSettings",
    "cavesson.train.run": "Result Training",
    "cavesson.algorithms.settings": (
        "BatchSettings CheckpointSettings CoefficientSettings DoctorSettings EvaluationSettings KLSettings "
        "LearnerSettings OptimizerSettings ParallelSettings RaySettings RewardWorkerSettings RolloutCheckpointSettings "
        "RolloutRaySettings ServerSettings UpdateSettings"
    ),
}
_HOMES = {name: home for home, names in (_READING | _TRAINING).items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("cavesson")
    if name not in _HOMES:
        raise AttributeError(f"module 'cavesson' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Return the public names; without torch, only those that can be imported."""
    if find_spec("torch") is not None:
        return sorted(__all__)
    return sorted(["__version__", *(name for names in _READING.values() for name in names.split())])
