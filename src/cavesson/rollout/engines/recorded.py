"""A decoding step as a CUDA graph: recorded once, then replayed in one launch.

A step of a small model launches hundreds of kernels that each take less time than Python needs to launch the next.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache


class RecordedStep:
    """Replays `compute`, recorded with some inputs, for inputs of the same shapes.

    `compute` is called twice; it returns the result of the inputs, and appends their keys and values to the cache, for
    which `keeps_tokens_only` must hold. The warm-up and the recording leave the cache as it was. The graph reads and
    writes the memory of its first run: inputs are copied there, and the result is overwritten by the next call.
    """

    def __init__(self, compute: Callable[..., Tensor], inputs: tuple[Tensor, ...], cache: StaticCache) -> None:
        self._inputs = tuple(each.clone() for each in inputs)
        self._graph = torch.cuda.CUDAGraph()
        lengths: list[Any] = [layer.cumulative_length for layer in cache.layers]  # type: ignore[union-attr]
        compute(*self._inputs)  # libraries allocate workspaces and load kernels, which must not be recorded
        for length in lengths:
            length.sub_(1)
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._result = compute(*self._inputs)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the result; the next call overwrites it."""
        for kept, given in zip(self._inputs, inputs, strict=True):
            kept.copy_(given)
        self._graph.replay()
        return self._result
