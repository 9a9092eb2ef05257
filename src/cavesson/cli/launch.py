"""`--processes N`: a command in several processes of this machine, started and watched by torchrun's elastic agent."""

import json
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING
from uuid import uuid4

from cavesson.command_line import STAGE, command_line
from cavesson.errors import LOST_PROCESS, UserError
from cavesson.handlers import ending_with_parent, handling
from cavesson.processors import usable_processors

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from cavesson.align.stages import TrainingStage

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PATIENCE = 5
"""Seconds in which the other processes must end when one has ended."""
_PAUSE = 0.2
"""Seconds between two looks for processes that have started after a signal."""
_NAME = "TORCHELASTIC_RUN_ID"
LAUNCHER = "cavesson-"
"""How TORCHELASTIC_RUN_ID begins in processes that a launcher of ours has started; then comes its process number."""


def is_launcher(processes: int) -> bool:
    """Return whether this process must start others: not if it is one of them, or the only one.

    Raises:
        UserError: the number is below 1, or another launcher has started this process.
    """
    if processes < 1:
        raise UserError(f"--processes {processes}: give at least 1")
    return processes > 1 and not _is_launched("--processes")


def is_ray_launcher(ray: bool, processes: int, settings: Sequence[str]) -> bool:
    """Return whether this process must start others on a Ray cluster: not without `--ray`, or if it is one of them.

    The flags of settings are given as "--name=value".

    Raises:
        UserError: another launcher has started this process, or a flag has no effect.
    """
    if not ray:
        for flag in settings:
            if re.match(r"--(\w+\.)?ray\.", flag):  # in a recipe, they say how it runs where there is a cluster
                raise UserError(f"{flag.partition('=')[0]} has no effect without --ray")
        return False
    if processes != 1:
        raise UserError("--processes has no effect with --ray; set ray.learners.count")
    return not _is_launched("--ray")


def train_on_ray(stage: "TrainingStage") -> None:
    """Run a stage of this `align` command in processes on a Ray cluster; errors as of `launch_on_ray`."""
    from cavesson.align.stages import with_full_paths
    from cavesson.cluster.launcher import launch_on_ray

    launch_on_ray(with_full_paths(stage.settings), LAUNCHER, lambda: command_line(*sys.argv[1:]), {STAGE: stage.name})


def _is_launched(flag: str) -> bool:
    """Return whether a launcher that a flag asks for started this process; raise UserError if another one did."""
    if os.environ.get(_NAME, "").startswith(LAUNCHER):
        return True
    if "RANK" in os.environ:
        raise UserError(f"{flag} has no effect under torchrun or accelerate, which start the processes; remove it")
    return False


def launch(processes: int, resume_hint: Callable[[], str | None]) -> None:
    """Run the command of this process in several others, which end with it however it ends, and end as they do.

    `resume_hint` returns the command that continues what they did, or None if there is nothing to continue.

    Raises:
        UserError: a process was killed, or has failed before the first one did.
        SystemExit: the first process has failed and said why.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The agent logs every failure at length; `_reason` says it in one line.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_processors() // processes)))
    with tempfile.TemporaryDirectory(prefix="cavesson-processes-") as logs, ThreadPoolExecutor(1) as pool:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=f"{LAUNCHER}{os.getpid()}-{uuid4()}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            shutdown_timeout=PATIENCE,
            logs_specs=DefaultLogsSpecs(logs, redirects=dict.fromkeys(range(1, processes), Std.ALL)),
        )
        # Outside the main thread, the agent leaves signals alone: processes that save a checkpoint need more time than
        # it grants them.
        signals = _Signals()
        with handling(signals.forward, *SIGNALS):
            try:
                program, *words = ending_with_parent([sys.executable, "-m", "cavesson", *sys.argv[1:]])
                ending = pool.submit(elastic_launch(config, program), *words)
                while not wait([ending], _PAUSE).done:
                    signals.deliver()
                ending.result()
            except ChildFailedError as error:
                raise _reason(error, processes, Path(logs), resume_hint) from None


class _Signals:
    """Forwards signals to all processes, also to those that start after them."""

    def __init__(self) -> None:
        self._asked: list[int] = []
        self._delivered: dict[int, int] = {}
        """how many of them each process has got"""

    def forward(self, number: int, frame: FrameType | None) -> None:
        """Send a signal to all processes; these are not in the session of the terminal, which sends them none."""
        self._asked.append(number)
        self.deliver()

    def deliver(self) -> None:
        """Send each process the signals that it has not got yet."""
        import psutil

        for child in psutil.Process().children() if self._asked else ():
            for number in self._asked[self._delivered.get(child.pid, 0) :]:
                with suppress(psutil.NoSuchProcess):  # it may end just now
                    child.send_signal(number)
            self._delivered[child.pid] = len(self._asked)


def _reason(
    error: "ChildFailedError", processes: int, logs: Path, resume_hint: Callable[[], str | None]
) -> UserError | SystemExit:
    """Return the error that names what ended the processes; SystemExit if the first process has printed it."""
    left = {int(file.parent.name): json.loads(file.read_text("utf-8"))["message"] for file in logs.rglob("error.json")}
    lost = {rank for rank, ending in left.items() if ending["message"].endswith(LOST_PROCESS)}
    for rank, ending in left.items():
        if ending.get("isWhole") and rank not in lost:
            return _ended(ending["message"], ending["errorCode"]) if rank else SystemExit(ending["errorCode"])
    # In the order in which they ended; then the agent ended the others.
    rank = next((rank for rank in error.failures if rank not in lost), 0)
    code, name = error.failures[rank].exitcode, f"process {rank} of {processes} (counted from 0)"
    if rank not in left and code < 0:
        killed = UserError(f"{name} was killed by {signal.Signals(-code).name}; the others were ended")
        way = resume_hint()
        if way is not None:
            killed.add_note(f"continue with: {way}")
        return killed
    codes = {one: ending["errorCode"] for one, ending in left.items()}
    ended_by_agent = codes.get(0) == 128 + signal.SIGTERM != codes.get(rank)
    if 0 in left.keys() - lost and not ended_by_agent:
        return SystemExit(left[0]["errorCode"])
    ending = left.get(rank, {"message": f"exit code {code}", "errorCode": code})
    return _ended(f"{name} ended: {ending['message']}", ending["errorCode"])


def _ended(line: str, exit_code: int) -> UserError:
    error = UserError(line)
    error.exit_code = exit_code
    return error
