"""Whether a tensor is on a GPU. A plan computes as if its fake tensors were, whatever the machine has."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_pretends = False  # not a context variable, which torch.compile could not trace


def is_on_gpu(x: Tensor) -> bool:
    """Return whether a tensor is on a GPU, or should be taken for one that is."""
    return x.is_cuda or _pretends


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Take tensors for ones on a GPU inside the block, in all threads; only fake ones can be computed with then."""
    global _pretends
    before, _pretends = _pretends, True
    try:
        yield
    finally:
        _pretends = before
