"""Called in every process: the runs of test_…_processes.py, one after the other."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from several_helpers import command
from train_helpers import PROMPTS, WATCHED, patient, settings, tiny_run, uneven

from cavesson import cli
from cavesson.errors import StoppedError
from cavesson.train import checkpoint
from cavesson.train.run import Training


class Stop(Exception):
    pass


def stop_after_two(step: int, metrics: dict[str, float]) -> None:
    if step == 1:
        raise Stop


def report(step: int, metrics: dict[str, float]) -> None:
    pass


def algorithms(runs: dict[str, dict[str, Any]], folder: Path) -> None:
    """Runs of changes to `tiny_flags`."""
    for name, changes in runs.items():
        tiny_run(changes.pop("algorithm"), folder / name, **changes).run(report)


def ppo(runs: dict[str, dict[str, Any]], folder: Path) -> None:
    """Runs of changes to `settings`, then one that the doctor stops and one that is a mistake."""
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


def mistake(folder: Path) -> None:
    """One response cannot be split; every process leaves its exit code in a file."""
    sys.argv = ["cavesson", "ppo", "--batch_size", "1", "--run", str(folder / "never"), "--model.device", "cpu"]
    try:
        cli.main()
    except SystemExit as stop:
        (folder / f"exit-{os.environ['RANK']}").write_text(str(stop.code))
