"""Which caches a CUDA graph can be recorded with; what it computes is tested on GPUs, in tests/gpu."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import DynamicCache

sys.path.append(str(Path(__file__).parents[1] / "models"))
from sampling_helpers import sharp_policy
from small_models import small_model

from cavesson.models.parts import causal
from cavesson.rollout.engines.decoder import Decoder, keeps_tokens_only, new_cache
from cavesson.rollout.engines.decoding import Decoding, _recorded, full_passes
from cavesson.rollout.engines.sampler import Sampler
from cavesson.rollout.engines.settings import SamplingSettings


@pytest.mark.parametrize(
    ("architecture", "recorded"),
    [
        ("llama", True),
        ("qwen2", True),
        ("gemma2", False),  # the place in a sliding window is counted in Python
        ("jamba", False),  # and so is whether a state has been there before
    ],
)
def test_caches_that_count_in_python_are_not_recorded(architecture: str, recorded: bool) -> None:
    assert keeps_tokens_only(new_cache(small_model(architecture), "static", 16)) == recorded


class Launched:
    """Takes the place of the graph, which needs a GPU: computes each step, of inputs of the same shapes."""

    def __init__(self, compute: Any, inputs: tuple[torch.Tensor, ...], cache: object) -> None:
        self.compute, self.shapes = compute, [each.shape for each in inputs]

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        assert [each.shape for each in inputs] == self.shapes
        return self.compute(*inputs)  # type: ignore[no-any-return]


@torch.no_grad()
def test_inputs_of_fixed_shape_give_the_same_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when rows leave the batch, when one is replaced, and when the cache is full and all rows move."""
    monkeypatch.setattr("cavesson.rollout.engines.decoder.RecordedStep", Launched)
    model = small_model("llama", sliding_window=None)
    ids = torch.arange(2, 26).view(4, 6)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0

    def logits(recorded: bool) -> list[torch.Tensor]:
        decoder = Decoder(model, ids, mask, new_cache(model, "static", 13), recorded, spare=2)
        seen = [decoder.read()]
        for step, token in enumerate(torch.arange(30, 66).view(9, 4)):
            if step == 3:
                decoder.keep(torch.tensor([0, 3]))
            if step == 5:
                seen.append(decoder.replace(torch.tensor([1]), ids[1:2, 3:], mask[1:2, 3:]))
            seen.append(decoder.append(token if step < 3 else token[:2]))
        return seen

    for one, other in zip(logits(False), logits(True), strict=True):
        torch.testing.assert_close(one, other)


def test_caches_that_grow_are_not_recorded() -> None:
    model = small_model("llama")
    assert not keeps_tokens_only(new_cache(model, "growing", 16))
    assert not keeps_tokens_only(DynamicCache(config=causal(model).config))


def test_why_a_gpu_samples_without_a_cuda_graph_is_told(tokenizer) -> None:
    sampler = Sampler(sharp_policy(), tokenizer, SamplingSettings(), seed=0)
    sampler.decoding = Decoding("static", "decoding raises RuntimeError (no graph)")
    assert sampler.remarks() == [
        "sampling does not use a CUDA graph, which would be faster: decoding raises RuntimeError (no graph)"
    ]
    sampler.decoding = Decoding("recorded")
    assert sampler.remarks() == []


def test_steps_of_sharded_weights_are_not_recorded() -> None:
    """Whatever they would compute: the processes exchange weights in each step."""
    model = small_model("llama")
    expected = full_passes(model, 16)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        layer = model.get_submodule("model.layers.0.mlp.up_proj")
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
        assert _recorded(model, 16, expected).unrecorded == "the weights are sharded"
    finally:
        torch.distributed.destroy_process_group()
