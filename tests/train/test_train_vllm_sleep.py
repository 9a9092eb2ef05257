"""A vLLM server on the GPUs of training: it sleeps except while it samples, and gets its weights after it wakes."""

import shlex
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import vllm_stand_in
from train_helpers import LORA, PROMPTS, settings, uneven

import cavesson
from cavesson.algorithms.grpo import GRPORun
from cavesson.config import load
from cavesson.errors import UserError
from cavesson.train.run import Training


@pytest.fixture
def python(tmp_path: Path) -> str:
    """A Python whose vLLM is the stand-in; the arguments of its server are written into a file."""
    python, arguments = tmp_path / "python", tmp_path / "arguments"
    words = shlex.join([sys.executable, vllm_stand_in.__file__])
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit 0\necho "$@" > {arguments}\nexec {words} "$@"\n')
    python.chmod(0o755)
    return str(python)


def state(training: Training) -> dict[str, Any]:
    """What the server says of itself."""
    client = training.trainer.batches.collector.sampler.client  # type: ignore[attr-defined]
    server = client.servers[0]
    # Without the key of its run, the server answers nothing else.
    assert httpx.post(f"{server.url}/wake_up").status_code == 401
    key = server.headers["Authorization"].removeprefix("Bearer ")
    assert len(key) >= 32 and not any(key in line for line in command_lines())
    return httpx.get(f"{server.url}/health").json()  # type: ignore[no-any-return]


def command_lines() -> list[str]:
    """The command lines of all processes, as other users of the machine see them."""
    return [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]


@pytest.mark.slow
@pytest.mark.parametrize(("lora", "level"), [(None, 2), (LORA, 1)], ids=["all weights", "adapters"])
def test_the_server_sleeps_while_the_policy_learns(
    python: str, untied_folder: Path, tmp_path: Path, lora: Any, level: int
) -> None:
    """A server that sleeps refuses requests, and at level 2 it forgets its weights."""
    seen: list[dict[str, Any]] = []

    def watching(prompts: list[str], responses: list[str], **columns: Any) -> list[float]:
        if runs:
            seen.append(state(runs[0]))
        return uneven(prompts, responses)

    runs: list[Training] = []
    flags = {"sampling__vllm__python": python, "sampling__vllm__sleep": True, "sampling__vllm__devices": [0]}
    given = settings(
        tmp_path / "run", sampling__engine="vllm", model__path=str(untied_folder), model__lora=lora, steps=3,
        optimizer__learning_rate=1e-2, checkpoint__every=0, **flags,
    )  # fmt: skip
    runs.append(Training(given, prompts=PROMPTS, rewards=watching))
    runs[0].run(lambda step, metrics: seen.append(state(runs[0])))
    assert "--enable-sleep-mode" in (tmp_path / "arguments").read_text().split()
    assert [one["asleep"] for one in seen] == [level] * 6  # when rewards are called, and after every step
    paths = seen[-1]["paths"]
    renewed = "/v1/load_lora_adapter" if lora else "/collective_rpc"
    order = [path for path in paths if path in ("/sleep", "/wake_up", renewed)]
    assert order == [renewed, "/sleep", *["/wake_up", renewed, "/sleep"] * 2]
    rows = cavesson.open(tmp_path / "run").rows(["step", "sample"])
    assert len(rows) == 18


@pytest.mark.slow
def test_a_step_with_several_batches_wakes_the_server_for_each(
    python: str, untied_folder: Path, tmp_path: Path
) -> None:
    def same(prompts: list[str], responses: list[str], **columns: Any) -> list[float]:
        return [0.5] * len(responses)

    values = {
        "run": tmp_path / "run", "steps": 1, "batch_size": 6, "samples_per_prompt": 3, "checkpoint": {"every": 0},
        "model": {"path": str(untied_folder), "device": "cpu"}, "grpo": {"resample": 2},
        "sampling": {
            "engine": "vllm", "max_new_tokens": 4, "vllm": {"python": python, "sleep": True, "devices": [0]}
        },
    }  # fmt: skip
    training = Training(GRPORun.model_validate(values), prompts=PROMPTS, rewards=same)
    seen: list[dict[str, Any]] = []
    training.run(lambda step, metrics: seen.append(state(training)))
    batches = training.settings.algorithm.max_batches  # type: ignore[union-attr]
    assert batches > 1
    assert seen[0]["paths"].count("/collective_rpc") == batches  # its weights were lost, although they are not new
    assert seen[0]["paths"].count("/sleep") == batches and seen[0]["paths"].count("/wake_up") == batches - 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--sampling.vllm.sleep", "true"], "sleep has no effect without devices"),
        (
            ["--sampling.vllm.sleep", "true", "--sampling.vllm.devices", "[0]", "--sampling.max_staleness", "1"],
            "vllm.sleep cannot be combined with max_staleness",
        ),
        (
            ["--sampling.vllm.sleep", "true", "--sampling.vllm.devices", "[0]", "--sampling.servers", '["http://a:1"]'],
            "vllm.sleep has no effect with servers",
        ),
    ],
)
def test_sleep_that_makes_no_sense(flags: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load(GRPORun, None, ["--sampling.engine", "vllm", *flags])
