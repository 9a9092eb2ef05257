"""Train language models with human feedback, with every token of every rollout on record."""

from cavesson.algorithms.distill import Distill as Distill
from cavesson.algorithms.distill import DistillRun as DistillRun
from cavesson.algorithms.dpo import DPO as DPO
from cavesson.algorithms.dpo import DPORun as DPORun
from cavesson.algorithms.grouped import OnePassSettings as OnePassSettings
from cavesson.algorithms.grpo import GRPO as GRPO
from cavesson.algorithms.grpo import GRPORun as GRPORun
from cavesson.algorithms.grpo import PenaltySettings as PenaltySettings
from cavesson.algorithms.kto import KTO as KTO
from cavesson.algorithms.kto import KTORun as KTORun
from cavesson.algorithms.ppo import PPO as PPO
from cavesson.algorithms.ppo import PPORun as PPORun
from cavesson.algorithms.raft import RAFT as RAFT
from cavesson.algorithms.raft import RAFTRun as RAFTRun
from cavesson.algorithms.reward_model import BradleyTerry as BradleyTerry
from cavesson.algorithms.reward_model import RewardModelRun as RewardModelRun
from cavesson.algorithms.rloo import RLOO as RLOO
from cavesson.algorithms.rloo import RLOORun as RLOORun
from cavesson.algorithms.settings import (
    BatchSettings as BatchSettings,
)
from cavesson.algorithms.settings import (
    CheckpointSettings as CheckpointSettings,
)
from cavesson.algorithms.settings import (
    CoefficientSettings as CoefficientSettings,
)
from cavesson.algorithms.settings import (
    DoctorSettings as DoctorSettings,
)
from cavesson.algorithms.settings import (
    EvaluationSettings as EvaluationSettings,
)
from cavesson.algorithms.settings import (
    KLSettings as KLSettings,
)
from cavesson.algorithms.settings import (
    LearnerSettings as LearnerSettings,
)
from cavesson.algorithms.settings import (
    OptimizerSettings as OptimizerSettings,
)
from cavesson.algorithms.settings import (
    ParallelSettings as ParallelSettings,
)
from cavesson.algorithms.settings import (
    RaySettings as RaySettings,
)
from cavesson.algorithms.settings import (
    RewardWorkerSettings as RewardWorkerSettings,
)
from cavesson.algorithms.settings import (
    RolloutCheckpointSettings as RolloutCheckpointSettings,
)
from cavesson.algorithms.settings import (
    RolloutRaySettings as RolloutRaySettings,
)
from cavesson.algorithms.settings import (
    ServerSettings as ServerSettings,
)
from cavesson.algorithms.settings import (
    UpdateSettings as UpdateSettings,
)
from cavesson.algorithms.sft import SFT as SFT
from cavesson.algorithms.sft import SFTRun as SFTRun
from cavesson.analysis import RunAnalysis as RunAnalysis
from cavesson.analysis import open as open
from cavesson.data.settings import (
    PairSettings as PairSettings,
)
from cavesson.data.settings import (
    PromptSettings as PromptSettings,
)
from cavesson.data.settings import (
    SourceSettings as SourceSettings,
)
from cavesson.data.settings import (
    TextSettings as TextSettings,
)
from cavesson.errors import UserError as UserError
from cavesson.models.settings import (
    FrozenSettings as FrozenSettings,
)
from cavesson.models.settings import (
    LoraSettings as LoraSettings,
)
from cavesson.models.settings import (
    ModelSettings as ModelSettings,
)
from cavesson.models.settings import (
    NewModelSettings as NewModelSettings,
)
from cavesson.models.settings import (
    ReferenceSettings as ReferenceSettings,
)
from cavesson.models.settings import (
    TeacherSettings as TeacherSettings,
)
from cavesson.models.settings import (
    ValueSettings as ValueSettings,
)
from cavesson.record import Recorder as Recorder
from cavesson.record import Rollout as Rollout
from cavesson.record import Run as Run
from cavesson.rollout.engines.settings import SamplingSettings as SamplingSettings
from cavesson.rollout.engines.settings import VllmSettings as VllmSettings
from cavesson.rollout.rewards.cleaning import CleaningSettings as CleaningSettings
from cavesson.rollout.rewards.settings import RewardSettings as RewardSettings
from cavesson.rollout.rewards.settings import ShapingSettings as ShapingSettings
from cavesson.rollout.rewards.table import Reward as Reward
from cavesson.rollout.settings import EnvironmentSettings as EnvironmentSettings
from cavesson.train.run import Result as Result
from cavesson.train.run import Training as Training

__version__: str
