"""All weights that go to a real vLLM server over a group: vLLM's own code for NCCL, except for NCCL itself.

vLLM loads plugins; one of them puts `store_group.py` in the place of its NCCL communicator. Everything else is what a
server on GPUs does.
"""

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import store_group
import torch
from store_group import PATIENCE, StoreGroup
from test_vllm import LENGTH, PROMPTS, PYTHON, ROUNDING, lowercase, model, prompts

sys.path.append(str(Path(__file__).parents[1] / "train"))
from several_helpers import together

import cavesson
from cavesson.algorithms.grpo import GRPORun
from cavesson.algorithms.ppo import PPORun
from cavesson.errors import ServerError
from cavesson.models.load import prepare
from cavesson.models.policy import Policy
from cavesson.models.tiny import tiny_tokenizer
from cavesson.processes import Processes
from cavesson.rollout.engines import vllm_weights
from cavesson.rollout.engines.settings import SamplingSettings, VllmSettings
from cavesson.rollout.engines.vllm import VllmSampler
from cavesson.rollout.engines.vllm_client import VllmClient
from cavesson.rollout.engines.vllm_server import VllmServer, saved_model
from cavesson.train import build
from cavesson.train.run import Training

pytestmark = [
    pytest.mark.slow,  # starts its own server; the quick tests of test_vllm.py send weights as files
    pytest.mark.skipif(not PYTHON, reason="needs vLLM in a separate environment: make test-engines"),
    pytest.mark.timeout(900),
]
PLUGIN = """
import torch
from store_group import StoreGroup

def register():
    from vllm.distributed.weight_transfer import nccl_common

    nccl_common.uid_init_process_group = lambda identity, rank, size, device: StoreGroup(identity, size, device, rank)
    torch.cuda.current_stream = lambda device=None: None  # a CPU has no streams,
    torch.accelerator.current_device_index = lambda: 0  # and no number
"""
STEPS = 20


@pytest.fixture(scope="module", autouse=True)
def no_nccl() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (vllm_weights, build):
            patch.setattr(module, "NcclGroup", StoreGroup)
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # by default, a server on a CPU takes most of the memory
        yield


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python that has vLLM, with the plugin."""
    place = tmp_path_factory.mktemp("plugin")
    shutil.copy(store_group.__file__, place)
    (place / "store_plugin.py").write_text(PLUGIN)
    about = place / "store_plugin-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: store-plugin\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nstore = store_plugin:register\n")
    python = place / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={place} exec {PYTHON} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(python: Path) -> Iterator[VllmServer]:
    place = saved_model(model(), tiny_tokenizer(), is_trained=True)
    settings = VllmSettings(python=str(python), transfer="nccl", arguments=("--enforce-eager",))
    server = VllmServer(place, settings, "float32", LENGTH, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", server.key)  # which those who sample from a running server set
        yield server
    server.close()


def sampler(server: VllmServer, folder: Path) -> VllmSampler:
    """An engine whose server does not have its weights yet."""
    policy = Policy(prepare(model()))
    settings = SamplingSettings(
        engine="vllm", servers=(server.url,), vllm=VllmSettings(transfer="nccl"), max_new_tokens=20
    )
    return VllmSampler(policy, tiny_tokenizer(), settings, 0, Processes("cpu"), None, LENGTH, folder)


def test_a_server_gets_the_weights_of_the_policy(server: VllmServer, tmp_path: Path) -> None:
    """After each of several changes, in which every weight has its own part."""
    engine = sampler(server, tmp_path / "weights")
    torch.manual_seed(1)
    for step in range(3):
        with torch.no_grad():
            for parameter in engine.policy.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.05)
        engine.update_weights(step)
        responses = engine.sample(prompts(16), step, range(16))
        batch = prompts(16).with_columns(
            response_ids=responses.response_ids, attended=responses.mask, learned=responses.mask
        )
        with torch.no_grad():
            expected = engine.policy(batch).logprob
        mask = responses.mask > 0
        np.testing.assert_allclose(responses.sampler_logprob[mask], expected[mask], atol=ROUNDING)
    assert not (tmp_path / "weights").exists()
    engine.close()


def values(server: VllmServer, folder: Path, staleness: int = 0, **changes: Any) -> dict[str, Any]:
    """A run that gives a server new weights at each step."""
    return {
        "steps": STEPS, "batch_size": 48, "samples_per_prompt": 4, "kl": {"coef": 0.0},
        "model": {"path": str(folder), "device": "cpu"}, "checkpoint": {"every": 0},
        "sampling": {
            "max_new_tokens": 12, "engine": "vllm", "servers": [server.url], "max_staleness": staleness,
            "vllm": {"transfer": "nccl"},
        },
        "optimizer": {"learning_rate": 5e-3, "schedule": "constant"}, **changes,
    }  # fmt: skip


def check_sampled_from_the_policy(folder: Path, steps: int) -> None:
    record = cavesson.open(folder)
    for step in range(steps):
        tokens = record.tokens(step)
        np.testing.assert_allclose(tokens["logprob"].to_numpy(), tokens["sampler_logprob"].to_numpy(), atol=ROUNDING)


@pytest.mark.parametrize(("kind", "staleness"), [(PPORun, 0), (GRPORun, 0), (GRPORun, 1)])
def test_a_policy_learns(server: VllmServer, folder: Path, tmp_path: Path, kind: Any, staleness: int) -> None:
    given = kind.model_validate(values(server, folder, staleness, run=tmp_path / "run"))
    result = Training(given, prompts=PROMPTS, rewards=lowercase).run(lambda step, metrics: None)
    rewards = [metrics["reward/mean"] for metrics in result.metrics]
    # The reward of a step, a share of about 576 characters, has a standard error below √(0.25 / 576) ≈ 0.02.
    assert np.mean(rewards[-4:]) > np.mean(rewards[:2]) + 0.15, rewards
    check_sampled_from_the_policy(tmp_path / "run", 1 if staleness else STEPS)


def one_of_two(given: dict[str, Any]) -> None:
    vllm_weights.NcclGroup = build.NcclGroup = StoreGroup  # type: ignore[assignment,misc]
    Training(PPORun.model_validate(given), prompts=PROMPTS, rewards=lowercase).run(lambda step, metrics: None)


@pytest.mark.parametrize("shard", ["full", "none"])
def test_two_processes_send_the_weights(server: VllmServer, folder: Path, tmp_path: Path, shard: str) -> None:
    given = values(server, folder, parallel={"shard": shard}, run=tmp_path / "run", steps=3)
    for done in together(tmp_path, 2, one_of_two, given):
        assert done.code == 0, done.err
    check_sampled_from_the_policy(tmp_path / "run", 3)


def test_weights_that_a_server_does_not_know_end_the_run(
    server: VllmServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server fails while it receives; another run can use it."""
    begin = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(
            vllm_weights, "revert_weight_conversion", lambda model, one: {f"no.{n}": w for n, w in one.items()}
        )
        with pytest.raises(ServerError, match="answered 500 Internal Server Error"):
            sampler(server, tmp_path / "weights").update_weights(0)
    assert time.monotonic() - begin < PATIENCE / 2
    sampler(server, tmp_path / "weights").update_weights(0)


def test_a_server_that_expects_the_rest_of_the_weights_must_be_restarted(server: VllmServer, tmp_path: Path) -> None:
    """As after a run that was killed; this one finishes the update instead."""
    client = VllmClient([server.url], VllmSettings())
    client.begin_weights(while_sampling=False)
    with pytest.raises(ServerError, match=r"500 Internal Server Error.*; restart it"):
        sampler(server, tmp_path / "weights").update_weights(0)
    client.finish_weights("as before", while_sampling=False)
    sampler(server, tmp_path / "weights").update_weights(0)
