"""How a command is written so that the user's shell finds it: what is printed as the next thing to do."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path


def command_line(*words: str | Path, processes: int = 1) -> str:
    """Return `cavesson WORDS…` as it can be pasted into the shell that this process was started from.

    Args:
        words: arguments of the command; those with spaces and the like are quoted.
        processes: how many of them torchrun is to start.
    """
    torchrun = [*program("torchrun", "torch.distributed.run"), "--standalone", "--nproc-per-node", str(processes)]
    parts = [*(program() if processes == 1 else [*torchrun, "-m", "--", "cavesson"]), *map(str, words)]
    return shlex.join(parts) if os.name == "posix" else subprocess.list2cmdline(parts)


def program(name: str = "cavesson", module: str = "cavesson") -> list[str]:
    """Return what starts a program of this Python: its name if the PATH has it, else its path, else `python -m`."""
    script = _script(name)
    if script is None:
        return [sys.executable, "-m", module]
    on_path = shutil.which(name)
    if on_path is not None and os.path.samefile(on_path, script):
        return [name]
    below = script.is_relative_to(Path.cwd())
    return [str(script.relative_to(Path.cwd()) if below else script)]


def _script(name: str) -> Path | None:
    """A script of this Python, as a full path; links stay as they are, because users know their names."""
    called = Path(sys.argv[0]).absolute()
    if called.stem == name and called.is_file():
        return called
    beside = shutil.which(name, path=str(Path(sys.executable).parent))
    return None if beside is None else Path(beside)
