"""The two float32 matrix products of `cavesson.ops.products` at the shapes of SmolLM2-135M, and which one is chosen.

The last line is JSON: how many times as long as oneDNN's PyTorch's product takes, by shape.
"""

from collections.abc import Iterator
from statistics import median
from timeit import timeit

import torch
import work
from torch import Tensor

from cavesson.ops.products import PRODUCTS, Layout, current, times

ROUNDS = 5
LOOKUPS = 10_000
LAYER = ((576, 576), (192, 576), (1536, 576), (576, 1536))
HEAD = (49152, 576)
# Of a step on 16 responses: one token each when sampling, then 17 + 32 through the layers, and 256 rows at a time
# through the head.
ROWS = {**dict.fromkeys(LAYER, (16, 16 * 48)), HEAD: (16, 256)}
SAMPLED = 16
"""Rows without gradients."""


def factors(rows: int, weight: Tensor) -> Iterator[tuple[Layout, Tensor, Tensor]]:
    """Yield the factors of the product forward and of each gradient."""
    out, width = weight.shape
    x, gradient = torch.randn(rows, width), torch.randn(rows, out)
    yield "forward", x, weight
    if rows > SAMPLED:
        yield "input", gradient, weight.t()
        yield "weight", gradient.t(), x.t()


def main() -> None:
    """Print the milliseconds of both products and the choice for each shape, and what looking it up takes."""
    ratios: dict[str, float] = {}
    for (out, width), sizes in ROWS.items():
        weight = torch.randn(out, width)
        for rows in sizes:
            for layout, x, y in factors(rows, weight):
                rounds = [times(x, y) for _ in range(ROUNDS)]
                seconds = {name: median(one[name] for one in rounds) for name in PRODUCTS}
                product = current().product(layout, x, y)
                chosen = next(name for name in PRODUCTS if PRODUCTS[name] is product)
                shape = f"{layout} {rows} × {width} → {out}"
                taken = ", ".join(f"{name} {1000 * spent:.3f} ms" for name, spent in seconds.items())
                print(f"{shape}: {taken}, chosen: {chosen}", flush=True)
                ratios[shape] = seconds["pytorch"] / seconds.get("onednn", seconds["pytorch"])
    spent = timeit(lambda: current().product(layout, x, y), number=LOOKUPS) / LOOKUPS
    print(f"looking up a choice: {1e6 * spent:.2f} µs")
    work.print_json(ratios)


if __name__ == "__main__":
    main()
