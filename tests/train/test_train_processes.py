"""Two processes are one: the same rollouts, metrics and weights, whatever is split between them."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from several_helpers import cli_helpers, command, together
from torch import Tensor
from train_helpers import LORA, SIGNAL, STOP, build, finish, quiet, saved, settings, tiny_flags, tiny_run
from two_processes import killed, not_finite, older_group, own_parts, ppo, trusting

import cavesson
from cavesson.algorithms.ppo import PPORun
from cavesson.algorithms.reward_model import RewardModelRun
from cavesson.errors import UserError
from cavesson.processes import Processes
from cavesson.record import Run
from cavesson.train.checkpoint import latest
from cavesson.types import Batch, Rollouts

# AdamW turns rounding of a gradient near zero into a full step; a larger ε keeps it rounding.
COMMON: dict[str, Any] = {"steps": 3, "batch_size": 6, "optimizer__eps": 1e-3, "optimizer__learning_rate": 1e-2}
ADAPTIVE = {"kl__target": 0.05, "kl__horizon": 30, "kl__coef": 0.3}
SCALED = {"shaping__scale": True, "shaping__normalise": True, "shaping__missing_eos_penalty": 0.2}
RUNS: dict[str, dict[str, Any]] = {
    "single pass": {"update__epochs": 1},
    "everything": {
        "update__epochs": 2, "update__mini_batches": 2, "update__micro_batch_size": 2, "ppo__whiten_rewards": True,
        "sampling__stop": STOP, **ADAPTIVE, **SCALED,
    },
    "odd, and mini-batches smaller than the processes": {
        "batch_size": 5, "update__epochs": 1, "update__mini_batches": 4, "sampling__stop": STOP
    },
    "lora": {"model__lora": LORA, "update__epochs": 2, "kl__estimator": "full", "samples_per_prompt": 2},
    "broken off": {"checkpoint__every": 1, "update__epochs": 2, **ADAPTIVE, **SCALED},
}  # fmt: skip


def torchrun(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*launcher, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with all runs of two processes."""
    folder = tmp_path_factory.mktemp("two")
    runs = {name: {**COMMON, **changes, "broken_off": name == "broken off"} for name, changes in RUNS.items()}
    ended = together(folder, 2, ppo, runs, folder)
    assert [done.code for done in ended] == [0, 0], [done.err[-3000:] for done in ended]
    return folder


TEXTS = ("step", "sample", "group", "prompt", "response", "prompt_ids", "finish_reason", "reward", "reward_parts")
NUMBERS = ("shaped_reward", "kl_coef", "kl_k1", "kl_k3", "entropy")


def same_rollouts(one: Run, other: Run) -> None:
    first, second = one.rows(), other.rows()
    assert first.select(TEXTS) == second.select(TEXTS)
    for name in NUMBERS:
        np.testing.assert_allclose(
            first[name].to_numpy().astype(float), second[name].to_numpy().astype(float), rtol=0, atol=1e-4
        )
    for step in sorted(set(first["step"].to_pylist())):
        tokens, theirs = one.tokens(step), other.tokens(step)
        for name in ("sample", "position", "token_id"):
            assert tokens[name] == theirs[name]
        for name in ("logprob", "ref_logprob", "sampler_logprob", "value", "token_reward", "advantage", "return"):
            # Two numbers that hardly differ can be rounded to neighbours.
            rounding = 0 if name.endswith("logprob") else 2 * SIGNAL
            np.testing.assert_allclose(tokens[name].to_numpy(), theirs[name].to_numpy(), rtol=rounding, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_are_one(two: Path, tmp_path: Path, name: str) -> None:
    alone = finish(tmp_path / "run", **{**COMMON, **RUNS[name]})
    run = cavesson.open(two / name)
    same_rollouts(cavesson.open(tmp_path / "run"), run)
    for one, other in zip(alone.metrics, run.steps().to_pylist(), strict=True):
        for key in one:
            if not key.startswith(("time/", "machine/", "tokens_per_second")):
                assert other[key] == pytest.approx(one[key], rel=1e-3, abs=1e-4), key
    assert run.info["processes"] == 2
    rows = run.rows()
    first = -(-(max(rows["sample"].to_pylist()) + 1) // 2)  # samples of the first process
    assert rows["rank"].to_pylist() == [int(sample >= first) for sample in rows["sample"].to_pylist()]
    assert set(run.steps()["policy/first_ratio_error"].to_pylist()) == {0.0}
    moved = 0.0
    for file in sorted((tmp_path / "run" / "checkpoints" / "step-00000003").glob("weights.safetensors")):
        mine, theirs = load_file(file), load_file(two / name / "checkpoints" / "step-00000003" / file.name)
        assert mine.keys() == theirs.keys()
        for key in mine:
            torch.testing.assert_close(mine[key], theirs[key], rtol=0, atol=1e-4)
        moved = max(float(weight.abs().max()) for key, weight in mine.items() if key.startswith("value_head"))
    assert moved > 1e-3  # it started at zero


@pytest.mark.slow
def test_a_mistake_stops_both_processes_with_exit_code_2(two: Path) -> None:
    assert [(two / f"exit-{rank}").read_text() for rank in (0, 1)] == ["2", "2"]
    assert not (two / "never").exists()


@pytest.mark.slow
def test_the_doctor_stops_both_processes_after_the_same_step(two: Path) -> None:
    said = [(two / f"stopped-{rank}").read_text() for rank in (0, 1)]
    assert said[0] == said[1]
    done = latest(two / "stopped")
    assert done is not None
    assert said[0].startswith(f"stopped after {done.step} of 12 steps\nerror filtered-sampling")


@pytest.mark.slow
def test_the_command_line_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("On the table\nMy\n")
    flags = {"data.path": "prompts.txt", "steps": 1, "batch_size": 3, "model.device": "cpu", "run": "here"}
    flags["rewards"] = '[{use = "lowercase"}]'
    arguments = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    done = torchrun("-m", "--", "cavesson", "ppo", *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("1 of 1 done") == 1  # said once, not by every process
    run = cavesson.open(tmp_path / "here")
    assert run.info["processes"] == 2 and run.rows()["sample"].to_pylist() == [0, 1, 2]
    assert (tmp_path / "here" / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_sigterm_ends_both_processes_at_the_same_place(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("On the table\nMy\n")
    slow = (
        "import time\ndef slow(prompts, responses, **_):\n    time.sleep(0.2)\n    return [len(r) for r in responses]\n"
    )
    (tmp_path / "slow.py").write_text(slow)
    flags = {"data.path": "prompts.txt", "steps": 40, "batch_size": 4, "model.device": "cpu", "run": "here"}
    flags |= {"rewards": '[{use = "slow.py:slow"}]', "update.mini_batches": 2, "checkpoint.every": 0}
    arguments = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [*launcher, "-m", "--", "cavesson", "ppo", *arguments],
        cwd=tmp_path,
        stdout=-3,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    # The first step is written at once; the next ones are in a journal.
    while not any(journal.stat().st_size for journal in (tmp_path / "here" / "record").glob(".journal-*")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    (end,) = [line for line in err.splitlines() if "cavesson: interrupted " in line]  # said once, not by every process
    assert end.startswith("cavesson: "), err[-3000:]
    said, way = end.split("; continue with: ")
    assert said.endswith("the checkpoint is complete")
    assert err.count("interrupted: finishing the step, then saving") == 1  # said once, not by every process
    assert not (tmp_path / "here" / "writer.json").exists()
    done = latest(tmp_path / "here")
    assert done is not None and 0 < done.step < 40
    words = shlex.split(way)
    resumed = cli_helpers.cavesson(tmp_path, *words[words.index("ppo") :], "--steps", str(done.step + 2))
    assert resumed.code == 0, resumed.err[-3000:]
    begun = [json.loads(file.read_text()) for file in sorted((tmp_path / "here" / "attempts").iterdir())]
    assert [attempt["start_step"] for attempt in begun] == [0, done.step]
    assert cavesson.open(tmp_path / "here").rows(["step"])["step"].to_pylist()[-1] == done.step + 1


@pytest.mark.slow
def test_a_sharded_run_resumes_with_any_number_of_processes(tmp_path: Path) -> None:
    changes = {"optimizer__schedule": "constant", "optimizer__eps": 1e-3}
    flags = tiny_flags("ppo", tmp_path / "here", **changes, steps=1, parallel__shard="full")
    resume = ("ppo", "--resume", "here", "--steps")
    ended = together(tmp_path, 2, command, "ppo", *flags)
    ended += together(tmp_path, 4, trusting, *resume, "2", "--parallel.offload", "true")
    unsharded = ("--parallel.shard", "none", "--parallel.offload", "false")
    ended += together(tmp_path, 2, command, *resume, "3", *unsharded)
    assert [done.code for done in ended] == [0] * 8, ended
    refused, last = (cli_helpers.cavesson(tmp_path, *resume, "4", *more) for more in (SHARDED, ()))
    assert refused.code == 2 and refused.err.startswith('cavesson: parallel.shard "full" has no effect with')
    assert last.code == 0, last.err[-3000:]
    same_as_alone(tmp_path, 4, **changes)


SHARDED = ("--parallel.shard", "full")


def same_as_alone(folder: Path, steps: int, **changes: Any) -> None:
    """The run `here` is as if one process had done it."""
    tiny_run("ppo", folder / "alone", **changes, steps=steps).run(quiet)
    same_rollouts(cavesson.open(folder / "alone"), cavesson.open(folder / "here"))
    for kind in ("weights", "optimizer"):
        mine, theirs = (saved(folder / run / "checkpoints" / f"step-{steps:08d}", kind) for run in ("alone", "here"))
        assert mine.keys() == theirs.keys()
        for key, tensor in mine.items():
            torch.testing.assert_close(tensor, theirs[key], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_killed_while_it_writes_a_checkpoint_leaves_the_one_before(tmp_path: Path, rank: int) -> None:
    changes = {"optimizer__schedule": "constant", "optimizer__eps": 1e-3}
    flags = tiny_flags("ppo", tmp_path / "here", **changes, steps=3, parallel__shard="full")
    ended = together(tmp_path, 2, killed, rank, "ppo", *flags)
    assert ended[rank].code == -signal.SIGKILL and ended[1 - rank].code
    (unfinished,) = (tmp_path / "here" / "checkpoints").glob(".step-00000002*")
    written = {file.name for file in unfinished.iterdir()}
    assert {f"{kind}-{rank:05d}.safetensors" for kind in ("weights", "optimizer")} <= written
    found = latest(tmp_path / "here")
    assert found is not None and found.step == 1
    resumed = together(tmp_path, 2, command, "ppo", "--resume", "here")
    assert [done.code for done in resumed] == [0, 0], resumed
    assert not unfinished.exists()
    same_as_alone(tmp_path, 3, **changes)


@pytest.mark.slow
def test_two_hosts_shard_within_and_copy_between(tmp_path: Path) -> None:
    flags = tiny_flags("grpo", tmp_path / "here", optimizer__eps=1e-3, batch_size=12, parallel__shard="hybrid")
    ended = together(tmp_path, 4, command, "grpo", *flags, hosts=2)
    assert [done.code for done in ended] == [0] * 4, ended
    written = (tmp_path / "here" / "checkpoints" / "step-00000002").glob("weights*")
    assert {file.name for file in written} == {"weights-00000.safetensors", "weights-00001.safetensors"}
    tiny_run("grpo", tmp_path / "alone", optimizer__eps=1e-3, batch_size=12).run(quiet)
    mine, theirs = (saved(tmp_path / run / "checkpoints" / "step-00000002", "weights") for run in ("alone", "here"))
    for key, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[key], rtol=1e-3, atol=1e-4)


def test_parts_of_a_reward_may_differ_between_processes(tmp_path: Path) -> None:
    ended = together(tmp_path, 2, own_parts, tmp_path / "run")
    assert [done.code for done in ended] == [0, 0], ended
    steps = cavesson.open(tmp_path / "run").steps()
    names = [name for name in steps.column_names if name.startswith("reward/part/")]
    # Three of five responses are of the first process.
    assert {name.removeprefix("reward/part/reward/"): steps[name].to_pylist() for name in names} == {
        "both": [(3 * 1.0 + 2 * 2.0) / 5] * 2, "of 0": [5.0] * 2, "of 1": [5.0] * 2, "a": [0.5] * 2, "b": [0.5] * 2
    }  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shard", ["none", "full"])
def test_a_loss_that_is_no_number_in_one_process_ends_all_alike(tmp_path: Path, shard: str) -> None:
    flags = tiny_flags("ppo", tmp_path / "run", parallel__shard=shard, update__micro_batch_size=1)
    ended = together(tmp_path, 2, not_finite, "ppo", *flags)
    assert [done.code for done in ended] == [2, 2], ended
    assert "cavesson: step 0: the loss is NaN" in ended[0].err and "Traceback" not in ended[0].err
    run = cavesson.open(tmp_path / "run")
    assert run.rows()["step"].unique().to_pylist() == [0] and run.steps().num_rows == 0


def test_there_must_be_something_to_shard_over(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'parallel\.shard "full" has no effect with one process: add --processes N'):
        build(tmp_path / "run", parallel__shard="full")
    assert not (tmp_path / "run").exists()


def test_offloading_needs_a_process_group_for_both_memories(tmp_path: Path) -> None:
    ended = together(tmp_path, 2, older_group)
    assert [done.code for done in ended] == [0, 0], ended


def test_what_cannot_be_sharded_is_one_line(tmp_path: Path) -> None:
    model = {"path": "elsewhere", "lora": LORA, "quantization": "nf4"}
    sharded = {"run": tmp_path / "run", "parallel": {"shard": "full"}}
    PPORun.model_validate({**sharded, "model": model})
    with pytest.raises(ValueError, match=r"int8 weights cannot be sharded; set model\.quantization to"):
        PPORun.model_validate({**sharded, "model": model | {"quantization": "int8"}})
    with pytest.raises(ValueError, match=r"reward model cannot be trained on quantized .*; remove model\.quantization"):
        RewardModelRun.model_validate({**sharded, "model": model})
    with pytest.raises(ValueError, match=r'offload has no effect without shard; set shard to "full" or'):
        settings(tmp_path / "run", parallel__offload=True)


class Alone(Processes):
    """One of several processes, of which only its share is asked; `most` is the most passes that another needs."""

    def __init__(self, rank: int, count: int, sharded: bool = False, most: int = 0) -> None:
        self.rank, self.count, self.most = rank, count, most
        self.mesh = cast(Any, object()) if sharded else None

    def _reduced(self, tensor: Tensor, how: Any) -> Tensor:
        return tensor.clamp_min(self.most)


@given(st.integers(0, 20), st.integers(1, 6), st.integers(0, 5))
def test_sharded_processes_make_the_same_number_of_passes(rows: int, count: int, at_once: int) -> None:
    for sharded in (False, True):
        longest = -(-rows // count)
        most = -(-longest // (at_once or max(1, longest)))
        processes = [Alone(rank, count, sharded, most) for rank in range(count)]
        parts = [one.micro_batches(one.share(rows), at_once) for one in processes]
        assert [row for mine in parts for part in mine for row in part] == list(range(rows))
        assert all(len(part) <= (at_once or rows) for mine in parts for part in mine)
        full = [[part for part in mine if part] for mine in parts]
        assert [mine[: len(real)] for mine, real in zip(parts, full, strict=True)] == full
        assert {len(mine) for mine in parts} == {max(map(len, full))} if sharded else parts == full


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [0, 1, 4, 7])
def test_shares_are_contiguous_complete_and_even(rows: int, count: int) -> None:
    shares = [Alone(rank, count).share(rows) for rank in range(count)]
    assert [row for share in shares for row in share] == list(range(rows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_single_process_gathers_and_combines_nothing() -> None:
    processes = Processes("cpu")
    rollouts = Rollouts(["p"], [0], [0], ["r"], ["eos"], Batch({"x": torch.ones(1)}))
    assert processes.on_main(rollouts) == [rollouts]
    assert processes.combine({"x": 2.0}, sum) == {"x": 2.0}
    assert processes.is_main and list(processes.share(3)) == [0, 1, 2]
