"""benchmarks/adapters.py: every way computes what PEFT does, in the number of products that arithmetic says."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import adapters
from gpu_work import SIZES

TOKENS = 24


@pytest.fixture(scope="module")
def layer() -> tuple[nn.Module, nn.Module]:
    return adapters.adapted_layer(SIZES["tiny adapters"], "cpu", torch.float64)


def counted(layer: tuple[nn.Module, nn.Module], way: str) -> adapters.Counts:
    torch.manual_seed(1)
    both = adapters.passes_of(*layer, TOKENS, compiles=False)
    with adapters.computed(layer[0], way):
        return adapters.counts(layer[0], both, TOKENS, compiles=False)


@pytest.mark.parametrize("way", [way for way in adapters.WAYS if way != "PEFT's own"])
def test_each_way_has_the_output_and_gradients_of_peft(layer: tuple[nn.Module, nn.Module], way: str) -> None:
    expected = counted(layer, "PEFT's own").results
    assert all(bool(x.any()) for x in expected)
    assert adapters.farthest(counted(layer, way).results, expected) < 1e-12


@pytest.mark.parametrize(
    ("way", "products"),
    [
        # Seven weights: forward W, A and B; backward the gradients of the input through W, B and A, and of B and A.
        ("PEFT's own", 7 * 3 + 7 * 5),
        # q, k and v share A and both products of its backward pass, and so do gate and up: two less and one less.
        ("joined", 7 * 8 - 3 * (2 + 1)),
        ("one function each", 7 * 8 + 7),  # A again in the backward pass
        ("joined in a function", 7 * 8 - 3 * (2 + 1) + 4),
    ],
)
def test_products_are_counted(layer: tuple[nn.Module, nn.Module], way: str, products: int) -> None:
    assert counted(layer, way).products == products


def test_peft_computes_again_after_a_way(layer: tuple[nn.Module, nn.Module]) -> None:
    before = counted(layer, "PEFT's own").results
    counted(layer, "joined")
    assert all(map(torch.equal, before, counted(layer, "PEFT's own").results))
