"""Which caches a CUDA graph can be recorded with; what it computes is tested on GPUs, in tests/gpu."""

import sys
from pathlib import Path

import pytest
from transformers import DynamicCache

sys.path.append(str(Path(__file__).parents[1] / "models"))
from sampling_helpers import sharp_policy
from small_models import small_model

from cavesson.models.parts import causal
from cavesson.sampling.decoding import Decoding, new_cache
from cavesson.sampling.recorded import can_record
from cavesson.sampling.sampler import Sampler
from cavesson.sampling.settings import SamplingSettings
from cavesson.train.build import sampling_remarks


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
    assert can_record(new_cache(small_model(architecture), "static", 16)) == recorded


def test_caches_that_grow_are_not_recorded() -> None:
    model = small_model("llama")
    assert not can_record(new_cache(model, "growing", 16))
    assert not can_record(DynamicCache(config=causal(model).config))


def test_why_a_gpu_samples_without_a_cuda_graph_is_told(tokenizer) -> None:
    sampler = Sampler(sharp_policy(), tokenizer, SamplingSettings(), seed=0)
    sampler.decoding = Decoding("static", "decoding raises RuntimeError (no graph)")
    assert sampling_remarks(sampler) == [
        "sampling does not use a CUDA graph, which would be faster: decoding raises RuntimeError (no graph)"
    ]
    sampler.decoding = Decoding("recorded")
    assert sampling_remarks(sampler) == []
