"""What a plan says of vLLM servers, and of settings that it does not predict."""

from pathlib import Path
from typing import Any

import pytest
from check_helpers import run_of

from cavesson.plan.devices import DEVICES
from cavesson.plan.largest import LargestRollouts
from cavesson.plan.limits import limits
from cavesson.plan.prediction import Memory
from cavesson.plan.vllm import FILE_RATE, Servers, servers_of, vllm_times

H100 = DEVICES["h100"]
MEMORY = Memory({"weights": 2 * 10**9, "optimiser": 12 * 10**9}, {"learning": {}}, 0, 10**9, 10**9, {})
LARGEST = LargestRollouts(8, 8, 4, 4, shared=False, prompt=16, response=8, passes=1, single_pass=False)
VLLM = {"sampling__engine": "vllm", "model__dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("changes", "servers"),
    [
        ({}, Servers(1, 1)),
        ({"sampling__vllm": {"devices": [4, 5]}}, Servers(1, 2)),
        ({"sampling__servers": ["http://a:1", "http://b:1", "http://c:1"]}, Servers(3, 1)),
        ({"ray__servers": {"count": 2, "gpus": 4}}, Servers(2, 4)),
        ({"ray__servers": {"count": 2}}, Servers(2, 1)),
    ],
)
def test_the_servers_of_a_run(changes: dict[str, Any], servers: Servers, tmp_path: Path) -> None:
    assert servers_of(run_of("ppo", tmp_path, **VLLM, **changes)) == servers


def test_a_token_is_as_slow_as_reading_the_weights(tmp_path: Path) -> None:
    """2 GB in bfloat16, and a cache of next to nothing; two devices, or two servers with half of the rows each."""
    rate = H100.bandwidth * H100.bandwidth_share

    def moving(**changes: Any) -> float:
        run = run_of("ppo", tmp_path, **VLLM, **changes)
        return vllm_times(run, LARGEST, MEMORY, H100, 1)["decoding"].moving

    assert moving() == pytest.approx(8 * 2e9 / rate, rel=1e-3)
    assert moving(sampling__vllm={"devices": [0, 1]}) == pytest.approx(moving() / 2)
    assert moving(ray__servers={"count": 2}) == pytest.approx(moving(), rel=1e-3)


def test_weights_in_files_are_written_and_read(tmp_path: Path) -> None:
    times = vllm_times(run_of("ppo", tmp_path, **VLLM), LARGEST, MEMORY, H100, 1)
    assert times["weight sync"].sending == 2 * 2e9 / FILE_RATE


def test_weights_over_nccl_take_the_slowest_link(tmp_path: Path) -> None:
    nccl = {"sampling__vllm": {"transfer": "nccl", "devices": [1]}}
    near = vllm_times(run_of("ppo", tmp_path, **VLLM, **nccl), LARGEST, MEMORY, H100, 1)["weight sync"]
    assert near.sending == pytest.approx(2e9 / (0.7 * H100.link))
    far = vllm_times(run_of("ppo", tmp_path, **VLLM, **nccl), LARGEST, MEMORY, H100, 16)["weight sync"]
    assert far.sending == pytest.approx(2e9 / (0.7 * H100.network))
    spread = run_of("ppo", tmp_path, **VLLM, **nccl, parallel__shard="full")  # gathered first
    assert vllm_times(spread, LARGEST, MEMORY, H100, 16)["weight sync"].sending == pytest.approx(2 * far.sending)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (VLLM, "assumed to have one device of this kind besides --gpus"),
        ({**VLLM, "sampling__servers": ["http://a:1"]}, "each of sampling.servers is assumed to have one device"),
        ({**VLLM, "ray__servers": {"count": 2, "gpus": 4}}, "ray.servers takes 8 devices besides --gpus"),
        ({**VLLM, "sampling__vllm": {"devices": [0, 1], "sleep": True}}, "the server has 1.0 GB of weights"),
        ({"parallel__shard": "full", "parallel__offload": True}, "parallel.offload keeps 14.0 GB of this memory"),
    ],
)
def test_what_is_not_predicted_has_a_line(changes: dict[str, Any], line: str, tmp_path: Path) -> None:
    (seen,) = limits(run_of("ppo", tmp_path, **changes), MEMORY)
    assert line in seen


def test_what_is_predicted_has_no_line(tmp_path: Path) -> None:
    assert not list(limits(run_of("ppo", tmp_path), MEMORY))
    assert not list(limits(run_of("ppo", tmp_path, **VLLM, sampling__vllm={"devices": [1]}), MEMORY))
