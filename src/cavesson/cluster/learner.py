"""What a worker of Ray Train does: it starts a process of the run, as the agent of torchrun would, and watches it."""

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
from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback, get_context
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchConfig, TorchTrainer
from torch._C._distributed_c10d import TCPStore

from cavesson.algorithms.settings import RaySettings
from cavesson.cluster.connection import enter
from cavesson.cluster.coordinator import Ending, LostError, Status, process_name
from cavesson.command_line import ON_RAY
from cavesson.errors import LOST_PROCESS, SignalledError, UserError, first_line
from cavesson.handlers import ending_with_parent

PATIENCE = 5.0
"""Seconds in which a process must end after another one has failed."""
_PERIOD = 0.2
"""Seconds between two requests to the coordinator."""

Lines = SimpleQueue[tuple[int, str]]


@dataclass(frozen=True)
class Command:
    """The command that every process of a run executes."""

    words: Sequence[str]
    """arguments of `cavesson`"""
    run: Path
    """the run's folder"""
    folder: str
    """the working directory"""
    environment: dict[str, str]
    """variables in addition to those of the node"""
    launcher: str
    """prefix of TORCHELASTIC_RUN_ID; the process number of the parent follows"""
    coordinator: Any
    servers: Sequence[Any]
    """actors that run vLLM servers"""


class Losses(UserCallback):  # type: ignore[misc]
    """Reports to the coordinator which processes Ray Train has lost."""

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Report the lost processes; Ray Train calls this before it restarts all of them."""
        lost = {rank: str(error) if isinstance(error, LostError) else None for rank, error in worker_exceptions.items()}
        ray.get(self._coordinator.restart.remote(lost))


class WorkerConfig(TorchConfig):  # type: ignore[misc]
    """Settings of Ray Train's workers, which leave the GPUs to the processes that they start."""

    @property
    def train_func_context(self) -> Any:
        return nullcontext


def fit(command: Command, settings: RaySettings, storage: str) -> None:
    """Run all processes of a run to their end; a task, in which Ray Train starts and restarts them.

    Each executes the command; Ray Train keeps its own state in the folder `storage`.
    """
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "1")
    role, failures = settings.learners, settings.failures
    TorchTrainer(
        learn,
        train_loop_config={"command": command},
        torch_config=WorkerConfig(backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=role.count,
            use_gpu=role.gpus > 0,
            resources_per_worker={"CPU": role.cpus, "GPU": role.gpus, **role.resources},
        ),
        run_config=RunConfig(
            name=command.environment[ON_RAY],
            storage_path=storage,
            failure_config=FailureConfig(max_failures=failures, max_preemption_failures=failures),
            callbacks=[Losses(command.coordinator)],
        ),
    ).fit()


def learn(config: dict[str, Command]) -> None:
    """Run one process of the run to its end; called in a worker of Ray Train.

    Raises:
        LostError: it ended for a reason that a restart may remedy.
    """
    command, context, node = config["command"], get_context(), ray.util.get_node_ip_address()
    rank, coordinator = context.get_world_rank(), command.coordinator
    name = process_name(rank, context.get_world_size(), node)
    # Like the agent of torchrun, the first worker keeps the store of the processes, which must outlive them.
    store = TCPStore(os.environ["MASTER_ADDR"], 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = broadcast_from_rank_zero(store.port if store else None)
    status = ray.get(coordinator.begin.remote(rank, node))
    try:
        enter(command.folder)
        if status.signals:
            raise SignalledError("interrupted", status.signals[0])
        with TemporaryDirectory(prefix="cavesson-process-") as place:
            ending, last_lines = _run(command, rank, port, status, Path(place) / "error.json")
        if ending is not None:
            _check(ending, name, command)
        ray.get(coordinator.exchange.remote(last_lines))
    except UserError as error:
        ending = Ending(str(error), error.exit_code, True)
        ray.get(coordinator.exchange.remote([(2, f"cavesson: {error}")] if rank == 0 else []))
    except LostError:
        raise
    except Exception as error:  # Ray Train would report it at length
        raise LostError(f"{name} failed in Ray's worker: {type(error).__name__}: {first_line(error)}") from error
    ray.get(coordinator.end.remote(rank, ending))


def _run(
    command: Command, rank: int, port: int, status: Status, report: Path
) -> tuple[Ending | None, list[tuple[int, str]]]:
    """Run the command in a process, which writes to the file `report` why it failed.

    Returns:
        How it failed, and the lines that it then printed; they are misleading if it is restarted.
    """
    lines, last_lines = Lines(), Lines()
    child = subprocess.Popen(
        ending_with_parent([sys.executable, "-m", "cavesson", *_words(command, status)]),
        env=_environment(command, port, report),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if rank == 0 else None,  # the output of the others goes to the logs of Ray's workers
        stderr=subprocess.PIPE if rank == 0 else None,
        text=True,
        errors="replace",
    )
    streams = [(child.stdout, 1), (child.stderr, 2)] if rank == 0 else []
    readers = [Thread(target=_read, args=(*one, lines, last_lines, report), daemon=True) for one in streams]
    for reader in readers:
        reader.start()
    try:
        was_ended = _watch(child, lines, command.coordinator)
    finally:
        child.kill()
        child.wait()
    for reader in readers:
        reader.join(PATIENCE)  # children of the process may still have its streams open
    ray.get(command.coordinator.exchange.remote(_taken(lines)))
    return None if was_ended else _ending(child.returncode, report), _taken(last_lines)


def _words(command: Command, status: Status) -> list[str]:
    """Return the arguments of the command; after a restart, they resume the run. `align` resumes without a flag."""
    resumes = command.words[0] == "align" or any(word.partition("=")[0] == "--resume" for word in command.words)
    is_begun = status.is_restart and (command.run / "run.json").exists()
    return [*command.words, *(["--resume", str(command.run)] if is_begun and not resumes else [])]


def _environment(command: Command, port: int, report: Path) -> dict[str, str]:
    """Return the environment of a process; Ray Train has set RANK, WORLD_SIZE and the like."""
    return {
        **os.environ,
        **command.environment,
        "GROUP_RANK": os.environ["NODE_RANK"],
        "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1",
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        "TORCHELASTIC_ERROR_FILE": str(report),
        "TORCHELASTIC_RUN_ID": f"{command.launcher}{os.getpid()}-ray",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _read(stream: IO[str], number: int, lines: Lines, last_lines: Lines, report: Path) -> None:
    for line in stream:
        if LOST_PROCESS not in line:  # the command names the process
            (last_lines if report.exists() else lines).put((number, line.rstrip("\n")))


def _taken(lines: Lines) -> list[tuple[int, str]]:
    return [lines.get() for _ in range(lines.qsize())]


def _watch(child: "subprocess.Popen[str]", lines: Lines, coordinator: Any) -> bool:
    """Wait until a process has ended; return False, or True if it must be killed because another one has failed."""
    sent, deadline = 0, float("inf")
    while child.poll() is None:
        status = ray.get(coordinator.exchange.remote(_taken(lines)))
        for number in status.signals[sent:]:
            child.send_signal(number)
        sent = len(status.signals)
        if status.has_failed:
            deadline = min(deadline, time.monotonic() + PATIENCE)
        if time.monotonic() > deadline:
            return True
        time.sleep(_PERIOD)
    return False


def _ending(code: int, report: Path) -> Ending | None:
    """Return how a process failed, or None if it did not; a negative exit code is the number of a signal."""
    if code == 0:
        return None
    if not report.exists():
        line = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return Ending(line, code, False)
    error = json.loads(report.read_text("utf-8"))["message"]
    return Ending(error["message"], error["errorCode"], error["isWhole"])


def _check(ending: Ending, name: str, command: Command) -> None:
    """Raise a LostError if a restart may remedy how a process ended."""
    if ending.exit_code < 0:
        raise LostError(f"{name} {ending.line}")
    if ending.line.endswith(LOST_PROCESS):
        # If that process ended with an error, its worker reports it to the coordinator, and a restart does not help.
        deadline = time.monotonic() + PATIENCE
        while not ray.get(command.coordinator.exchange.remote([])).has_failed:
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
    except GetTimeoutError:  # it is still starting
        return False
