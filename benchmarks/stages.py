"""How far each stage of a step is from its matrix products: seconds, seconds of the products alone, and their ratio.

    python benchmarks/stages.py --mode own build/bench-models/smol 16 5

The products of one step are written down as PyTorch runs them (attention included), and computed again afterwards on
random numbers of the same shapes, strides and types, in the same order, with nothing in between. Steps and products
take turns.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import ours
import torch
import work
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from cavesson import Reward, Training
from cavesson.rollout.rewards.classifier import ClassifierReward

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "_linear_pointwise", ATTENTION, f"{ATTENTION}_backward")
DISTINCT = 64
"""Tensors of one shape that the products use in turn: layers have weights of their own, which caches do not hold."""

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Products(TorchDispatchMode):
    """Notes every product under the stage in which it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = ""
        self.calls: dict[str, list[Call]] = defaultdict(list)
        self._pools: dict[object, dict[int, Tensor]] = defaultdict(dict)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket.__name__ in PRODUCTS:
            given = tree_map(self._alike, (tuple(args), dict(kwargs or {})))
            self.calls[self.stage].append((func, *given))
        return func(*args, **(kwargs or {}))

    def _alike(self, given: object) -> object:
        """Return random numbers in place of a tensor: the same for the same memory, as far as there is room."""
        if not isinstance(given, Tensor):
            return given
        pool = self._pools[given.shape, given.stride(), given.dtype]
        key = given.data_ptr()
        if key not in pool and len(pool) >= DISTINCT:
            key = list(pool)[key // 64 % DISTINCT]
        if key not in pool:
            with torch.utils._python_dispatch._disable_current_modes():
                pool[key] = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype)
                if given.is_floating_point():
                    pool[key].uniform_(-1, 1)
                else:
                    pool[key].zero_()
        return pool[key]


@torch.no_grad()
def seconds_of(calls: Sequence[Call]) -> float:
    start = perf_counter()
    for func, args, kwargs in calls:
        func(*args, **kwargs)
    return perf_counter() - start


@contextmanager
def noted(training: Training) -> Iterator[Products]:
    """Note the products of everything inside the block."""
    products, enter = Products(), training.processes.enter

    def enter_stage(stage: str) -> None:
        products.stage = stage.rsplit(", ", 1)[-1]
        enter(stage)

    training.processes.enter = enter_stage  # type: ignore[method-assign]
    try:
        with products:
            yield products
    finally:
        training.processes.enter = enter  # type: ignore[method-assign]


def main() -> None:
    """Print the table, and the same as a JSON line."""
    given = work.arguments(__doc__, tuple(ours.MODES))
    dtype = ours.MODES[given.mode].get("model", {}).get("dtype", "float32")
    reward = ClassifierReward(f"{given.model}-classifier", batch_size=given.batch, dtype=dtype)
    with TemporaryDirectory() as folder:
        settings = ours.settings(given.mode, given.model, given.batch, given.steps + 2, Path(folder))
        prompts = work.prompts(given.batch * (given.steps + 2))
        trainer = Training(settings, prompts=prompts, rewards=[Reward("classifier", reward)])
        numbers = compare(trainer, given.steps)
    work.print_json(numbers)


def compare(training: Training, steps: int) -> dict[str, float]:
    """Train the steps, and compute their products in turn; return the medians by stage."""
    step = training.trainer.step
    step(0)  # everything is loaded and allocated
    with noted(training) as products:
        step(1)
    whole: dict[str, list[float]] = defaultdict(list)
    alone: dict[str, list[float]] = defaultdict(list)
    for number in range(2, steps + 2):
        for name, value in step(number).items():
            if name.startswith("time/"):
                whole[name.removeprefix("time/")].append(value)
        for stage, calls in products.calls.items():
            alone[stage].append(seconds_of(calls))
        alone["total"].append(sum(alone[stage][-1] for stage in products.calls))
    print(f"{'stage':10} {'seconds':>8} {'products':>9} {'ratio':>6}")
    for stage in whole:
        print(_line(stage, median(whole[stage]), median(alone[stage]) if stage in alone else 0.0))
    return {f"{stage}/{name}": median(found[stage]) for name, found in (("seconds", whole), ("products", alone))
            for stage in found}  # fmt: skip


def _line(stage: str, seconds: float, products: float) -> str:
    ratio = f"{seconds / products:6.2f}" if products else f"{'–':>6}"
    return f"{stage:10} {seconds:8.2f} {products:9.2f} {ratio}"


if __name__ == "__main__":
    main()
