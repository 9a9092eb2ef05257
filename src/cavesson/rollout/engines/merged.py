"""Adapters merged into the weights while responses are sampled.

In each decoding step, an adapter adds two small products to every layer, which take longer to launch than to compute.
The merged weights are a second copy of the layers' weights. The weights themselves are not touched, so that they are
the same bits afterwards.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cavesson.errors import UserError, first_line
from cavesson.models.device_memory import free_memory
from cavesson.models.parts import UNSUPPORTED, causal, close, probe_ids, trunk
from cavesson.models.quantized import is_quantized
from cavesson.ops.rounding import rounded_randomly
from cavesson.randomness import Purpose, generator
from cavesson.rollout.engines.settings import MergesAdapters

_SHARE = 0.5
"""Share of the free memory that merged weights may take; the rest of the run, such as an optimiser, needs some too."""
_PROBE = 8
"""Tokens of the comparison."""
_NOISE = 0.02
"""Standard deviation of what stands for an adapter that has not learned yet in the comparison."""


class Merging:
    """Whether and how the adapters of a model are merged.

    `when` is `sampling.merge_adapters`; `seed` determines, with the version of the weights, how they are rounded.
    """

    def __init__(self, model: nn.Module, when: MergesAdapters, seed: int) -> None:
        self._model, self._when, self._seed = model, when, seed
        self.merges: bool | None = None
        """whether this was chosen; None = nothing was to choose, or it has not been chosen yet"""
        self._slow: str | None = None

    def choose(self, used: Callable[[], int]) -> None:
        """Decide whether to merge, once: the first decision stays. `used` returns the bytes that sampling needs
        besides.

        Raises:
            UserError: adapters shall always be merged, and cannot be.
        """
        is_on_gpu = causal(self._model).device.type == "cuda"
        if self.merges is not None or not isinstance(self._model, PeftModel):
            return
        if self._when == "never" or (self._when == "auto" and not is_on_gpu):
            self.merges = False
            return
        why = _unmerged(self._model)
        if why is None and self._when == "auto":
            size, free = merged_bytes(self._model), free_memory(causal(self._model).device) - used()
            if not fits(size, free):
                why = f"a copy of the weights would take {size / 2**30:,.1f} of {free / 2**30:,.1f} GiB of free memory"
        if why is None:
            why = _disagreement(self._model)
        if why is not None and self._when == "always":
            raise UserError(f'sampling.merge_adapters "always": adapters cannot be merged, because {why}')
        self.merges, self._slow = why is None, why

    def agree(self, others: Sequence[bool | None]) -> None:
        """Merge only if all other processes do: they sample with the same weights."""
        if self.merges and not all(others):
            self.merges, self._slow = False, "another process does not merge them"

    def merged(self, version: int) -> AbstractContextManager[None]:
        """Compute with merged weights of this version inside the block, if this was chosen."""
        if not self.merges:
            return nullcontext()
        seed = generator(self._seed, Purpose.MERGED_WEIGHTS, version).integers(2**63)
        return merged_adapters(self._model, int(seed))

    def remarks(self) -> list[str]:
        """Return what was chosen, as a note for the user."""
        if self._slow is not None:
            return [f"adapters are not merged for sampling, which would be faster: {self._slow}"]
        size = merged_bytes(self._model) / 2**30
        return [f"adapters are merged into a copy of the weights for sampling ({size:,.1f} GiB)"] if self.merges else []


@contextmanager
def merged_adapters(model: nn.Module, seed: int) -> Iterator[None]:
    """Compute with merged weights inside the block; the seed determines how they are rounded.

    They are computed in float32. In bfloat16, they are rounded stochastically, because most of what an adapter has
    learned is smaller than half of the distance between two neighbours. Of the effect of a random adapter of rank 16 on
    the output of a layer, with entries of 2e-5, 1e-4 and 1e-3 in its second matrix, rounding to the nearest kept 6, 29
    and 99 %, and stochastic rounding kept 99, 100 and 100 %. Its error was at most 1.4 times that of rounding the
    layer's output to bfloat16.
    """
    layers, kept = _adapted(model), list[Tensor]()
    draws = torch.Generator(causal(model).device).manual_seed(seed)
    try:
        with torch.no_grad():
            for layer in layers:
                weight = _weight(layer)
                kept.append(weight.data)
                _merge(layer, weight, draws)
        yield
    finally:
        for layer, data in reversed(list(zip(layers, kept, strict=False))):  # fewer if memory ran out
            if layer.merged:
                layer.unmerge()
            _weight(layer).data = data


def fits(size: int, free: float) -> bool:
    """Return whether weights are merged by default, given their size and the free memory in bytes."""
    return size <= _SHARE * free


def merged_bytes(model: nn.Module) -> int:
    """Return the bytes of the merged weights of a model with adapters."""
    return sum(_weight(layer).nbytes for layer in _adapted(model))


def _unmerged(model: nn.Module) -> str | None:
    """Return why the adapters of a model cannot be merged, or None if they can."""
    if is_quantized(causal(model)):
        return "the weights are quantized"
    if any(isinstance(weight, DTensor) for weight in model.parameters()):
        return "the weights are sharded"
    return None


@torch.no_grad()
def _disagreement(model: nn.Module) -> str | None:
    """Return what is wrong with the last hidden states of merged weights, if they differ by more than rounding."""
    ids = probe_ids(model, _PROBE)[None]
    try:
        with _with_effect(model):
            expected = trunk(model)(input_ids=ids, use_cache=False).last_hidden_state
            with merged_adapters(model, seed=0):
                seen = trunk(model)(input_ids=ids, use_cache=False).last_hidden_state
    except torch.OutOfMemoryError:
        raise
    except UNSUPPORTED as error:
        return f"merging them raises {type(error).__name__} ({first_line(error)})"
    agree = bool(close(seen, expected, causal(model).dtype).all())
    return None if agree else "merged weights compute other hidden states"


@contextmanager
def _with_effect(model: nn.Module) -> Iterator[None]:
    """Let new adapters have an effect inside the block: one of the two matrices of each is zero until it has learned.

    Merged and unmerged weights would be the same, however they are merged.
    """
    draws = torch.Generator().manual_seed(0)
    zero = [one for one in model.parameters() if one.requires_grad and not one.any()]
    kept = [one.data for one in zero]
    try:
        for one in zero:
            noise = torch.randn(one.shape, generator=draws) * _NOISE
            one.data = noise.to(one)
        yield
    finally:
        for one, data in zip(zero, kept, strict=True):
            one.data = data


def _adapted(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def _weight(layer: Any) -> Any:
    """Return the parameter that an adapter changes; that of experts has another name."""
    return getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))


def _merge(layer: Any, weight: nn.Parameter, draws: torch.Generator) -> None:
    """Let a layer compute with new merged weights; the tensor that it has had until now stays as it is."""
    dtype = weight.dtype
    weight.data = weight.to(torch.float32, copy=True)
    layer.merge()
    if dtype == torch.bfloat16:
        weight.data = rounded_randomly(weight.data, draws)
