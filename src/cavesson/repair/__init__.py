"""Verified repair: forks a run with and without the settings that a finding proposes, and compares the forks."""

from cavesson.repair.verify import Outcome, verify

__all__ = ["Outcome", "verify"]
