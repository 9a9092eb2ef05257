"""The matrix products on CPU, and which of them is used for which shape.

In float32, PyTorch's own product (MKL on Intel and AMD) and oneDNN's give the same numbers up to rounding. In bfloat16,
PyTorch's own product is quick on a processor that has instructions for it, and up to eight times as slow as a float32
one elsewhere, where it pays to convert both factors. Which one is faster depends on the processor, the shape, the
memory layout and the number of threads, so all are timed when a shape first comes up. The choice is then kept, because
another one would change the last bits of a run:

- in a folder of this machine, where the first process to write a choice decides for all others, so that equal seeds
  give equal runs, also if these start at the same moment;
- in the folder of a run, through `Choices.keep`, so that a resumed run uses the same products on any machine.

If the folder cannot be written, choices hold for the run, or for the process outside of one.

Without a choice, PyTorch's product takes a step 1.1 to 1.6 times as long: benchmarks/README.md has the table.
"""

import math
import os
import platform
import re
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Lock
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

Product = Callable[[Tensor, Tensor], Tensor]
"""From X and W to X·Wᵀ."""
Layout = Literal["forward", "input", "weight"]
"""What a product is for: the forward pass, the gradient of the input or that of the weight; the memory layouts of the
factors differ."""
Key = tuple[torch.dtype, Layout, int, int, int, int]
"""Dtype; layout; the rows of X, its columns and the rows of W, where the number of tokens is rounded up to a power of
two; and the number of threads."""

_TIMED_FROM = 2**17
"""Multiplications of the smallest product that is timed: PyTorch's takes a few microseconds for a smaller one, and
calling oneDNN takes 15."""
_MIN_ROUNDS, _MAX_ROUNDS = 3, 30
_SECONDS = 0.1
"""Of timing a shape, unless the fewest rounds take longer: the more rounds, the less do other programs disturb them."""
_CLEARLY = 4
"""How many times as long one product must take as another for a single round to decide."""


def _onednn(x: Tensor, weight: Tensor) -> Tensor:
    """Compute with the operator that `torch.compile` emits."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return result


def _in_float32(x: Tensor, weight: Tensor) -> Tensor:
    """Round the result once, as processors do that multiply in bfloat16 and add in float32."""
    return functional.linear(x.float(), weight.float()).to(x.dtype)


HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
PRODUCTS: dict[torch.dtype, dict[str, Product]] = {
    torch.float32: {**({"onednn": _onednn} if HAS_ONEDNN else {}), "pytorch": functional.linear},
    torch.bfloat16: {"pytorch": functional.linear, "float32": _in_float32},
}
"""By name, for each dtype; the first one is used where timing is impossible."""


class Choices:
    """The product of each shape that has come up; `given` are choices that were made before, as in `known`."""

    def __init__(self, given: Mapping[str, str] | None = None) -> None:
        self.known = dict(given or {})
        """names in `PRODUCTS` by the name of the shape"""
        self.unshared: str | None = None
        """why a choice could not be kept for other processes on this machine"""
        self._products: dict[Key, Product] = {}
        self._keep: Callable[[Mapping[str, str]], object] = lambda known: None
        self._lock = Lock()

    def product(self, layout: Layout, x: Tensor, weight: Tensor) -> Product:
        """Return the product to use for two factors, neither of which is empty."""
        width = x.shape[-1]
        rows = x.numel() // width
        if layout == "weight":
            width = _rounded(width)
        else:
            rows = _rounded(rows)
        key = x.dtype, layout, rows, width, weight.shape[0], torch.get_num_threads()
        return self._products.get(key) or self._choose(key, x, weight)

    def keep(self, keep: Callable[[Mapping[str, str]], object]) -> None:
        """Pass all choices to a function that keeps them, now if there are any and whenever there is a new one."""
        with self._lock:
            self._keep = keep
            if self.known:
                keep(self.known)

    def _choose(self, key: Key, x: Tensor, weight: Tensor) -> Product:
        with self._lock:  # another thread would disturb the timing, and might decide otherwise
            products = PRODUCTS[x.dtype]
            if key not in self._products:
                if math.prod(key[2:5]) < _TIMED_FROM:
                    self._products[key] = functional.linear
                elif (choice := self._choice(_name(key), x, weight)) is not None:
                    self._products[key] = products[choice]
            return self._products.get(key, next(iter(products.values())))

    def _choice(self, name: str, x: Tensor, weight: Tensor) -> str | None:
        """Return the product for a shape, or None if it is not known and these factors cannot be used for timing."""
        products = PRODUCTS[x.dtype]
        if self.known.get(name) in products:
            return self.known[name]
        choice = _read(name, products) or (self._timed(name, x, weight) if _can_be_timed(x, weight) else None)
        if choice is not None:
            self.known[name] = choice
            self._keep(self.known)
        return choice

    def _timed(self, name: str, x: Tensor, weight: Tensor) -> str:
        choice = fastest(x, weight)
        try:
            return agree(name, choice, x.dtype)
        except (OSError, RuntimeError) as error:
            self.unshared = str(error)
            return choice


_current = Choices()


def current() -> Choices:
    """Return the choices in use."""
    return _current


@contextmanager
def using(choices: Choices) -> Iterator[None]:
    """Use these choices inside the block, in all threads."""
    global _current
    before, _current = _current, choices
    try:
        yield
    finally:
        _current = before


def times(x: Tensor, weight: Tensor) -> dict[str, float]:
    """Return the seconds that each product takes, the least of several rounds in which they take turns."""
    least = dict.fromkeys(PRODUCTS[x.dtype], math.inf)
    start = perf_counter()
    for count in range(1, _MAX_ROUNDS + 1):
        for name, product in PRODUCTS[x.dtype].items():
            before = perf_counter()
            product(x, weight)
            least[name] = min(least[name], perf_counter() - before)
        is_decided = count >= _MIN_ROUNDS or max(least.values()) > _CLEARLY * min(least.values())
        if is_decided and perf_counter() - start > _SECONDS:
            break
    return least


def fastest(x: Tensor, weight: Tensor) -> str:
    """Return the name of the product that takes the least time."""
    measured = times(x, weight)
    return min(measured, key=measured.__getitem__)


def agree(name: str, choice: str, dtype: torch.dtype) -> str:
    """Return what all processes on this machine use for a shape: the choice of the first one that writes its own.

    Raises:
        OSError: the folder cannot be written.
        RuntimeError: the user has no home folder.
    """
    folder = machine_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=folder) as file, suppress(FileExistsError):
        file.write(choice)
        file.flush()
        os.link(file.name, folder / name)
    return _read(name, PRODUCTS[dtype]) or choice


def machine_folder() -> Path:
    """Return the folder that keeps the choices of machines like this one.

    Raises:
        RuntimeError: the user has no home folder.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "cavesson" / "products" / _machine()


def _name(key: Key) -> str:
    """Return the name of a shape; that of float32 has no dtype in it, so that older runs keep their choices."""
    dtype, *shape = key
    kind = () if dtype == torch.float32 else (str(dtype).removeprefix("torch."),)
    return "-".join(map(str, (*kind, *shape)))


def _rounded(tokens: int) -> int:
    return 1 << (tokens - 1).bit_length()


def _can_be_timed(x: Tensor, weight: Tensor) -> bool:
    """Return whether factors have numbers, and nobody watches the operations on them."""
    return {type(x), type(weight)} <= {Tensor, nn.Parameter} and not is_in_torch_dispatch_mode()


@cache
def _machine() -> str:
    """Return a name for the processor and the libraries with which products were timed."""
    processor = platform.machine()
    with suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        processor = found[1] if found else processor
    capability = torch.backends.cpu.get_cpu_capability()
    return re.sub(r"[^\w.+]+", "-", f"{processor} {capability} {os.cpu_count()} torch {torch.__version__}")


def _read(name: str, products: Container[str]) -> str | None:
    """Return what a process on this machine chose, if any did."""
    with suppress(OSError, RuntimeError):
        choice = (machine_folder() / name).read_text()
        return choice if choice in products else None
    return None
