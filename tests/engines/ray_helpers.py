"""Runs on a Ray cluster of several nodes on this machine; without Ray, the tests of a module with it are skipped."""

import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
from account_helpers import account

from cavesson.train.checkpoint import latest

pytest.importorskip("ray", reason="needs Ray: make test-engines, or pip install 'cavesson[ray]'")
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
MARK = "CAVESSON_TEST_CLUSTER"
os.environ[MARK] = uuid4().hex  # which all processes of the cluster inherit, and theirs

Add = Callable[..., Any]
COMMAND = [sys.executable, "-m", "cavesson"]
PROMPTS = ("On the table", "My", "A dog and")
REWARDS = """
import os, signal, time
from pathlib import Path

def slow(prompts, responses, **_):
    time.sleep(0.2)
    return [len(r) for r in responses]

def deadly(prompts, responses, **_):
    \"\"\"Kills the first reward worker that calls it for responses of a step, once.\"\"\"
    if "RANK" not in os.environ and "Yes." not in responses and not Path("died").exists():
        Path("died").write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    return {"length": [len(r) for r in responses], "prompt": [-len(p) / 10 for p in prompts]}

def broken(prompts, responses, **_):
    if "Yes." not in responses:
        raise KeyError("answer")
    return [0.0] * len(responses)

def fatal(prompts, responses, **_):
    \"\"\"Kills the first process that calls it after the first checkpoint of the stage, once.\"\"\"
    if list(Path("here/grpo/checkpoints").glob("step-*")) and not Path("died").exists():
        Path("died").write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    return [len(r) for r in responses]
"""
RECIPE = """
run = "here"
steps = 400
batch_size = 6
samples_per_prompt = 3
[model]
device = "cpu"
[data]
path = "prompts.txt"
[sampling]
random_length = [1, 8]
[optimizer]
learning_rate = 1e-3
[checkpoint]
every = 1
[doctor]
on_finding = "ignore"
[[rewards]]
use = "rewards.py:slow"
[ray.learners]
count = 2
cpus = 0
resources = { learner = 1 }
"""
WORKERS = """
[ray.reward_workers]
count = 2
cpus = 0
resources = { reward = 1 }
"""
MEMORY = 100 << 20


def start(cluster: Any, **values: Any) -> Any:
    """Add a node, which sets a handler of SIGTERM in this process."""
    before = signal.getsignal(signal.SIGTERM)
    node = cluster.add_node(num_cpus=0, object_store_memory=MEMORY, **values)
    signal.signal(signal.SIGTERM, before)
    return node


def prepare(folder: Path, recipe: str = RECIPE) -> None:
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "recipe.toml").write_text(recipe)


def environment(cluster: Any) -> dict[str, str]:
    """In which the commands that are told can be pasted, and find the cluster."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "RAY_ADDRESS": cluster.address}


def command(words: Sequence[str]) -> list[str]:
    """The command of a test, or one that a run has printed."""
    return [*words] if Path(words[0]).name == "cavesson" else [*COMMAND, *words]


def train(cluster: Any, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(words), cwd=folder, env=environment(cluster), capture_output=True, text=True, timeout=400
    )


def begun(cluster: Any, folder: Path, *words: str) -> subprocess.Popen[str]:
    """A run that has written a checkpoint since it was started."""
    before = checkpoints(folder)
    process = subprocess.Popen(
        command(words),
        cwd=folder, env=environment(cluster), text=True, stdout=subprocess.DEVNULL, stderr=(folder / "err").open("w"),
    )  # fmt: skip
    wait_for(lambda: bool(checkpoints(folder) - before), process, folder)
    return process


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], folder: Path, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline and process.poll() is None, (folder / "err").read_text()[-3000:]
        time.sleep(0.05)


def checkpoints(folder: Path) -> set[str]:
    return {path.name for path in (folder / "here" / "checkpoints").glob("step-*")}


def goes_on(process: subprocess.Popen[str], folder: Path) -> None:
    """Wait for a step of a run that was begun after this call."""
    done = latest(folder / "here")
    assert done is not None
    start = done.step
    wait_for(lambda: (now := latest(folder / "here")) is not None and now.step >= start + 2, process, folder)


def said(folder: Path) -> list[str]:
    """The lines of the command that `begun` has started."""
    return own_lines((folder / "err").read_text())


def own_lines(text: str) -> list[str]:
    """Lines of stderr, without those of libraries, and without those that are there because this machine is slow."""
    return [one for one in text.splitlines() if one.startswith("cavesson: ") and "; waiting for up to" not in one]


def resume_hint(line: str) -> list[str]:
    words = shlex.split(line.split("continue with: ")[1])
    # The whole path, where the nodes of the cluster do not have it in PATH.
    assert Path(words[0]).name == "cavesson" and words[-1] == "--ray"
    return words


IDLE = ("ray::IDLE", "ray::_AutoscalingCoordinatorActor", "ray::PlacementGroupCleaner")
"""Processes that wait for work. Ray Train keeps the second on a cluster for all runs; the third ends once the dashboard
of Ray, which the cluster of these tests lacks, says that its run has ended."""


def ours() -> list[psutil.Process]:
    """Processes that do something for a run on the cluster of these tests, or that those have started."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ", "status"]):
        variables, words = process.info["environ"] or {}, " ".join(process.info["cmdline"] or [])
        is_of_a_worker = variables.get(MARK) == os.environ[MARK] and "RAY_JOB_ID" in variables
        is_idle = words.startswith(IDLE) or "default_worker.py" in words
        if is_of_a_worker and not is_idle and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def all_ended() -> None:
    deadline = time.monotonic() + 60
    while left := ours():
        assert time.monotonic() < deadline, [(one.pid, one.cmdline()) for one in left]
        time.sleep(0.2)


def used(cluster: Any, nodes: Sequence[Any], actor: str = "RayTrainWorker") -> list[Any]:
    """Those of the nodes that are alive and run an actor of this class; by default, a learner."""
    return [node for node in nodes if node in cluster.list_all_nodes() and pids(node, actor)]


def pids(node: Any, actor: str) -> list[int]:
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return [one.pid for one in raylet.children() if f"ray::{actor}" in " ".join(one.cmdline())]


def kill(cluster: Any, node: Any, *others: Any) -> None:
    """Kill the first of these nodes at a random moment."""
    time.sleep(random.random() * 2)
    cluster.remove_node(node, allow_graceful=False)


def ended(process: subprocess.Popen[str], folder: Path, code: int, by: Callable[[], None]) -> str:
    """What a run says when it ends within seconds, with all that it has started."""
    by()
    before = time.monotonic()
    assert process.wait(200) == code, (folder / "err").read_text()[-3000:]
    assert time.monotonic() - before < 60
    assert "Traceback" not in (folder / "err").read_text()
    all_ended()
    return said(folder)[-1]


def finish(cluster: Any, folder: Path, way: Sequence[str], attempts: int) -> None:
    """Do one more step of a run with the command that continues it, and see that each prompt was used once."""
    done = latest(folder / "here")
    assert done is not None
    last = train(cluster, folder, *way, "--steps", str(done.step + 1))
    assert last.returncode == 0, last.stderr[-3000:]
    account(folder / "here", PROMPTS, done.step + 1)
    assert len(list((folder / "here" / "attempts").iterdir())) == attempts
