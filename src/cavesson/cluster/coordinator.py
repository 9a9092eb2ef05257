"""What the processes of a run on a Ray cluster and the command that started them tell each other, through an actor."""

from collections.abc import Mapping
from typing import NamedTuple

from cavesson.errors import LOST_PROCESS

DIED = "was lost: the node, or Ray's worker on it, died"


class LostError(Exception):
    """A process has ended for a reason against which a restart may help; the message is a line about it."""


class Ending(NamedTuple):
    """How a process ended if a restart would not help."""

    line: str
    exit_code: int
    is_whole: bool
    """whether the line names the process itself, or is about other processes"""


class Orders(NamedTuple):
    """What a process must know of the others."""

    signals: list[int]
    """all that the user has sent"""
    has_ended: bool
    """whether one of them has ended with an error, so that this one must end too"""
    is_restart: bool
    """whether they have been started before"""


class News(NamedTuple):
    """What has happened since the last time."""

    lines: list[tuple[int, str]]
    """that must be printed, each with its stream: 1 or 2"""
    is_waiting: bool
    """whether no process has been started, or started again after a loss"""


class Coordinator:
    """The state of a run. Its methods are called by its processes, by Ray Train, and by the command that started it.

    Args:
        count: of the processes.
        failures: how often they are started again.
    """

    def __init__(self, count: int, failures: int) -> None:
        self._count, self._failures = count, failures
        self._signals: list[int] = []
        self._lines: list[tuple[int, str]] = []
        self._nodes: dict[int, str] = {}  # of the processes that have been started
        self._endings: dict[int, Ending] = {}
        self._losses: list[str] = []

    def begin(self, rank: int, node: str) -> Orders:
        """Note that a process starts on a node, given by its address."""
        self._nodes[rank] = node
        return self._orders()

    def exchange(self, lines: list[tuple[int, str]]) -> Orders:
        """Take lines to print, and return what a process must know of the others."""
        self._lines += lines
        return self._orders()

    def end(self, rank: int, ending: Ending | None) -> None:
        """Note that a process has ended; None = without an error."""
        if ending is not None:
            self._endings.setdefault(rank, ending)

    def restart(self, lost: Mapping[int, str | None]) -> None:
        """Note that processes are lost, so that Ray Train ends all of them, and starts them again if it may.

        Args:
            lost: a line about each of these processes; None = its Ray worker does not answer.
        """
        lines = [line or f"{self._name(rank)} {DIED}" for rank, line in sorted(lost.items())]
        cause = next((line for line in lines if not line.endswith(LOST_PROCESS)), lines[0])
        self._losses.append(cause)
        if len(self._losses) <= self._failures:
            times = f"restart {len(self._losses)} of at most {self._failures}"
            self._lines.append((2, f"cavesson: {cause}; the run starts again from its latest checkpoint ({times})"))
        self._nodes = {}

    def signal(self, number: int) -> None:
        """Send a signal to all processes."""
        self._signals.append(number)

    def news(self) -> News:
        """Return what has happened since the last call."""
        lines, self._lines = self._lines, []
        return News(lines, not self._nodes)

    def outcome(self) -> tuple[dict[int, Ending], str | None]:
        """Return how processes ended with an error, in that order, and a line about the last loss."""
        return self._endings, self._losses[-1] if self._losses else None

    def _orders(self) -> Orders:
        return Orders(self._signals, bool(self._endings), bool(self._losses))

    def _name(self, rank: int) -> str:
        return process_name(rank, self._count, self._nodes.get(rank, "an unknown node"))


def process_name(rank: int, count: int, node: str) -> str:
    """Return what a process is called in messages."""
    return f"process {rank} of {count} (counted from 0) on node {node}"
