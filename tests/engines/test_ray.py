"""`--ray` on a real Ray cluster: several nodes on this machine, which are killed while runs go on.

`make test-engines` installs Ray and runs these tests.
"""

import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import cavesson
from cavesson.train.checkpoint import latest

pytest.importorskip("ray", reason="needs Ray: make test-engines, or pip install 'cavesson[ray]'")
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

from ray.cluster_utils import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
COMMAND = [sys.executable, "-m", "cavesson"]
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
MEASURED = ("time/", "tokens_per_second", "memory/")
"""Beginnings of the names of metrics that differ from run to run."""
MODULE = "vllm.entrypoints.openai.api_server"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster whose head has no resources; tests add the nodes that they kill."""
    cluster = Cluster()
    start(cluster, include_dashboard=False)
    yield cluster
    cluster.shutdown()


def start(cluster: Cluster, **values: Any) -> Any:
    """Add a node, which sets a handler of SIGTERM in this process."""
    before = signal.getsignal(signal.SIGTERM)
    node = cluster.add_node(num_cpus=0, object_store_memory=MEMORY, **values)
    signal.signal(signal.SIGTERM, before)
    return node


Add = Callable[..., Any]


@pytest.fixture
def add(cluster: Cluster) -> Iterator[Add]:
    """Adds nodes with resources, which are removed after the test if they have not been killed."""
    nodes = []

    def add(**resources: int) -> Any:
        nodes.append(start(cluster, resources=resources))
        return nodes[-1]

    yield add
    for node in nodes:
        if node in cluster.list_all_nodes():
            cluster.remove_node(node)


def prepare(folder: Path, recipe: str = RECIPE) -> None:
    (folder / "prompts.txt").write_text("On the table\nMy\nA dog and\n")
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "recipe.toml").write_text(recipe)


def environment(cluster: Cluster) -> dict[str, str]:
    """In which the commands that are told can be pasted, and find the cluster."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "RAY_ADDRESS": cluster.address}


def train(cluster: Cluster, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words if words[0] != "grpo" else [*COMMAND, *words],
        cwd=folder, env=environment(cluster), capture_output=True, text=True, timeout=400,
    )  # fmt: skip


def begun(cluster: Cluster, folder: Path, *words: str) -> subprocess.Popen[str]:
    """A run that has written a checkpoint since it was started."""
    before = checkpoints(folder)
    process = subprocess.Popen(
        words if words[0] != "grpo" else [*COMMAND, *words],
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
    """The lines of the command that `begun` has started; others are of libraries, or because this machine is slow."""
    lines = (folder / "err").read_text().splitlines()
    return [line for line in lines if line.startswith("cavesson: ") and "no process of the run has started" not in line]


def way_on(line: str) -> list[str]:
    words = shlex.split(line.split("continue with: ")[1])
    assert words[0] == "cavesson" and words[-1] == "--ray"
    return words


def ours() -> list[psutil.Process]:
    """Processes that Ray or its workers run for a run."""
    names = ("RayTrainWorker", "TrainController", "Coordinator", "RewardWorker", "Server", "SynchronizationActor")
    found = []
    for process in psutil.process_iter(["cmdline", "environ", "status"]):
        words, variables = process.info["cmdline"] or [], process.info["environ"] or {}
        is_actor = any(word.startswith(f"ray::{name}") for name in names for word in words)
        is_started = "RAY_JOB_ID" in variables and any(word in ("cavesson", MODULE) for word in words)
        if (is_actor or is_started) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def all_ended() -> None:
    deadline = time.monotonic() + 60
    while left := ours():
        assert time.monotonic() < deadline, [(one.pid, one.cmdline()) for one in left]
        time.sleep(0.2)


def used(cluster: Cluster, nodes: list[Any]) -> list[Any]:
    """Those of the nodes that are alive and run a learner."""
    return [node for node in nodes if node in cluster.list_all_nodes() and _runs_learner(node)]


def _runs_learner(node: Any) -> bool:
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return any("ray::RayTrainWorker" in " ".join(one.cmdline()) for one in raylet.children())


def recorded_once(folder: Path, steps: int) -> None:
    rows = cavesson.open(folder / "here").rows(["step", "sample"]).to_pylist()
    assert [(row["step"], row["sample"]) for row in rows] == [(step, i) for step in range(steps) for i in range(6)]


def test_a_run_is_the_same_as_with_processes_though_a_reward_worker_dies(
    cluster: Cluster, add: Add, tmp_path: Path
) -> None:
    add(learner=1, reward=1), add(learner=1, reward=1)
    for name, flags in (("one", ["--processes", "2"]), ("ray", ["--ray"])):
        folder = tmp_path / name
        folder.mkdir()
        prepare(folder, RECIPE.replace("slow", "deadly").replace("steps = 400", "steps = 3") + WORKERS)
        done = train(cluster, folder, "grpo", "recipe.toml", *flags)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("3 of 3 done") == 1  # said once, not by every process
        assert "restart" not in done.stderr and (folder / "died").exists() == (name == "ray")
    all_ended()
    one, ray = (cavesson.open(tmp_path / name / "here") for name in ("one", "ray"))
    assert one.info["processes"] == ray.info["processes"] == 2 and ray.info["inputs"] == []
    recorded_once(tmp_path / "ray", 3)
    columns = ["step", "sample", "prompt", "response", "reward", "reward_parts"]
    assert one.rows(columns).to_pylist() == ray.rows(columns).to_pylist()
    for step in range(3):
        names = ("token_id", "logprob", "advantage")
        for name in names:
            np.testing.assert_allclose(*(run.tokens(step)[name].to_numpy() for run in (one, ray)), atol=1e-5)
    for mine, theirs in zip(*(run.steps().to_pylist() for run in (ray, one)), strict=True):
        for name in mine.keys() | theirs.keys():
            if not name.startswith(MEASURED):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name


def test_nodes_are_killed_while_a_run_goes_on(cluster: Cluster, add: Add, tmp_path: Path) -> None:
    """It goes on; then it is interrupted, continues, and loses more than it may; then it continues elsewhere."""
    learners, rewards = [add(learner=1) for _ in range(3)], [add(reward=1) for _ in range(2)]
    prepare(tmp_path, RECIPE + WORKERS)
    process = begun(cluster, tmp_path, "grpo", "recipe.toml", "--ray")
    kill(cluster, rewards[0])
    goes_on(process, tmp_path)
    assert said(tmp_path) == []
    kill(cluster, *used(cluster, learners))
    goes_on(process, tmp_path)
    (line,) = said(tmp_path)
    lost = (
        r"cavesson: process [01] of 2 \(counted from 0\) on node [\d.]+ was lost: the node, or Ray's worker on it, died"
    )
    assert re.fullmatch(rf"{lost}; the run starts again from its latest checkpoint \(restart 1 of at most 3\)", line)
    line = ended(process, tmp_path, 130, lambda: process.send_signal(signal.SIGINT))
    assert "the checkpoint is complete" in line

    learners.append(add(learner=1))
    add(reward=1)  # a new start needs all that the recipe asks for
    process = begun(cluster, tmp_path, *way_on(line), "--ray.failures", "0")
    line = ended(process, tmp_path, 2, lambda: kill(cluster, *used(cluster, learners)))
    assert re.match(rf"{lost}; continue with: ", line)
    finish_without_ray(cluster, tmp_path, line, attempts=4)


def kill(cluster: Cluster, node: Any, *others: Any) -> None:
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


def finish_without_ray(cluster: Cluster, folder: Path, line: str, attempts: int) -> None:
    """Continue a run in processes of this machine, and see that each rollout is recorded once."""
    done = latest(folder / "here")
    assert done is not None
    words = [*way_on(line)[:-1], "--steps", str(done.step + 1), "--processes", "2"]
    last = train(cluster, folder, *words)
    assert last.returncode == 0, last.stderr[-3000:]
    recorded_once(folder, done.step + 1)
    assert len(list((folder / "here" / "attempts").iterdir())) == attempts


def test_mistakes_are_told_in_a_line_and_nothing_is_started_again(cluster: Cluster, add: Add, tmp_path: Path) -> None:
    add(learner=1, reward=1), add(learner=1, reward=1)
    prepare(tmp_path, RECIPE.replace("slow", "broken") + WORKERS)
    done = train(cluster, tmp_path, "grpo", "recipe.toml", "--ray")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("cavesson: ")]
    assert line.startswith("cavesson: the reward broken raised KeyError: 'answer' (") and "rewards.py, line 18)" in line
    assert not (tmp_path / "here").exists()  # the corrected command needs it
    done = train(cluster, tmp_path, "grpo", "recipe.toml", "--ray", "--ray.learners.count", "3", "--ray.timeout", "5")
    assert done.returncode == 2 and re.match(
        r"cavesson: no process of the run has started for \d+ s: the cluster needs room for 3 learners with "
        r"learner 1 each \(ray.timeout\)\n",
        done.stderr[done.stderr.index("cavesson: ") :],
    ), done.stderr
    all_ended()
    done = train(cluster, tmp_path, "grpo", "recipe.toml", "--ray", "--ray.address", "127.0.0.1:1")
    assert done.returncode == 2 and "cavesson: ray.address '127.0.0.1:1': there is no Ray cluster" in done.stderr
