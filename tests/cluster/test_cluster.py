"""What `--ray` does without a cluster; tests/engines/test_ray.py has the rest."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cavesson import cli
from cavesson.algorithms.grpo import GRPORun
from cavesson.algorithms.sft import SFTRun
from cavesson.cli.launch import is_ray_launcher
from cavesson.cluster.coordinator import Coordinator, Ending
from cavesson.cluster.launcher import _failure
from cavesson.cluster.rewards import joined, split
from cavesson.command_line import ON_RAY
from cavesson.config import check
from cavesson.errors import LOST_PROCESS, UserCodeError, UserError
from cavesson.rollout.rewards.answers import Part
from cavesson.train.run import Training

sys.path.append(str(Path(__file__).parents[1] / "train"))
from several_helpers import together

RECIPE = """
[data]
path = "prompts.txt"
[[rewards]]
use = "lowercase"
[ray.learners]
count = 4
[ray.reward_workers]
count = 2
"""


@pytest.mark.parametrize(
    ("kind", "ray", "said"),
    [
        (GRPORun, {"servers": {"count": 2}}, "ray.servers has no effect unless the run starts vLLM servers"),
        (GRPORun, {"reward_workers": {"cpus": 2}}, "cpus has no effect without workers; set count"),
        (GRPORun, {"address": "ray://host:10001"}, 'give HOST:PORT or "auto"'),
        (GRPORun, {"learners": {"count": 0}}, "greater than or equal to 1"),
        (GRPORun, {"learners": {"resources": {"sandbox": 0}}}, "greater than 0"),
        (SFTRun, {"reward_workers": {"count": 2}}, "unknown setting"),
    ],
)
def test_settings_that_have_no_effect_are_refused(kind: Any, ray: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check(kind, {"ray": ray}, "recipe.toml")


def test_servers_on_cpus_beside_training_on_gpus_are_refused() -> None:
    recipe = {"sampling": {"engine": "vllm"}, "ray": {"learners": {"gpus": 1}}}
    with pytest.raises(UserError, match=r"ray.servers.gpus 0 would run vLLM on CPUs while training has GPUs"):
        check(GRPORun, recipe, "recipe.toml")
    recipe["ray"]["servers"] = {"gpus": 1}
    check(GRPORun, recipe, "recipe.toml")


def test_a_recipe_for_a_cluster_is_one_for_a_laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_ray_launcher(False, 1, [])
    monkeypatch.delenv("RANK", raising=False)
    assert is_ray_launcher(True, 1, ["--ray.learners.count=4"])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "cavesson-1-ray")
    assert not is_ray_launcher(True, 1, [])


@pytest.mark.parametrize(
    ("ray", "processes", "flags", "said"),
    [
        (False, 1, ["--steps=3", "--ray.learners.count=4"], "--ray.learners.count has no effect without --ray"),
        (False, 1, ["--sft.ray.failures=1"], "--sft.ray.failures has no effect without --ray"),  # of `align`
        (True, 2, [], "--processes has no effect with --ray; set ray.learners.count"),
    ],
)
def test_flags_that_have_no_effect_are_refused(ray: bool, processes: int, flags: Sequence[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        is_ray_launcher(ray, processes, flags)


def error_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What `grpo --ray` says on a machine without Ray."""
    (tmp_path / "prompts.txt").write_text("My\n")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(ON_RAY, "")  # so that it is unset afterwards
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(sys, "argv", ["cavesson", "grpo", "recipe.toml", "--ray", *flags])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert not (tmp_path / "runs").exists()
    return capsys.readouterr().err


def test_without_ray_the_message_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = error_of(tmp_path, monkeypatch, capsys)
    assert said == "cavesson: --ray needs Ray; install it with: pip install 'cavesson[ray]'\n"


def test_sleep_mode_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--sampling.engine", "vllm", "--sampling.vllm.devices", "[0]", "--sampling.vllm.sleep", "true"]
    said = error_of(tmp_path, monkeypatch, capsys, *flags)
    assert said == "cavesson: sampling.vllm.sleep has no effect with --ray, where servers have GPUs of their own\n"


def starting_servers(fails: bool) -> None:
    """Begin to train in a process whose servers, which only the first of all asks for, start or fail."""
    asked: list[str] = []

    def start_servers(*_: Any) -> tuple[tuple[str, str], ...]:
        asked.append(os.environ["RANK"])
        if fails:
            raise UserError("no node had room for 1 of 1 vLLM servers")
        return (("http://127.0.0.1:1", "a key"),)

    servers: Any = ModuleType("cavesson.cluster.servers")  # the real one needs Ray
    servers.start_servers = start_servers
    sys.modules["cavesson.cluster.servers"] = servers
    os.environ[ON_RAY] = "here"
    values = {
        "run": "run", "batch_size": 2, "samples_per_prompt": 2, "model": {"device": "cpu", "lora": {"rank": 4}},
        "sampling": {"engine": "vllm"}, "checkpoint": {"every": 0},
    }  # fmt: skip
    try:
        training = Training(
            GRPORun.model_validate(values), prompts=["My"], rewards=lambda _, texts, **columns: [0.0] * len(texts)
        )
    except UserError as error:
        print(f"{asked}: {error}")
    else:
        (server,) = training.trainer.batches.collector.sampler.client.servers  # type: ignore[attr-defined]
        print(f"{asked}: {server.url}")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("fails", "said"), [(False, "http://127.0.0.1:1"), (True, "no node had room for 1 of 1 vLLM servers")]
)
def test_servers_start_or_fail_for_all_processes(tmp_path: Path, fails: bool, said: str) -> None:
    done = together(tmp_path, 2, starting_servers, fails)
    assert [one.out for one in done] == [f"['0']: {said}\n", f"[]: {said}\n"], done


@pytest.mark.parametrize("rows", range(8))
def test_every_row_goes_to_one_worker(rows: int) -> None:
    for workers in (1, 2, 3, 5):
        parts = split(rows, workers)
        assert [row for part in parts for row in part] == list(range(rows))
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1 and 1 <= len(parts) <= workers
        assert rows == 0 or min(sizes) > 0


def test_answers_are_joined_in_the_order_of_the_rows() -> None:
    first, second = Part([1.0, None], [None, "off topic"]), Part([3.0], ["right"])
    assert joined("mine", [{"mine": first}, {"mine": second}]) == {
        "mine": Part([1.0, None, 3.0], [None, "off topic", "right"])
    }
    with pytest.raises(UserCodeError, match="the reward mine must return the same parts for all responses"):
        joined("mine", [{"mine/a": second}, {"mine/b": second}])


def test_the_cause_of_a_loss_is_named_not_what_follows_from_it() -> None:
    coordinator = Coordinator(2, failures=1)
    for rank in range(2):
        assert not coordinator.begin(rank, f"10.0.0.{rank}").is_restart
    coordinator.restart({0: f"process 0 of 2 ended: {LOST_PROCESS}", 1: None})
    lost = "process 1 of 2 (counted from 0) on node 10.0.0.1 was lost: its node, or Ray's worker on it, died"
    again = "the run restarts from its latest checkpoint (restart 1 of at most 1)"
    assert coordinator.updates() == ([(2, f"cavesson: {lost}; {again}")], True)
    assert coordinator.begin(0, "10.0.0.0").is_restart and not coordinator.updates().is_waiting
    coordinator.restart({0: f"process 0 of 2 ended: {LOST_PROCESS}"})
    assert coordinator.updates().lines == []  # there is no other restart: the launcher says it
    assert coordinator.outcome() == ({}, f"process 0 of 2 ended: {LOST_PROCESS}")


LOST = Ending(LOST_PROCESS, 2, False)
WRONG, STOPPED = Ending("the reward is wrong", 2, False), Ending("interrupted", 130, False)
HANGS = Ending("process 1 of 2 has made no progress", 2, True)


@pytest.mark.parametrize(
    ("endings", "expected"),
    [
        ({0: WRONG, 1: LOST}, 2),  # the first process has printed it
        ({1: STOPPED, 0: STOPPED}, 130),
        ({0: LOST, 1: WRONG}, "process 1 of 2 (counted from 0) ended: the reward is wrong"),
        ({0: LOST, 1: HANGS}, HANGS.line),
        ({0: WRONG, 1: HANGS}, HANGS.line),
        ({0: HANGS, 1: LOST}, 2),
    ],
)
def test_the_ending_that_explains_the_others_is_told(endings: dict[int, Ending], expected: int | str) -> None:
    error = _failure(endings, 2)
    assert (error.code if isinstance(error, SystemExit) else str(error)) == expected
