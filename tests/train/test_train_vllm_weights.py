"""All weights that go to vLLM servers over a group: a TCP store takes NCCL's place, a stand-in vLLM's."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from other_device import other_device
from safetensors.torch import load_file
from several_helpers import together
from store_group import PATIENCE, StoreGroup
from train_helpers import PROMPTS, quiet, settings, uneven
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM
from vllm_stand_in import ROUNDING, StandIn, serving

import cavesson
from cavesson.algorithms.grpo import GRPORun
from cavesson.config import load
from cavesson.errors import ServerError, UserError
from cavesson.models.parts import untied
from cavesson.models.tiny import tiny_model
from cavesson.processes import Processes
from cavesson.rollout.engines import vllm_weights
from cavesson.rollout.engines.nccl import unavailable
from cavesson.rollout.engines.settings import VllmSettings
from cavesson.rollout.engines.vllm_client import VllmClient
from cavesson.rollout.engines.vllm_weights import NcclGroup, WeightTransfer
from cavesson.train import build
from cavesson.train.loop import Report
from cavesson.train.run import Training


@pytest.fixture(autouse=True)
def no_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (vllm_weights, build):
        monkeypatch.setattr(module, "NcclGroup", StoreGroup)


@pytest.fixture
def other(untied_folder: Path) -> Iterator[StandIn]:
    with serving(untied_folder) as one:
        yield one


def trained(servers: list[StandIn], folder: Path, report: Report = quiet, **changes: Any) -> Training:
    flags = {"sampling__engine": "vllm", "sampling__servers": [one.url for one in servers], "checkpoint__every": 0}
    flags |= {"sampling__vllm__transfer": "nccl", "model__path": str(servers[0].folder), "steps": 3}
    given = settings(folder, optimizer__learning_rate=1e-2, **flags, **changes)
    training = Training(given, prompts=PROMPTS, rewards=uneven)
    training.run(report)
    return training


def test_each_step_samples_from_the_weights_of_the_step(server: StandIn, other: StandIn, tmp_path: Path) -> None:
    """Two servers, of which one has two workers; all workers get the same, bit for bit."""
    other.workers = 2
    held: list[dict[str, torch.Tensor]] = []

    def report(step: int, metrics: dict[str, float]) -> None:
        held.extend(received.copy() for one in (server, other) for received in one.latest)

    trained([server, other], tmp_path / "run", report)
    record = cavesson.open(tmp_path / "run")
    for step in range(3):
        tokens = record.tokens(step)
        np.testing.assert_allclose(tokens["logprob"].to_numpy(), tokens["sampler_logprob"].to_numpy(), atol=ROUNDING)
        first, second, third = held[3 * step : 3 * step + 3]
        assert all(torch.equal(first[name], again[name]) for again in (second, third) for name in first)
    assert not torch.equal(held[0]["lm_head.weight"], held[3]["lm_head.weight"])
    start: Any = AutoModelForCausalLM.from_pretrained(server.folder)
    assert held[0].keys() == start.state_dict().keys()
    assert all(torch.equal(held[0][name], weight) for name, weight in start.state_dict().items())
    told = [path for path in server.paths if path != "/resume"]
    update = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    update += ["/reset_prefix_cache", "/update_weight_version"]
    assert told == ["/shutdown_weight_transfer_engine", "/init_weight_transfer_engine", *update * 3]
    assert not (tmp_path / "run" / "sampling").exists()


def test_servers_pause_for_the_weights_while_they_sample(server: StandIn, tmp_path: Path) -> None:
    trained([server], tmp_path / "run", sampling__max_staleness=1)
    started = [at for at, path in enumerate(server.paths) if path == "/start_weight_update"]
    assert len(started) == 3
    for at in started[1:]:
        assert server.paths[at - 1] == "/pause" and server.paths[at + 5] == "/resume"


@pytest.mark.slow
def test_weights_are_sent_from_the_device_of_the_policy(server: StandIn, tmp_path: Path) -> None:
    with other_device() as device:
        trained([server], tmp_path / "run", model__device=str(device))
    assert server.version != "default"


def sharded(urls: list[str], folder: Path, dtype: str, shard: str) -> None:
    vllm_weights.NcclGroup = build.NcclGroup = StoreGroup  # type: ignore[assignment,misc]
    flags = {"sampling__engine": "vllm", "sampling__servers": urls, "model__path": str(folder), "steps": 2}
    flags |= {"model__dtype": dtype, "parallel__shard": shard, "checkpoint__every": 0}
    given = settings(Path("run"), optimizer__learning_rate=1e-2, sampling__vllm__transfer="nccl", **flags)
    training = Training(given, prompts=PROMPTS, rewards=uneven)
    training.run(quiet)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "shard"), [("float32", "full"), ("bfloat16", "full"), ("float32", "none")])
def test_two_processes_send_the_weights_of_one(server: StandIn, tmp_path: Path, dtype: str, shard: str) -> None:
    for done in together(tmp_path, 2, sharded, [server.url], server.folder, dtype, shard):
        assert done.code == 0, done.err
    assert {str(weight.dtype) for weight in server.latest[0].values()} == {f"torch.{dtype}"}
    tokens = cavesson.open(tmp_path / "run").tokens(1)
    rounding = ROUNDING if dtype == "float32" else 0.1
    np.testing.assert_allclose(tokens["logprob"].to_numpy(), tokens["sampler_logprob"].to_numpy(), atol=rounding)


FAILURES = {
    "/get_world_size": "instead of its number of workers",
    "/init_weight_transfer_engine": r"NCCL cannot connect to the vLLM servers: .* start them with --weight-transfer",
    "/start_weight_update": "answered 400 Bad Request",
    "/update_weights": "answered 400 Bad Request",
    "half-way": r"answered 500 Internal Server Error \(1 attempts\)",
    "/finish_weight_update": "answered 400 Bad Request",
}


@pytest.mark.parametrize(("path", "said"), FAILURES.items(), ids=FAILURES)
def test_a_server_that_fails_ends_the_run_although_another_waits(
    server: StandIn, other: StandIn, tmp_path: Path, path: str, said: str
) -> None:
    other.broken, other.stops_after = {path}, 3 if path == "half-way" else other.stops_after
    start = time.monotonic()
    with pytest.raises(ServerError, match=said) as raised:
        trained([server, other], tmp_path / "run")
    assert time.monotonic() - start < PATIENCE / 2
    assert other.url in str(raised.value) and len(str(raised.value).splitlines()) == 1


def test_a_server_that_fails_ends_all_processes(server: StandIn, tmp_path: Path) -> None:
    server.stops_after = 3
    start = time.monotonic()
    for done in together(tmp_path, 2, sharded, [server.url], server.folder, "float32", "full"):
        assert done.code == 1 and f"ServerError: the vLLM server at {server.url} answered 500" in done.err, done.err
    assert time.monotonic() - start < PATIENCE


def test_a_run_that_was_killed_while_it_sent_weights_leaves_a_server_to_restart(
    server: StandIn, tmp_path: Path
) -> None:
    server.received = [{}]
    with pytest.raises(ServerError, match=r"400 Bad Request.*; restart it if a run was killed while it sent weights"):
        trained([server], tmp_path / "run")


@pytest.mark.slow
def test_a_failed_start_leaves_no_server_paused(server: StandIn, other: StandIn, tmp_path: Path) -> None:
    def fail(step: int, metrics: dict[str, float]) -> None:
        other.broken = {"/start_weight_update"}

    with pytest.raises(ServerError, match=r"400 Bad Request"):
        trained([server, other], tmp_path / "run", fail, sampling__max_staleness=1)
    assert "/pause" in other.paths and not other.paused


def test_a_server_that_keeps_its_weights_is_noticed(server: StandIn, tmp_path: Path) -> None:
    server.deaf = True
    with pytest.raises(ServerError, match="has other weights than the policy"):
        trained([server], tmp_path / "run")


def mixtral() -> MixtralForCausalLM:
    """In memory, all experts of a layer are one tensor; in checkpoints, each has its own."""
    config = MixtralConfig(
        vocab_size=50, hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4,
    )  # fmt: skip
    return MixtralForCausalLM(config)


class Collecting:
    """A server, and the group to it."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.told: list[dict[str, Any]] = []
        self.servers = [self]

    def begin_weights(self, while_sampling: bool) -> None:
        pass

    def each(self, path: str, contents: list[dict[str, Any]]) -> None:
        self.told += contents

    def broadcast(self, tensor: torch.Tensor) -> None:
        self.sent.append(tensor)

    def is_idle(self) -> bool:
        return True


@pytest.mark.parametrize("model", [tiny_model, mixtral])
def test_what_is_sent_is_what_a_checkpoint_contains(tmp_path: Path, model: Any) -> None:
    ours, ends = model(), Collecting()
    with untied(ours):
        ours.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    client: Any = ends
    transfer = WeightTransfer(ours, None, Processes("cpu"), client)
    transfer._group = client
    transfer.begin(while_sampling=False)
    transfer.stream()
    (told,) = (content["update_info"] for content in ends.told)
    sent = dict(zip(told["names"], ends.sent, strict=True))
    assert sent.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(sent[name], weight)
    assert told["shapes"] == [list(weight.shape) for weight in ends.sent]
    assert set(told["dtype_names"]) == {"float32"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model.lora", "{}"], "sampling.vllm.transfer has no effect with model.lora"),
        (
            ["--sampling.vllm.sleep", "true", "--sampling.vllm.devices", "[0]"],
            'transfer "nccl" cannot be combined with sleep',
        ),
    ],
)
def test_settings_that_make_no_sense_together(flags: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load(GRPORun, None, ["--sampling.engine", "vllm", "--sampling.vllm.transfer", "nccl", *flags])


def without_nccl() -> AbstractContextManager[object]:
    """Where PyTorch is built for CPUs, what is right is refused for this reason at last."""
    return pytest.raises(UserError, match="needs a PyTorch with NCCL") if unavailable() else nullcontext()


def test_nccl_needs_a_gpu_that_no_server_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r'transfer "nccl" .* but the policy is on cpu; use "files"'):
        NcclGroup.check(torch.device("cpu"), [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with without_nccl():
        NcclGroup.check(torch.device("cuda", 0), [1, 2])
    with pytest.raises(UserError, match="GPU 1 trains and is one of"):
        NcclGroup.check(torch.device("cuda", 1), [1, 2])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    with without_nccl():
        NcclGroup.check(torch.device("cuda", 1), [1, 2])
    with pytest.raises(UserError, match="GPU 2 trains and is one of"):
        NcclGroup.check(torch.device("cuda", 0), [1, 2])


def test_the_policy_of_a_run_must_be_on_a_gpu(
    untied_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "NcclGroup", NcclGroup)
    flags = {"sampling__engine": "vllm", "sampling__vllm__transfer": "nccl", "model__path": str(untied_folder)}
    given = settings(tmp_path / "run", **flags)
    with pytest.raises(UserError, match="the policy is on cpu"):
        Training(given, prompts=PROMPTS, rewards=uneven)


def test_a_server_says_how_many_workers_it_has(server: StandIn) -> None:
    server.workers = 3
    assert VllmClient([server.url] * 2, VllmSettings()).world_sizes() == [3, 3]
