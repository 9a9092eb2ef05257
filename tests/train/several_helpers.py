"""Several processes of one run with what torchrun tells them, but forked from one that has everything imported."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

sys.path.append(str(Path(__file__).parents[1] / "cli"))
import cli_helpers


def together(
    folder: Path,
    count: int,
    work: Callable[..., None],
    *arguments: Any,
    hosts: int = 1,
    killed_after: float | None = None,
) -> list[cli_helpers.Done]:
    """Call `work(*arguments)` in `folder` in each of so many processes; returns how they ended, by rank.

    With `killed_after`, all of them are killed after that many seconds.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # at a port that nobody else can take
    known = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count // hosts, "OMP_NUM_THREADS": 1}
    known |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    known |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    processes = []
    for rank in range(count):
        own = {"RANK": rank, "LOCAL_RANK": rank % (count // hosts), "GROUP_RANK": rank // (count // hosts)}
        place = {name: str(value) for name, value in (known | own).items()}
        processes.append(
            cli_helpers.FORKS.Process(target=_one, args=(folder, place, work, arguments), name=f"rank {rank}")
        )
    try:
        for process in processes:
            process.start()
        if killed_after is not None:
            time.sleep(killed_after)
            for process in processes:
                process.kill()
        for process in processes:
            cli_helpers.end(process)
    finally:
        for process in processes:
            process.kill()
    said = [[_written(folder / f".{name}-{rank}") for name in ("out", "err")] for rank in range(count)]
    return [cli_helpers.Done(process.exitcode, *texts) for process, texts in zip(processes, said, strict=True)]


def _written(file: Path) -> str:
    return file.read_text() if file.exists() else ""  # a process may be killed before it begins


def command(*arguments: str) -> None:
    """The command line, as work for `together`."""
    from cavesson import cli

    sys.argv = ["cavesson", *arguments]
    cli.main()


def _one(folder: Path, place: dict[str, str], work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.chdir(folder)
    os.environ.update(place)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f".{name}-{place['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    work(*arguments)
