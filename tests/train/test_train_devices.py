"""Training on a device that is not the CPU: no tensor of the one meets one of the other."""

import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from other_device import Elsewhere, other_device
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from train_helpers import LORA, OFFLINE, ONLINE, PROMPTS, everything, quiet, settings, timeless, tiny_run, uneven
from vllm_stand_in import StandIn

import cavesson
from cavesson.errors import UserError
from cavesson.models.policy import Policy
from cavesson.processes import Processes, _check_gpus
from cavesson.train.run import Training
from cavesson.train.update import Gradient

LOW = {"model__dtype": "bfloat16", "model__lora__rank": 4, "model__gradient_checkpointing": True}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in (*OFFLINE, *ONLINE)},
    "ppo, adapters in bfloat16": ("ppo", LOW),
    "ppo, all weights in bfloat16": ("ppo", {"model__dtype": "bfloat16", "value__kind": "separate"}),
    "ppo, full KL": ("ppo", {"kl__estimator": "full", "sampling__top_p": 0.9, "sampling__min_new_tokens": 1}),
    "grpo in one pass": ("grpo", {"update__epochs": 1, "update__mini_batches": 1, "grpo__resample": 2}),
    "sft with noise": ("sft", {"sft__neftune_alpha": 5.0, "update__layout": "padded"}),
}


def test_tensors_of_both_devices_may_not_meet() -> None:
    with other_device() as device:
        there, here = torch.ones(3, device=device), torch.ones(3)
        assert (there + there).device == device and (there + there).cpu().equal(here + here)
        assert (there + torch.tensor(1.0)).device == device  # a GPU, too, takes single numbers from the CPU
        with pytest.raises(RuntimeError, match="on lazy:0 and on cpu"):
            there + here


@pytest.mark.sampled(1)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_is_the_same_on_another_device(tmp_path: Path, variant: str) -> None:
    """But for rounding: the CPU multiplies float32 matrices with another library."""
    name, changes = VARIANTS[variant]
    with other_device() as device:
        tiny_run(name, tmp_path / "there", model__device=str(device), **changes).run(quiet)
    if "bfloat16" in variant:  # where rounding changes the responses
        return
    tiny_run(name, tmp_path / "here", **changes).run(quiet)
    there, here = (numbers(tmp_path / place) for place in ("there", "here"))
    assert there == [pytest.approx(one, rel=1e-2, abs=1e-2) for one in here]


class Waits(TorchDispatchMode):
    """Counts operations that wait until the device has computed everything."""

    NAMES = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, there = func.name().split(".")[0], [x for x in tree_leaves(args) if isinstance(x, Elsewhere)]
        masks = name.startswith("aten::index") and any(x.dtype == torch.bool for x in there[1:])
        reads = name == "aten::_to_copy" and str((kwargs or {}).get("device")) == "cpu"
        ours = not any("transformers" in frame.filename for frame in traceback.extract_stack(limit=12))
        if there and ours and (name in self.NAMES or masks or reads):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["grpo", "ppo", "sft", "dpo", "reward-model"])
def test_micro_batches_follow_each_other_without_waiting(tmp_path: Path, name: str) -> None:
    """On a GPU, Python must be ahead of the kernels. transformers itself looks at the mask of a padded pass."""
    with other_device() as device:
        training = tiny_run(name, tmp_path / "run", model__device=str(device), update__micro_batch_size=2)
        learner, waits = training.trainer.learner, Waits()
        if isinstance(learner.model, Policy):
            learner.model.shares_prompts = False  # as on a GPU
        rows = range(6)
        if name in OFFLINE:
            batch = training.trainer._batch(training.trainer.examples.train.take(0, 6), 0)
            batch = batch.with_columns(chosen_reference=torch.zeros(6), rejected_reference=torch.zeros(6))
        else:
            seen = training.trainer.batches.take(0, 0, training.trainer.clock(0))
            columns = ("logprob", "ref_logprob", "advantage", "value", "return")
            empty = {one: torch.zeros_like(seen["learned"]) for one in columns}
            batch = seen.batch.with_columns(**empty, kl_coef=torch.ones(6))
        with waits:
            gradient = Gradient(learner, batch, rows)
            for loss in gradient.losses(training.settings.update):
                learner.optimizer.backward(loss)
        assert waits.seen == []
        assert gradient.metrics(0)["optim/weight"] > 0
        training.trainer.close()


def numbers(folder: Path) -> list[dict[str, float]]:
    return [
        {name: value for name, value in timeless(row).items() if value is not None}
        for row in cavesson.open(folder).steps().to_pylist()
    ]


@pytest.mark.slow
def test_a_run_resumes_on_the_device(tmp_path: Path) -> None:
    """Bit for bit, as on the CPU."""
    with other_device() as device:
        flags: dict[str, Any] = {"model__device": str(device), "model__dtype": "bfloat16"}
        tiny_run("ppo", tmp_path / "whole", steps=3, **flags).run(quiet)
        tiny_run("ppo", tmp_path / "parts", **flags).run(quiet)
        tiny_run("ppo", tmp_path / "parts", {"resume": True}, steps=3, **flags).run(quiet)
    whole, parts = (everything(tmp_path / name) for name in ("whole", "parts"))
    assert parts["rows"] == whole["rows"] and parts["metrics"] == whole["metrics"]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "adapters"])
def test_servers_get_weights_of_the_device(server: StandIn, tmp_path: Path, lora: Any) -> None:
    with other_device() as device:
        flags = {"sampling__engine": "vllm", "sampling__servers": [server.url], "model__path": str(server.folder)}
        given = settings(tmp_path / "run", model__device=str(device), model__lora=lora, checkpoint__every=0, **flags)
        Training(given, prompts=PROMPTS, rewards=uneven).run(quiet)
    assert server.version != "default"


@pytest.mark.parametrize(
    ("device", "started", "said"),
    [
        ("cuda:2", {}, 'model.device "cuda:2": this machine has 2 GPUs, numbered from cuda:0'),
        ("cuda:1", {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}, 'model.device "cuda:1" is a single GPU, but 2 processes'),
        ("cuda", {"WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3}, "3 processes train on this machine, which has 2 GPUs: "),
        (None, {"WORLD_SIZE": 8, "LOCAL_WORLD_SIZE": 4}, "4 processes train on this machine, which has 2 GPUs: "),
    ],
)
def test_there_is_a_gpu_for_each_process(
    device: str | None, started: dict[str, int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in started.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match=re.escape(said)):
        Processes(device)


@pytest.mark.parametrize(
    ("device", "gpus", "started"),
    [
        ("cuda:1", 2, {}),
        (None, 2, {"WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}),
        ("cuda", 1, {"WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4, "CUDA_VISIBLE_DEVICES": 3}),  # as Ray and Slurm may do
    ],
)
def test_gpus_that_suffice_are_not_refused(
    device: str | None, gpus: int, started: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for name, value in started.items():
        monkeypatch.setenv(name, str(value))
    _check_gpus(None if device is None else torch.device(device))
