"""A process of a run on a Ray cluster: a worker of Ray Train starts it as torchrun's agent would, and watches it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from threading import Thread
from typing import IO, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.train import UserCallback, get_context
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchConfig
from torch._C._distributed_c10d import TCPStore

from cavesson.cluster.connection import enter
from cavesson.cluster.coordinator import Ending, LostError, Orders, process_name
from cavesson.errors import LOST_PROCESS, SignalledError, UserError
from cavesson.handlers import ending_with_parent

PATIENCE = 5.0
"""Seconds in which a process must end when another one has ended."""
_PERIOD = 0.2
"""Seconds between two exchanges with the coordinator."""

Lines = SimpleQueue[tuple[int, str]]


@dataclass(frozen=True)
class Command:
    """What every process of a run runs."""

    words: Sequence[str]
    """arguments of `cavesson`"""
    run: Path
    """the run's folder"""
    folder: str
    """the working directory"""
    environment: dict[str, str]
    """variables beside those of the node"""
    launcher: str
    """how TORCHELASTIC_RUN_ID begins, before the number of the parent process"""
    coordinator: Any
    servers: Sequence[Any]
    """actors with vLLM servers"""


class Losses(UserCallback):  # type: ignore[misc]
    """Tells the coordinator which processes Ray Train has lost.

    Args:
        coordinator: of the run.
    """

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Called by Ray Train before it starts all processes again."""
        lost = {rank: str(error) if isinstance(error, LostError) else None for rank, error in worker_exceptions.items()}
        ray.get(self._coordinator.restart.remote(lost))


class WorkerConfig(TorchConfig):  # type: ignore[misc]
    """The process group of Ray Train's workers; they leave GPUs to the processes that they start."""

    @property
    def train_func_context(self) -> Any:
        return nullcontext


def learn(config: dict[str, Command]) -> None:
    """Run a process of a run to its end, in a worker of Ray Train.

    Raises:
        LostError: it has ended for a reason against which a restart may help.
    """
    command, context, node = config["command"], get_context(), ray.util.get_node_ip_address()
    rank, coordinator = context.get_world_rank(), command.coordinator
    name = process_name(rank, context.get_world_size(), node)
    # As an agent of torchrun does, the first worker has the store of the processes, which outlives them.
    store = TCPStore(os.environ["MASTER_ADDR"], 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = broadcast_from_rank_zero(store.port if store else None)
    orders = ray.get(coordinator.begin.remote(rank, node))
    try:
        enter(command.folder)
        if orders.signals:
            raise SignalledError("interrupted", orders.signals[0])
        with TemporaryDirectory(prefix="cavesson-process-") as place:
            ending = _run(command, rank, port, orders, Path(place) / "error.json")
        if ending is not None:
            _check(ending, name, command)
    except UserError as error:
        ending = Ending(str(error), error.exit_code, True)
        ray.get(coordinator.exchange.remote([(2, f"cavesson: {error}")] if rank == 0 else []))
    except LostError:
        raise
    except Exception as error:  # Ray Train's worker must not be taken for dead
        raise LostError(f"{name} could not be watched: {type(error).__name__}: {error}") from error
    ray.get(coordinator.end.remote(rank, ending))


def _run(command: Command, rank: int, port: int, orders: Orders, left: Path) -> Ending | None:
    """Run the command in a process; `left` is the file in which it says why it has failed."""
    lines: Lines = SimpleQueue()
    child = subprocess.Popen(
        ending_with_parent([sys.executable, "-m", "cavesson", *_words(command, orders)]),
        env=_environment(command, port, left),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if rank == 0 else None,  # what the others print is in the logs of Ray's workers
        stderr=subprocess.PIPE if rank == 0 else None,
        text=True,
        errors="replace",
    )
    streams = [(child.stdout, 1), (child.stderr, 2)] if rank == 0 else []
    readers = [Thread(target=_read, args=(*one, lines), daemon=True) for one in streams]
    for reader in readers:
        reader.start()
    try:
        was_ended = _watch(child, lines, command.coordinator)
    finally:
        child.kill()
        child.wait()
    for reader in readers:
        reader.join(PATIENCE)  # what the process has started may still have its streams
    ray.get(command.coordinator.exchange.remote(_taken(lines)))
    return None if was_ended else _ending(child.returncode, left)


def _words(command: Command, orders: Orders) -> list[str]:
    """Return the arguments with which the run begins, or continues if it was begun before a restart."""
    resumes = any(word.partition("=")[0] == "--resume" for word in command.words)
    is_begun = orders.is_restart and (command.run / "run.json").exists()
    return [*command.words, *(["--resume", str(command.run)] if is_begun and not resumes else [])]


def _environment(command: Command, port: int, left: Path) -> dict[str, str]:
    """Return the environment of a process: Ray Train has set RANK, WORLD_SIZE and the like."""
    return {
        **os.environ,
        **command.environment,
        "GROUP_RANK": os.environ["NODE_RANK"],
        "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1",
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        "TORCHELASTIC_ERROR_FILE": str(left),
        "TORCHELASTIC_RUN_ID": f"{command.launcher}{os.getpid()}-ray",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _read(stream: IO[str], number: int, lines: Lines) -> None:
    for line in stream:
        if LOST_PROCESS not in line:  # the coordinator says which one
            lines.put((number, line.rstrip("\n")))


def _taken(lines: Lines) -> list[tuple[int, str]]:
    return [lines.get() for _ in range(lines.qsize())]


def _watch(child: "subprocess.Popen[str]", lines: Lines, coordinator: Any) -> bool:
    """Wait for the end of a process, and return whether it was ended because another one had ended."""
    sent, deadline = 0, float("inf")
    while child.poll() is None:
        orders = ray.get(coordinator.exchange.remote(_taken(lines)))
        for number in orders.signals[sent:]:
            child.send_signal(number)
        sent = len(orders.signals)
        if orders.has_ended:
            deadline = min(deadline, time.monotonic() + PATIENCE)
        if time.monotonic() > deadline:
            return True
        time.sleep(_PERIOD)
    return False


def _ending(code: int, left: Path) -> Ending | None:
    """Return how a process has ended, or None without an error; a negative exit code is a signal."""
    if code == 0:
        return None
    if not left.exists():
        name = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return Ending(name, code, False)
    said = json.loads(left.read_text("utf-8"))["message"]
    return Ending(said["message"], said["errorCode"], said["isWhole"])


def _check(ending: Ending, name: str, command: Command) -> None:
    """Raise a LostError if a restart may help."""
    if ending.exit_code < 0:
        raise LostError(f"{name} {ending.line}")
    if ending.line.endswith(LOST_PROCESS):
        # The other one may have ended with an error, which it then tells the coordinator.
        deadline = time.monotonic() + PATIENCE
        while not ray.get(command.coordinator.exchange.remote([])).has_ended:
            if time.monotonic() > deadline:
                raise LostError(f"{name} ended: {LOST_PROCESS}")
            time.sleep(_PERIOD)
    if any(map(_has_died, command.servers)):
        raise LostError(ending.line.splitlines()[0])


def _has_died(server: Any) -> bool:
    """Return whether a vLLM server has died, or its node."""
    try:
        return bool(ray.get(server.has_died.remote(), timeout=PATIENCE))
    except RayActorError:
        return True
    except GetTimeoutError:  # it is being started
        return False
