"""Matrix products of `cavesson.ops.linear` against PyTorch's, in float32 at the shapes of SmolLM2-135M.

Times are of all products of one pass: forward, gradient of the input, gradient of the weight.
"""

from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter

import torch
import work
from torch import Tensor
from torch.nn import functional

from cavesson.ops.linear import linear

ROUNDS = 5
LAYER = ((576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536))
TRUNK = LAYER * 30
HEAD = ((49152, 576),)
# A step on 16 responses: 17 + 32 tokens through the layers, 32 through the head; one token each when sampling.
PASSES = {
    "layers": (TRUNK, 16 * 48),
    "head": (HEAD, 16 * 32),
    "layers, sampling": (TRUNK, 16),
    "head, sampling": (HEAD, 16),
}

Product = Callable[[Tensor, Tensor], Tensor]


def passes(product: Product, weights: list[Tensor], rows: int) -> Iterator[float]:
    """Seconds of the forward pass and of each gradient."""
    inputs = {width: torch.randn(rows, width) for width in {weight.shape[1] for weight in weights}}
    start = perf_counter()
    with torch.no_grad():
        for weight in weights:
            product(inputs[weight.shape[1]], weight)
    yield perf_counter() - start
    for wanted in ("input", "weight"):
        spent = 0.0
        for weight in weights:
            x = inputs[weight.shape[1]].detach().requires_grad_(wanted == "input")
            result = product(x, weight.detach().requires_grad_(wanted == "weight"))
            gradient = torch.ones_like(result)
            start = perf_counter()
            result.backward(gradient)
            spent += perf_counter() - start
        yield spent


def main() -> None:
    """Print, for each pass, how many times as long PyTorch's own product takes."""
    ratios: dict[str, float] = {}
    for name, (shapes, rows) in PASSES.items():
        weights = [torch.randn(shape) for shape in shapes]
        seen: dict[Product, list[list[float]]] = {linear: [], functional.linear: []}
        for _ in range(ROUNDS):
            for product, times in seen.items():
                times.append(list(passes(product, weights, rows)))
        ours, theirs = ([median(column) for column in zip(*times, strict=True)] for times in seen.values())
        kinds = ("forward", "gradient of input", "gradient of weight")
        count = 1 if "sampling" in name else 3
        ratios |= {f"{name}: {kind}": b / a for kind, a, b in list(zip(kinds, ours, theirs, strict=True))[:count]}
    work.print_json(ratios)


if __name__ == "__main__":
    main()
