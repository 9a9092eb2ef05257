"""`--ray`: run a command in processes that Ray Train starts on the nodes of a cluster."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from cavesson.algorithms.runs import ExampleRun, RolloutRun
from cavesson.cluster.connection import actor_name, connect, needs, options
from cavesson.cluster.coordinator import Coordinator, Ending
from cavesson.command_line import ON_RAY
from cavesson.errors import LOST_PROCESS, TerminatedError, UserError, first_line, print_error
from cavesson.handlers import handling
from cavesson.text.counting import counted

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PERIOD = 0.2
"""Seconds between two requests to the coordinator."""
_PATIENCE = 10.0
"""Seconds in which servers must end, and in which processes may still start after a signal."""
_SILENCE = 30.0
"""Seconds without a running process after which the command says so."""
_MAX_SIGNALS = 3
"""The first signal asks the processes to save and end, the second to end at once; after the third, the command ends
without waiting for them."""


def launch_on_ray(
    settings: RolloutRun | ExampleRun,
    launcher: str,
    resume_hint: Callable[[], str | None],
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run this command in processes on a Ray cluster, and end as they do.

    Args:
        settings: settings of the run.
        launcher: prefix of the variable TORCHELASTIC_RUN_ID in the processes.
        resume_hint: returns the command that continues what they did, or None if there is nothing to continue.
        environment: more variables for the processes.

    Raises:
        UserError: a setting has no effect on a cluster, Ray is not installed, there is no cluster, it has no room for
            the run, processes were lost too often, or a process other than the first has failed.
        SystemExit: the first process has failed and printed why.
    """
    if isinstance(settings, RolloutRun) and settings.sampling.starts_server and settings.sampling.vllm.sleep:
        raise UserError("sampling.vllm.sleep has no effect with --ray, where servers have GPUs of their own")
    os.environ[ON_RAY] = f"cavesson-{uuid4().hex}"
    ray = connect(settings.ray.address)
    try:
        with TemporaryDirectory(prefix="cavesson-ray-") as storage:
            _Launch(settings, launcher, resume_hint, environment or {}).run(storage)
    finally:
        ray.shutdown()


class _Launch:
    """A run on a cluster, from the start of its actors to the end of its processes."""

    def __init__(
        self,
        settings: RolloutRun | ExampleRun,
        launcher: str,
        resume_hint: Callable[[], str | None],
        environment: Mapping[str, str],
    ) -> None:
        self._settings, self._launcher, self._resume_hint = settings, launcher, resume_hint
        self._environment = environment
        self._ray = connect()
        self._here = {"ray.io/node-id": self._ray.get_runtime_context().get_node_id()}
        coordinator = self._ray.remote(Coordinator).options(num_cpus=0, label_selector=self._here)
        self._coordinator = coordinator.remote(settings.ray.learners.count, settings.ray.failures)
        self._signals: list[int] = []
        self._servers: list[Any] = []
        self._workers: list[Any] = []  # actors end as soon as nothing refers to them

    def run(self, storage: str) -> None:
        """Start all processes, and wait until they have ended; Ray Train keeps its own state in `storage`."""
        with handling(lambda number, frame: self._signals.append(number), *SIGNALS):
            try:
                if isinstance(self._settings, RolloutRun):
                    self._start_actors(self._settings)
                learners = self._start_learners(storage)
                self._follow(learners)
            finally:
                if self._servers:
                    closing = [server.close.remote() for server in self._servers]
                    self._ray.wait(closing, num_returns=len(closing), timeout=_PATIENCE)
        endings, loss = self._ray.get(self._coordinator.outcome.remote())
        if endings:
            raise _failure(endings, self._settings.ray.learners.count)
        try:
            self._ray.get(learners)
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            raise self._continued(f"Ray Train failed: {first_line(cause)}" if loss is None else loss) from error

    def _start_actors(self, settings: RolloutRun) -> None:
        """Create the actors, which the processes find by their names."""
        from cavesson.cluster import rewards, servers

        def create(kind: type, role: str, number: int, **resources: Any) -> Any:
            return self._ray.remote(kind).options(name=actor_name(role, number), **resources)

        if settings.sampling.starts_server:
            resources = {**options(settings.ray.servers), "max_restarts": -1}
            self._servers = [
                create(servers.Server, servers.ROLE, number, **resources).remote(os.getcwd())
                for number in range(settings.ray.servers.count)
            ]
        role = settings.ray.reward_workers
        self._workers = [
            create(rewards.RewardWorker, rewards.ROLE, number, **options(role)).remote(
                settings.rewards, settings.environment, role.gpus > 0, os.getcwd()
            )
            for number in range(role.count)
        ]

    def _start_learners(self, storage: str) -> Any:
        """Let Ray Train start the processes of the run; return a pending result, which is there when all have ended."""
        from cavesson.cluster.learner import Command, fit

        command = Command(
            words=sys.argv[1:],
            run=self._settings.run,
            folder=os.getcwd(),
            environment={
                ON_RAY: os.environ[ON_RAY],
                "COLUMNS": str(shutil.get_terminal_size().columns),
                **self._environment,
            },
            launcher=self._launcher,
            coordinator=self._coordinator,
            servers=self._servers,
        )
        # In a thread of this process, it could not be stopped; a task ends with the connection to the cluster.
        task = self._ray.remote(fit).options(num_cpus=0, max_retries=0, label_selector=self._here)
        return task.remote(command, self._settings.ray, storage)

    def _follow(self, learners: Any) -> None:
        """Print the lines of the processes and forward the user's signals to them, until Ray Train has ended."""
        sent, since, is_reported = 0, time.monotonic(), False
        while True:
            is_done = bool(self._ray.wait([learners], timeout=_PERIOD)[0])
            updates = self._ray.get(self._coordinator.updates.remote())
            for stream, line in updates.lines:
                print(line, file=sys.stdout if stream == 1 else sys.stderr, flush=True)
            if is_done:
                return
            for number in self._signals[sent:]:
                self._ray.get(self._coordinator.signal.remote(number))
            sent = len(self._signals)
            since = since if updates.is_waiting else time.monotonic()
            waited = time.monotonic() - since
            if sent >= _MAX_SIGNALS or (sent and waited > _PATIENCE):
                raise KeyboardInterrupt if self._signals[0] == signal.SIGINT else TerminatedError
            if waited > self._settings.ray.timeout:
                raise self._continued(f"{self._waiting(waited)} (ray.timeout)")
            if waited > _SILENCE and not is_reported:
                print_error(f"cavesson: {self._waiting(waited)}; waiting for up to {self._settings.ray.timeout:g} s")
            is_reported = waited > _SILENCE

    def _waiting(self, seconds: float) -> str:
        role = self._settings.ray.learners
        return (
            f"no learner has started after {seconds:.0f} s; the run needs {counted(role.count, 'learner')}, each on a "
            f"node with {needs(role)} free"
        )

    def _continued(self, line: str) -> UserError:
        """Return an error with a note that says how to continue the run."""
        error, way = UserError(line), self._resume_hint()
        if way is not None:
            error.add_note(f"continue with: {way}")
        return error


def _failure(endings: Mapping[int, Ending], count: int) -> UserError | SystemExit:
    """Return the error that ended the run; SystemExit if the first process has printed it.

    `endings` are how processes failed, by rank, in the order in which they did.
    """
    causes = {rank: ending for rank, ending in endings.items() if not ending.line.endswith(LOST_PROCESS)} or endings
    rank, ending = next(((rank, one) for rank, one in causes.items() if one.is_whole), (0, causes.get(0)))
    if ending is None:
        rank, ending = next(iter(causes.items()))
    if rank == 0:
        return SystemExit(ending.exit_code)
    name = "" if ending.is_whole else f"process {rank} of {count} (counted from 0) ended: "
    error = UserError(f"{name}{ending.line}")
    error.exit_code = ending.exit_code
    return error
