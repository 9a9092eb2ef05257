"""vLLM servers that Ray starts, and which are lost with their nodes."""

import shlex
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from account_helpers import account
from ray_helpers import (
    PROMPTS,
    RECIPE,
    WORKERS,
    Add,
    all_ended,
    begun,
    ended,
    finish,
    goes_on,
    kill,
    ours,
    own_lines,
    pids,
    prepare,
    resume_hint,
    said,
    train,
    used,
)
from test_vllm import PYTHON, ROUNDING, model

import cavesson
from cavesson.models.tiny import tiny_tokenizer

pytestmark = pytest.mark.timeout(900)
STAND_IN = Path(__file__).parents[1] / "train" / "vllm_stand_in.py"
SERVED = (
    RECIPE.replace('device = "cpu"', 'device = "cpu"\nlora = { rank = 4 }').replace("count = 2", "count = 1")
    + """
[ray.servers]
cpus = 0
resources = { server = 1 }
"""
)


def served(python: str, *more: str) -> str:
    """A recipe with a server of this Python's vLLM."""
    lines = [f"[sampling]\nmax_new_tokens = 8\nengine = 'vllm'\nvllm.python = {python!r}", *more]
    return SERVED.replace("[sampling]\nrandom_length = [1, 8]", "\n".join(lines))


@pytest.fixture
def python(tmp_path: Path) -> str:
    """A Python whose vLLM is the stand-in."""
    python = tmp_path / "python"
    words = shlex.join([sys.executable, str(STAND_IN)])
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit 0\nexec {words} "$@"\n')
    python.chmod(0o755)
    return str(python)


@pytest.mark.slow
def test_a_run_survives_the_loss_of_its_server(cluster: Any, add: Add, python: str, tmp_path: Path) -> None:
    """A server is killed, then its node, then the node of the next one, which is more than the run may lose."""
    add(learner=1)
    nodes = [add(server=1) for _ in range(2)]
    prepare(tmp_path, served(python) + "[ray]\nfailures = 2\n")
    process = begun(cluster, tmp_path, "grpo", "recipe.toml", "--ray")
    (node,) = used(cluster, nodes, "Server")
    (server,) = psutil.Process(*pids(node, "Server")).children()
    server.kill()
    goes_on(process, tmp_path)
    (line,) = said(tmp_path)
    assert line.startswith("cavesson: the vLLM server ")
    assert line.endswith("; the run restarts from its latest checkpoint (restart 1 of at most 2)")
    kill(cluster, node)
    goes_on(process, tmp_path)
    line = said(tmp_path)[-1]
    assert line.startswith("cavesson: ") and line.endswith("(restart 2 of at most 2)")
    line = ended(process, tmp_path, 2, lambda: kill(cluster, *used(cluster, nodes, "Server")))
    assert line.startswith("cavesson: ") and "; continue with: " in line
    add(server=1)
    finish(cluster, tmp_path, resume_hint(line), attempts=4)


@pytest.mark.slow
def test_everything_ends_if_the_command_is_killed(cluster: Any, add: Add, python: str, tmp_path: Path) -> None:
    """The learner, the server and the reward workers end within 30 seconds; the run continues from its checkpoint."""
    add(learner=1, reward=1), add(server=1, reward=1)
    prepare(tmp_path, served(python) + WORKERS)
    process = begun(cluster, tmp_path, "grpo", "recipe.toml", "--ray")
    words = [" ".join(one.cmdline()) for one in ours()]
    for part in ("ray::RayTrainWorker", "ray::RewardWorker", "ray::Server", "cavesson grpo", STAND_IN.name):
        assert any(part in line for line in words), words
    process.kill()
    before = time.monotonic()
    process.wait()
    all_ended()
    assert time.monotonic() - before < 30
    finish(cluster, tmp_path, ["grpo", "--resume", "here", "--ray"], attempts=2)


@pytest.mark.slow
def test_a_server_that_cannot_start_is_reported_in_a_line(cluster: Any, add: Add, tmp_path: Path) -> None:
    add(learner=2, server=1)
    prepare(tmp_path, served(sys.executable).replace("count = 1", "count = 2"))
    done = train(cluster, tmp_path, "grpo", "recipe.toml", "--ray")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    (line,) = own_lines(done.stderr)
    assert line.startswith(
        f'cavesson: sampling.engine "vllm" needs vLLM, which {sys.executable} does not have; install'
    )
    assert not (tmp_path / "here").exists()


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="needs vLLM in a separate environment: make test-engines")
def test_a_run_samples_from_a_real_vllm_on_another_node(
    cluster: Any, add: Add, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # the nodes inherit it, as servers inherit those of their nodes
    add(learner=1), add(server=1)
    model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    recipe = served(PYTHON, "vllm.arguments = ['--enforce-eager']").replace("[model]", "[model]\npath = './model'")
    prepare(tmp_path, recipe.replace("steps = 400", "steps = 3"))
    done = train(cluster, tmp_path, "grpo", "recipe.toml", "--ray")
    assert done.returncode == 0, done.stderr[-3000:]
    account(tmp_path / "here", PROMPTS, 3)
    for step in range(3):
        tokens = cavesson.open(tmp_path / "here").tokens(step)
        np.testing.assert_allclose(tokens["logprob"].to_numpy(), tokens["sampler_logprob"].to_numpy(), atol=ROUNDING)
