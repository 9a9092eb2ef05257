"""The record of a run: every token of every rollout, written while training and read without it."""

from dressage.record.files import begin_attempt, write_run, write_vocabulary
from dressage.record.reader import Run, open_run
from dressage.record.recorder import Recorder

__all__ = ["Recorder", "Run", "begin_attempt", "open_run", "write_run", "write_vocabulary"]
