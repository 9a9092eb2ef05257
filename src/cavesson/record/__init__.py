"""The record of a run: every token of every rollout, written during training and readable without it."""

from cavesson.record.maintain.compaction import compact, write_rollouts
from cavesson.record.read.reader import Rollout, Run, open, run_info
from cavesson.record.run_folder import begin_attempt, write_run, write_vocabulary
from cavesson.record.write.lock import Lock, LockedError
from cavesson.record.write.recorder import Recorder

__all__ = [
    "Lock", "LockedError", "Recorder", "Rollout", "Run", "begin_attempt", "compact", "open", "run_info",
    "write_rollouts", "write_run", "write_vocabulary",
]  # fmt: skip
