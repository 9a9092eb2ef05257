"""The matrix products of `cavesson.ops.matmul` at the shapes of SmolLM2-135M, and which one is chosen.

The last line is JSON: how many times as long as the other product PyTorch's takes, by dtype and shape.

    python benchmarks/linear.py
    python benchmarks/linear.py --only "16 × 576 → 192"    those with this in their names
"""

import argparse
from collections.abc import Iterator, Mapping
from statistics import median
from timeit import timeit

import torch
import work
from torch import Tensor

from cavesson.ops.matmul import PRODUCTS, Layout, Product, current, times

ROUNDS = 5
LOOKUPS = 10_000
LAYER = ((576, 576), (192, 576), (1536, 576), (576, 1536))
HEAD = (49152, 576)
# Of a step on 16 responses: one token each when sampling, then all but the last, which predicts none, through the
# layers, and 256 rows at a time through the head.
ROWS = {**dict.fromkeys(LAYER, (16, 16 * (work.PROMPT + work.RESPONSE - 1))), HEAD: (16, 256)}
SAMPLED = 16
"""Rows without gradients."""


def factors(rows: int, weight: Tensor) -> Iterator[tuple[Layout, Tensor, Tensor]]:
    """Yield the factors of the product forward and of each gradient."""
    out, width = weight.shape
    x, gradient = torch.randn(rows, width).to(weight.dtype), torch.randn(rows, out).to(weight.dtype)
    yield "forward", x, weight
    if rows > SAMPLED:
        yield "input", gradient, weight.t()
        yield "weight", gradient.t(), x.t()


def compared(dtype: torch.dtype, products: Mapping[str, Product], only: str) -> Iterator[tuple[str, float]]:
    """Print milliseconds and the choice for each shape; yield how much longer PyTorch's product takes."""
    for (out, width), sizes in ROWS.items():
        weight = torch.randn(out, width).to(dtype)
        for rows in sizes:
            for layout, x, y in factors(rows, weight):
                shape = f"{str(dtype).removeprefix('torch.')} {layout} {rows} × {width} → {out}"
                if only not in shape:
                    continue
                rounds = [times(x, y) for _ in range(ROUNDS)]
                seconds = {name: median(one[name] for one in rounds) for name in products}
                chosen = current().product(layout, x, y)
                name = next(name for name in products if products[name] is chosen)
                taken = ", ".join(f"{name} {1000 * spent:.3f} ms" for name, spent in seconds.items())
                print(f"{shape}: {taken}, chosen: {name}", flush=True)
                yield shape, seconds["pytorch"] / min(seconds[name] for name in products if name != "pytorch")


def main() -> None:
    """Print the milliseconds of all products and the choice for each shape, and what looking it up takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a data type, a factor or a shape")
    only = parser.parse_args().only
    ratios = {
        shape: ratio
        for dtype, products in PRODUCTS.items()
        if len(products) > 1
        for shape, ratio in compared(dtype, products, only)
    }
    if not ratios:
        parser.error(f"no shape matches {only!r}")
    x, weight = torch.randn(16, 576), torch.randn(576, 576)
    spent = timeit(lambda: current().product("forward", x, weight), number=LOOKUPS) / LOOKUPS
    print(f"looking up a choice: {1e6 * spent:.2f} µs")
    work.print_json(ratios)


if __name__ == "__main__":
    main()
