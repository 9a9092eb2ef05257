"""The record of a run: every token of every rollout, written during training and readable without it."""

from cavesson.record.compaction import compact, write_rollouts
from cavesson.record.lock import Lock, LockedError
from cavesson.record.reader import Rollout, Run, open, run_info
from cavesson.record.recorder import Recorder
from cavesson.record.run_folder import begin_attempt, write_run, write_vocabulary

__all__ = [
    "Lock", "LockedError", "Recorder", "Rollout", "Run", "begin_attempt", "compact", "open", "run_info",
    "write_rollouts", "write_run", "write_vocabulary",
]  # fmt: skip
