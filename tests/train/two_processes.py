"""Called in every process: the runs of test_…_processes.py, one after the other."""

import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from several_helpers import command
from train_helpers import PROMPTS, WATCHED, patient, settings, tiny_run, uneven

from cavesson import cli
from cavesson.algorithms.ppo import PPO
from cavesson.errors import StoppedError, TerminatedError, UserError
from cavesson.processes import Processes
from cavesson.train import checkpoint
from cavesson.train.run import Training


class Stop(TerminatedError):
    pass


def stop_after_two(step: int, metrics: dict[str, float]) -> None:
    if step == 1:
        raise Stop


def report(step: int, metrics: dict[str, float]) -> None:
    pass


def algorithms(runs: dict[str, dict[str, Any]], folder: Path) -> None:
    """Run of changes to `tiny_flags`."""
    for name, changes in runs.items():
        tiny_run(changes.pop("algorithm"), folder / name, **changes).run(report)


def ppo(runs: dict[str, dict[str, Any]], folder: Path) -> None:
    """Run of changes to `settings`, then one that the doctor stops and one that is a mistake."""
    for name, changes in runs.items():
        broken_off = changes.pop("broken_off", False)
        made = settings(folder / name, **changes)
        if broken_off:
            with suppress(Stop):
                Training(made, prompts=PROMPTS, rewards=uneven).run(stop_after_two)
        Training(made, prompts=PROMPTS, rewards=uneven, resume=broken_off).run(report)
    stopped(folder)
    mistake(folder)


def killed(rank: int, *arguments: str) -> None:
    """The command line; this process is killed at its second checkpoint, before that gets its name."""
    name = "_rename" if rank == 0 else "_write_own"
    real, calls = getattr(checkpoint, name), []

    def dies(*given: Any) -> Any:
        calls.append(given)
        if rank == 0 and len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*given)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    if os.environ["RANK"] == str(rank):
        setattr(checkpoint, name, dies)
    command(*arguments)


def stopped(folder: Path) -> None:
    """The doctor stops a run; every process leaves what it says in a file."""
    made = settings(folder / "stopped", **WATCHED, doctor__on_finding="stop")
    try:
        Training(made, prompts=PROMPTS, rewards=uneven).run(patient(made.run))
    except StoppedError as error:
        (folder / f"stopped-{os.environ['RANK']}").write_text(str(error))


def older_group() -> None:
    """A process group for GPUs alone, as NCCL's, is there before a run that needs one for both."""
    torch.distributed.init_process_group("cuda:gloo")
    with pytest.raises(UserError, match='one for cuda:gloo: make it with backend "cuda:nccl,cpu:gloo"'):
        Processes("cpu", shard="full", offload=True)


def trusting(*arguments: str) -> None:
    """The command line; all processes take the checkpoint that the first one has verified."""
    if os.environ["RANK"] != "0":
        checkpoint._verify = None  # type: ignore[assignment]  # a call fails
    command(*arguments)


def own_parts(folder: Path) -> None:
    """A reward whose parts differ between processes."""
    rank = int(os.environ["RANK"])

    def reward(prompts: list[str], responses: list[str], **_: Any) -> dict[str, list[float]]:
        parts = {"both": [1.0 + rank] * len(responses), f"of {rank}": [5.0] * len(responses)}
        return parts | {name: [0.5] * len(responses) for name in ("a", "b") if rank}

    Training(settings(folder, batch_size=5, parallel__timeout=30), prompts=PROMPTS, rewards=reward).run(report)


def not_finite(*arguments: str) -> None:
    """The command line; from the second process' loss on, nothing is finite."""
    real = PPO.loss

    def loss(self: PPO, scores: Any, batch: Any) -> Any:
        seen = real(self, scores, batch)
        return replace(seen, loss=seen.loss * float("nan")) if os.environ["RANK"] == "1" else seen

    PPO.loss = loss  # type: ignore[method-assign]
    command(*arguments)


def mistake(folder: Path) -> None:
    """One response cannot be split; every process leaves its exit code in a file."""
    sys.argv = ["cavesson", "ppo", "--batch_size", "1", "--run", str(folder / "never"), "--model.device", "cpu"]
    try:
        cli.main()
    except SystemExit as stop:
        (folder / f"exit-{os.environ['RANK']}").write_text(str(stop.code))
