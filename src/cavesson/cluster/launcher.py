"""`--ray`: a run in processes that Ray Train starts on the nodes of a cluster."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from tempfile import TemporaryDirectory
from threading import Thread
from types import FrameType
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
"""Seconds between two looks at the run."""
_PATIENCE = 10.0
"""Seconds in which servers must end, and those in which processes may still start after a signal."""
_SILENCE = 30.0
"""Seconds without processes after which the user is told so."""
_MOST_SIGNALS = 3
"""The first asks the processes to save and end, the second to end at once; the last one does not wait for them."""


def launch_on_ray(settings: RolloutRun | ExampleRun, launcher: str, way_on: Callable[[], str | None]) -> None:
    """Run the command of this process in others on a Ray cluster, and end as they do.

    Args:
        settings: of the run.
        launcher: how the variable TORCHELASTIC_RUN_ID of the processes begins.
        way_on: returns the command that continues what they did, or None if there is nothing to continue.

    Raises:
        UserError: Ray is not installed, there is no cluster or no room in it, processes were lost too often, or one
            has failed before the first one did.
        SystemExit: the first process has failed and said why.
    """
    os.environ[ON_RAY] = f"cavesson-{uuid4().hex}"
    ray = connect(settings.ray.address)
    try:
        with TemporaryDirectory(prefix="cavesson-ray-") as storage:
            _Launch(settings, launcher, way_on).run(storage)
    finally:
        ray.shutdown()


class _Launch:
    """A run on a cluster, from the start of its actors to the end of its processes."""

    def __init__(self, settings: RolloutRun | ExampleRun, launcher: str, way_on: Callable[[], str | None]) -> None:
        self._settings, self._launcher, self._way_on = settings, launcher, way_on
        self._ray = connect()
        here = {"ray.io/node-id": self._ray.get_runtime_context().get_node_id()}
        coordinator = self._ray.remote(Coordinator).options(num_cpus=0, label_selector=here)
        self._coordinator = coordinator.remote(settings.ray.learners.count, settings.ray.failures)
        self._asked: list[int] = []
        self._servers: list[Any] = []
        self._workers: list[Any] = []  # they live as long as somebody refers to them

    def run(self, storage: str) -> None:
        """Start everything, and wait until it has ended; Ray Train keeps its own state in the folder `storage`."""
        with handling(self._ask, *SIGNALS):
            try:
                if isinstance(self._settings, RolloutRun):
                    self._start_actors(self._settings)
                fitting: Future[None] = Future()
                Thread(target=_fit, args=(self._trainer(storage), fitting), daemon=True).start()
                self._follow(fitting)
            finally:
                if self._servers:
                    closing = [server.close.remote() for server in self._servers]
                    self._ray.wait(closing, num_returns=len(closing), timeout=_PATIENCE)
        endings, loss = self._ray.get(self._coordinator.outcome.remote())
        if endings:
            raise _failure(endings, self._settings.ray.learners.count)
        error = fitting.exception()
        if error is not None:
            raise self._continued(f"Ray Train failed: {first_line(error)}" if loss is None else loss)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked.append(number)

    def _start_actors(self, settings: RolloutRun) -> None:
        """Create the actors that the processes find by their names."""
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
                settings.rewards, role.gpus > 0, os.getcwd()
            )
            for number in range(role.count)
        ]

    def _trainer(self, storage: str) -> Any:
        """Return Ray Train's trainer, whose workers start the processes of the run."""
        os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "1")
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        from cavesson.cluster.learner import Command, Losses, WorkerConfig, learn

        role, failures = self._settings.ray.learners, self._settings.ray.failures
        command = Command(
            words=sys.argv[1:],
            run=self._settings.run,
            folder=os.getcwd(),
            environment={ON_RAY: os.environ[ON_RAY], "COLUMNS": str(shutil.get_terminal_size().columns)},
            launcher=self._launcher,
            coordinator=self._coordinator,
            servers=self._servers,
        )
        return TorchTrainer(
            learn,
            train_loop_config={"command": command},
            torch_config=WorkerConfig(backend="gloo"),
            scaling_config=ScalingConfig(
                num_workers=role.count,
                use_gpu=role.gpus > 0,
                resources_per_worker={"CPU": role.cpus, "GPU": role.gpus, **role.resources},
            ),
            run_config=RunConfig(
                name=os.environ[ON_RAY],
                storage_path=storage,
                failure_config=FailureConfig(max_failures=failures, max_preemption_failures=failures),
                callbacks=[Losses(self._coordinator)],
            ),
        )

    def _follow(self, fitting: Future[None]) -> None:
        """Print what the processes print and send them the user's signals, until Ray Train has ended."""
        sent, since, is_told = 0, time.monotonic(), False
        while True:
            is_done = fitting.done()
            news = self._ray.get(self._coordinator.news.remote())
            for stream, line in news.lines:
                print(line, file=sys.stdout if stream == 1 else sys.stderr, flush=True)
            if is_done:
                return
            for number in self._asked[sent:]:
                self._ray.get(self._coordinator.signal.remote(number))
            sent = len(self._asked)
            since = since if news.is_waiting else time.monotonic()
            waited = time.monotonic() - since
            if sent >= _MOST_SIGNALS or (sent and waited > _PATIENCE):
                raise KeyboardInterrupt if self._asked[0] == signal.SIGINT else TerminatedError
            if waited > self._settings.ray.timeout:
                raise self._continued(f"{self._waiting(waited)} (ray.timeout)")
            if waited > _SILENCE and not is_told:
                print_error(f"cavesson: {self._waiting(waited)}; waiting for up to {self._settings.ray.timeout:g} s")
            is_told = waited > _SILENCE
            time.sleep(_PERIOD)

    def _waiting(self, seconds: float) -> str:
        role = self._settings.ray.learners
        return (
            f"no process of the run has started for {seconds:.0f} s: the cluster needs room for "
            f"{counted(role.count, 'learner')} with {needs(role)} each"
        )

    def _continued(self, line: str) -> UserError:
        """Return an error that says how to continue the run."""
        error, way = UserError(line), self._way_on()
        if way is not None:
            error.add_note(f"continue with: {way}")
        return error


def _fit(trainer: Any, fitting: "Future[None]") -> None:
    try:
        trainer.fit()
    except Exception as error:
        fitting.set_exception(error)
    else:
        fitting.set_result(None)


def _failure(endings: Mapping[int, Ending], count: int) -> UserError | SystemExit:
    """Return the error that names what ended the processes; SystemExit if the first process has printed it.

    Args:
        endings: how they ended, by their ranks, in this order.
        count: of the processes.
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
