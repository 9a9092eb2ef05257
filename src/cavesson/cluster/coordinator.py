"""The state of a run on a Ray cluster, which its processes, Ray Train and the command share through an actor."""

from collections.abc import Mapping
from typing import NamedTuple

from cavesson.errors import LOST_PROCESS

DIED = "was lost: its node, or Ray's worker on it, died"


class LostError(Exception):
    """A process ended for a reason that a restart may remedy; the message is one line."""


class Ending(NamedTuple):
    """How a process ended with an error that a restart would not remedy."""

    line: str
    exit_code: int
    is_whole: bool
    """whether the line names the process already, or is about other processes"""


class Status(NamedTuple):
    """The state of a run, for one of its processes."""

    signals: list[int]
    """all signals that the user has sent to the command"""
    has_failed: bool
    """whether a process has ended with an error, so that the others must end too"""
    is_restart: bool
    """whether Ray Train has restarted the processes"""


class Updates(NamedTuple):
    """Changes of a run since the last call, for the command."""

    lines: list[tuple[int, str]]
    """lines to print, each with its stream: 1 for stdout, 2 for stderr"""
    is_waiting: bool
    """whether no process is running, because Ray Train has not started or restarted any yet"""


class Coordinator:
    """The state of a run of `count` processes, which may be restarted for so many failures.

    Its processes, Ray Train and the command call its methods.
    """

    def __init__(self, count: int, failures: int) -> None:
        self._count, self._failures = count, failures
        self._signals: list[int] = []
        self._lines: list[tuple[int, str]] = []
        self._nodes: dict[int, str] = {}  # nodes of the running processes
        self._endings: dict[int, Ending] = {}
        self._losses: list[str] = []

    def begin(self, rank: int, node: str) -> Status:
        """Record that a process starts on the node with this address."""
        self._nodes[rank] = node
        return self._status()

    def exchange(self, lines: list[tuple[int, str]]) -> Status:
        """Queue lines that the command must print, and return the state of the run."""
        self._lines += lines
        return self._status()

    def end(self, rank: int, ending: Ending | None) -> None:
        """Record that a process has ended; None = without an error."""
        if ending is not None:
            self._endings.setdefault(rank, ending)

    def restart(self, lost: Mapping[int, str | None]) -> None:
        """Record that processes were lost. Ray Train ends the others, and restarts all of them if it may.

        There is a line about each of the lost processes; None = its Ray worker does not answer.
        """
        names = {rank: process_name(rank, self._count, self._nodes.get(rank, "an unknown node")) for rank in lost}
        lines = [line or f"{names[rank]} {DIED}" for rank, line in sorted(lost.items())]
        cause = next((line for line in lines if not line.endswith(LOST_PROCESS)), lines[0])
        self._losses.append(cause)
        if len(self._losses) <= self._failures:
            times = f"restart {len(self._losses)} of at most {self._failures}"
            self._lines.append((2, f"cavesson: {cause}; the run restarts from its latest checkpoint ({times})"))
        self._nodes = {}

    def signal(self, number: int) -> None:
        """Record a signal of the user, for all processes."""
        self._signals.append(number)

    def updates(self) -> Updates:
        """Return what has changed since the last call."""
        lines, self._lines = self._lines, []
        return Updates(lines, not self._nodes)

    def outcome(self) -> tuple[dict[int, Ending], str | None]:
        """Return how processes failed, in the order in which they did, and a line about the last loss, if any."""
        return self._endings, self._losses[-1] if self._losses else None

    def _status(self) -> Status:
        return Status(self._signals, bool(self._endings), bool(self._losses))


def process_name(rank: int, count: int, node: str) -> str:
    """Return the name of a process in messages."""
    return f"process {rank} of {count} (counted from 0) on node {node}"
