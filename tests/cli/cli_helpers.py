"""The command line in separate processes, forked from one that has everything imported: 50 ms instead of seconds."""

import errno
import multiprocessing
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["cavesson.cli", "cavesson.train.run", "cavesson.tools.generate"])
SECONDS = 300
"""After which a command does not end any more."""


class Done(NamedTuple):
    """How a command ended; −9 is SIGKILL."""

    code: int | None
    out: str
    err: str


def start(
    folder: Path, *arguments: str, before: Callable[[], object] | None = None, **fate: int
) -> multiprocessing.process.BaseProcess:
    """Start `cavesson ARGUMENTS` in `folder`, where `before` is called first; `fate` as in `_watch_disk`."""
    process = FORKS.Process(target=_command, args=(folder, list(arguments), fate, before), name=" ".join(arguments))
    process.start()
    return process


def cavesson(folder: Path, *arguments: str, before: Callable[[], object] | None = None, **fate: int) -> Done:
    """Run `cavesson ARGUMENTS` in `folder`; the rest as in `start`."""
    process = start(folder, *arguments, before=before, **fate)
    end(process)
    return Done(process.exitcode, (folder / ".out").read_text(), (folder / ".err").read_text())


def end(process: multiprocessing.process.BaseProcess) -> None:
    """Wait until a command ends, which it must."""
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"{process.name} does not end")


def in_terminal(folder: Path, *arguments: str, typed: str = "") -> str:
    """What `cavesson ARGUMENTS` writes to a real terminal that knows no colours, where `typed` is typed."""
    ours, theirs = os.openpty()
    process = FORKS.Process(target=_command, args=(folder, list(arguments), {}, None, os.ttyname(theirs)))
    process.start()
    os.write(ours, typed.encode())
    written, deadline = b"", time.monotonic() + SECONDS
    while (ready := select.select([ours], [], [], 0.1)[0]) or process.is_alive():
        written += os.read(ours, 1 << 16) if ready else b""
        if time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"{arguments} does not end: {written!r}")
    process.join()
    os.close(ours)
    os.close(theirs)
    return written.decode().replace("\r\n", "\n")


def _command(
    folder: Path,
    arguments: list[str],
    fate: dict[str, int],
    before: Callable[[], object] | None,
    terminal: str | None = None,
) -> None:
    os.chdir(folder)
    if terminal is not None:
        os.environ["TERM"] = "dumb"
        for number in (0, 1, 2):
            os.dup2(os.open(terminal, os.O_RDWR), number)
        sys.stdin = os.fdopen(0)  # multiprocessing had closed it
        sys.stdout = os.fdopen(1, "w", closefd=False)  # what was opened as a file would look for its place in it
    for number, name in ((1, ".out"), (2, ".err")) if terminal is None else ():
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    from cavesson import cli

    os.environ["COLUMNS"] = "250"
    count = _watch_disk(**fate)
    sys.argv = ["cavesson", *arguments]
    if before is not None:
        before()
    try:
        cli.main()
    finally:
        Path(".operations").write_text(str(count()))


def _watch_disk(die_at: int = 0, full_at: int = 0) -> Callable[[], int]:
    """Count what makes files durable, visible or gone.

    Before operation number `die_at` the process kills itself; from number `full_at` on the disk is full.
    """
    seen, fsync = 0, os.fsync

    def watched(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **names: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if 0 < full_at <= seen and operation is fsync:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return operation(*arguments, **names)

        return call

    for name in ("fsync", "rename", "replace", "unlink", "rmdir"):
        setattr(os, name, watched(getattr(os, name)))
    return lambda: seen


def write_recipe(folder: Path, text: str, prompts: Sequence[str] = ("On the table", "My", "A dog and")) -> None:
    """A recipe.toml of the tiny model with its prompts beside it."""
    (folder / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in prompts))
    (folder / "recipe.toml").write_text(text)


RECIPE = """
run = "run"
steps = 2
batch_size = 4
[model]
device = "cpu"
[data]
path = "prompts.txt"
[sampling]
random_length = [1, 5]
[[rewards]]
use = "lowercase"
[doctor]
on_finding = "ignore"
"""
"""Its last look at a finished run takes longer than the run."""


def fresh(folder: Path) -> Path:
    """An empty folder with the recipe."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_recipe(folder, RECIPE)
    return folder
