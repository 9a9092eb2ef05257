"""`--ray` on a real Ray cluster: several nodes on this machine, which are killed while runs go on.

`make test-engines` installs Ray and runs these tests; `make test-engines-quick` those that are not slow, as CI does.
"""

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
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
    own_lines,
    prepare,
    resume_hint,
    said,
    train,
    used,
)  # fmt: skip

import cavesson
from cavesson.algorithms.settings import RewardWorkerSettings
from cavesson.cluster.connection import actor_name, connect, options
from cavesson.cluster.rewards import ROLE, RewardWorker, remote_rewards
from cavesson.command_line import ON_RAY
from cavesson.functions import load_function
from cavesson.rollout.rewards.settings import RewardSettings
from cavesson.rollout.rewards.table import score
from cavesson.rollout.settings import EnvironmentSettings

pytestmark = pytest.mark.timeout(600)
MEASURED = ("time/", "tokens_per_second", "machine/")
"""Beginnings of the names of metrics that differ from run to run."""


@pytest.mark.slow
def test_a_run_is_the_same_as_with_processes_though_a_reward_worker_dies(
    cluster: Any, add: Add, tmp_path: Path
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
    account(tmp_path / "ray" / "here", PROMPTS, 3)
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


@pytest.mark.slow
def test_nodes_are_killed_while_a_run_goes_on(cluster: Any, add: Add, tmp_path: Path) -> None:
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
        r"cavesson: process [01] of 2 \(counted from 0\) on node [\d.]+ was lost: its node, or Ray's worker on it, died"
    )
    assert re.fullmatch(rf"{lost}; the run restarts from its latest checkpoint \(restart 1 of at most 3\)", line)
    line = ended(process, tmp_path, 130, lambda: process.send_signal(signal.SIGINT))
    assert "the checkpoint is complete" in line

    learners.append(add(learner=1))
    add(reward=1)  # a new start needs all that the recipe asks for
    process = begun(cluster, tmp_path, *resume_hint(line), "--ray.failures", "0")
    line = ended(process, tmp_path, 2, lambda: kill(cluster, *used(cluster, learners)))
    assert re.match(rf"{lost}; continue with: ", line)
    finish(cluster, tmp_path, [*resume_hint(line)[:-1], "--processes", "2"], attempts=4)


def test_a_broken_reward_is_reported_in_a_line_and_nothing_is_restarted(cluster: Any, add: Add, tmp_path: Path) -> None:
    add(learner=1, reward=1), add(learner=1, reward=1)
    prepare(tmp_path, RECIPE.replace("slow", "broken") + WORKERS)
    done = train(cluster, tmp_path, "grpo", "recipe.toml", "--ray")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    (line,) = own_lines(done.stderr)
    assert line.startswith("cavesson: the reward broken raised KeyError: 'answer' (") and "rewards.py, line 18)" in line
    assert not (tmp_path / "here").exists()  # the corrected command needs it
    all_ended()


JUDGES = """
import asyncio

now = most = 0
met = {}

async def judge(prompt, response):
    global now, most
    now += 1
    most = max(most, now)
    await asyncio.sleep(0.05)
    now -= 1
    return (len(response), f"{prompt}: {len(response)}") if response else None

async def meet(me, other):
    \"\"\"Return once the other one is called, too.\"\"\"
    met.setdefault(me, asyncio.Event()).set()
    await asyncio.wait_for(met.setdefault(other, asyncio.Event()).wait(), 60)

async def first(prompts, responses):
    await meet("first", "second")
    return {"some": [None] * len(responses), "zero": [0] * len(responses)}

async def second(prompts, responses):
    await meet("second", "first")
    return [None] * len(responses)

def tokens(completions, completion_ids, **_):
    return [len(ids) for ids in completion_ids]

def most_at_once(prompts, responses):
    return [most] * len(responses)

def moves(prompts, responses, environments):
    return [one.moves for one in environments]

class Game:
    def __init__(self, moves):
        self.moves = moves
"""


def test_workers_call_async_rewards_at_the_same_time_and_return_what_they_return(
    cluster: Any, add: Add, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two workers gets half of the eight responses, and calls `judge` at most three times at once."""
    import ray

    add(reward=1), add(reward=1)
    (tmp_path / "judges.py").write_text(JUDGES)
    monkeypatch.setenv(ON_RAY, f"cavesson-{tmp_path.name}")
    before = signal.getsignal(signal.SIGTERM)
    connect(cluster.address)
    role = RewardWorkerSettings(count=2, cpus=0, resources={"reward": 1})
    names, game = ("judge", "first", "second", "tokens"), f"{tmp_path}/judges.py:Game"
    settings = [RewardSettings(use=f"{tmp_path}/judges.py:{name}", weight=2) for name in names]
    settings[0] = settings[0].model_copy(update={"concurrency": 3})
    late, played = (RewardSettings(use=f"{tmp_path}/judges.py:{name}") for name in ("most_at_once", "moves"))
    try:
        actors = [
            ray.remote(RewardWorker)
            .options(name=actor_name(ROLE, number), **options(role))
            .remote([*settings, late, played], EnvironmentSettings(use=game), False, str(tmp_path))
            for number in range(2)
        ]
        *rewards, most, moves = remote_rewards([*settings, late, played], role, 120)
        prompts, responses = list("abcdefgh"), ["", *("x" * size for size in range(1, 8))]
        scored = score(rewards, prompts, responses, {}, [[7] * (10 + row) for row in range(8)])
        assert scored.parts == {
            "judge": [None, *range(1, 8)], "first/some": [None] * 8, "first/zero": [0] * 8, "second": [None] * 8,
            "tokens": [*range(10, 18)],
        }  # fmt: skip
        assert scored.total == [20.0, *(2.0 * (row + 10 + row) for row in range(1, 8))]
        assert scored.reasons == {"judge": [None, *(f"{'abcdefgh'[row]}: {row}" for row in range(1, 8))]}
        assert score([most], prompts, responses, {}).total == [3.0] * 8
        assert score([rewards[2]], ["p"], ["r"], {}).total == [None]
        games = [load_function(game)(row) for row in range(8)]
        assert score([moves], prompts, responses, {"environments": games}).total == [*range(8)]
        del actors
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, before)


def test_a_cluster_without_room_or_without_anything_is_reported_in_a_line(
    cluster: Any, add: Add, tmp_path: Path
) -> None:
    add(learner=1)
    prepare(tmp_path)
    done = train(cluster, tmp_path, "grpo", "recipe.toml", "--ray", "--ray.timeout", "3")
    assert done.returncode == 2 and re.fullmatch(
        r"cavesson: no learner has started after \d s; the run needs 2 learners, each on a node with learner 1 free "
        r"\(ray.timeout\)\n",
        done.stderr[done.stderr.index("cavesson: ") :],
    ), done.stderr
    all_ended()
    before = time.monotonic()
    done = train(cluster, tmp_path, "grpo", "recipe.toml", "--ray", "--ray.address", "127.0.0.1:1")
    assert time.monotonic() - before < 30
    assert done.returncode == 2 and re.fullmatch(
        r"cavesson: ray.address '127.0.0.1:1': there is no Ray cluster \(\[Errno 111\] Connection refused\); start one "
        r"with ray start --head, or set ray.address or RAY_ADDRESS to HOST:PORT of one\n",
        done.stderr,
    ), done.stderr


ALIGN = """
run = "here"
[common]
steps = 3
batch_size = 6
model.device = "cpu"
checkpoint.every = 1
doctor.on_finding = "ignore"
[common.ray.learners]
count = 2
cpus = 0
resources = { learner = 1 }
[sft]
data.path = "demonstrations.jsonl"
[grpo]
model.path = "{sft}"
data.path = "prompts.txt"
samples_per_prompt = 3
sampling.max_new_tokens = 4
rewards = [{ use = "rewards.py:fatal" }]
[compare]
models = ["{sft}", "{grpo}"]
prompts = "prompts.txt"
sampling.max_new_tokens = 4
"""


@pytest.mark.slow
def test_the_stages_of_a_recipe_train_on_a_cluster(cluster: Any, add: Add, tmp_path: Path) -> None:
    """A learner of the second stage is killed; the third stage runs in the command itself."""
    add(learner=1), add(learner=1)
    prepare(tmp_path, ALIGN)
    rows = [{"prompt": prompt, "response": " it is."} for prompt in PROMPTS * 4]
    (tmp_path / "demonstrations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = train(cluster, tmp_path, "align", "recipe.toml", "--ray")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("Plan") == done.stdout.count("Result") == 1
    (line,) = own_lines(done.stderr)
    assert re.fullmatch(
        r"cavesson: process [01] of 2 \(counted from 0\) on node [\d.]+ was killed by SIGKILL; the run restarts from "
        r"its latest checkpoint \(restart 1 of at most 3\)",
        line,
    )
    runs = [cavesson.open(tmp_path / "here" / name) for name in ("sft", "grpo")]
    assert [run.info["processes"] for run in runs] == [2, 2]
    account(tmp_path / "here" / "grpo", PROMPTS, 3)
    assert len(list((tmp_path / "here" / "grpo" / "attempts").iterdir())) == 2
    assert (tmp_path / "here" / "compare" / "comparison.json").exists()
    prepare(tmp_path, ALIGN + f"\n[again]\ncommand = 'grpo'\n{ALIGN.split('[grpo]')[1].split('[compare]')[0]}")
    done = train(cluster, tmp_path, "align", "recipe.toml", "--ray", "--again.rewards", '[{use = "rewards.py:broken"}]')
    assert done.returncode == 2
    assert own_lines(done.stderr)[-1].startswith("cavesson: stage again: the reward broken raised KeyError: 'answer' (")
