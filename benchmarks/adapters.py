"""Adapters in one layer: PEFT's products beside joined ones and one function per adapted weight, in kernels and time.

    python benchmarks/adapters.py                             # float32 on a CPU, bfloat16 on a GPU; a layer of 7b
    python benchmarks/adapters.py --size 0.5b --tokens 512    # another layer of gpu_work.py, another number of tokens
    python benchmarks/adapters.py --rounds 0                  # counts only

Each way is a forward and a backward pass of the same layer, uncompiled and compiled. Products are matrix products.
Others are all other kernels on a GPU; on a CPU, all other operations that compute, and in compiled code the calls of
fused functions. Kept are the bytes that a forward pass saves besides weights. Errors are the largest differences from
PEFT's output and gradients, relative to the largest number of each. Ways are timed in turn, so that a busy machine
slows all alike.
"""

from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from gpu_plain import wait
from gpu_work import SIZES, Size
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch._inductor import config as inductor
from torch._inductor.utils import fresh_cache
from torch.autograd import DeviceType
from torch.nn.functional import linear
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

RANK = 16
GROUPS = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("self_attn", ("o_proj",)),
          ("mlp", ("gate_proj", "up_proj")), ("mlp", ("down_proj",)))  # fmt: skip
"""adapted weights, those that read the same input together"""
PRODUCTS = ("aten::mm", "aten::addmm")
UNCOUNTED = (torch.ops.aten.detach, torch.ops.aten._unsafe_view, torch.ops.aten.empty, torch.ops.aten.empty_like)
"""operations that launch nothing, besides views"""
Pass = Callable[[], list[Tensor]]


class Counts(NamedTuple):
    """What a forward and a backward pass of a layer take."""

    products: int
    others: int
    kept: float
    """bytes per token"""
    results: list[Tensor]
    """the output, and the gradients of the input and of the adapters"""


class Adapted(torch.autograd.Function):
    """X·Wᵀ + b + s·X·Aᵀ·Bᵀ for weights on the same input; X·Aᵀ, one product for all, is computed again backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.scale = scale
        rows, parts = x.flatten(0, -2), list(zip(*[iter(weights)] * 4, strict=True))
        narrow = _narrow(rows, [first for _, _, first, _ in parts])
        made = (torch.addmm(linear(rows, weight, bias), each, second.t(), alpha=scale)
                for (weight, bias, _, second), each in zip(parts, narrow, strict=True))  # fmt: skip
        return tuple(one.view(*x.shape[:-1], -1) for one in made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        rows, parts = x.flatten(0, -2), list(zip(*[iter(weights)] * 4, strict=True))
        firsts = [first for _, _, first, _ in parts]
        given = [gradient.flatten(0, -2) for gradient in gradients]
        narrow = _narrow(rows, firsts)
        down = torch.cat([ctx.scale * (g @ part[3]) for g, part in zip(given, parts, strict=True)], 1)
        of_x = down @ torch.cat(firsts)
        for g, (weight, *_) in zip(given, parts, strict=True):
            of_x = torch.addmm(of_x, g, weight)
        of_firsts = (down.t() @ rows).split([len(first) for first in firsts])
        of_seconds = [ctx.scale * (g.t() @ each) for g, each in zip(given, narrow, strict=True)]
        pairs = zip(of_firsts, of_seconds, strict=True)
        return of_x.view_as(x), None, *(one for first, second in pairs for one in (None, None, first, second))


def _narrow(x: Tensor, firsts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return X·Aᵀ for several matrices, as one product."""
    return linear(x, torch.cat(list(firsts))).split([len(first) for first in firsts], -1)


def in_function(group: Sequence[Any], x: Tensor) -> list[Tensor]:
    """Compute adapted weights on the same input in one function."""
    weights = (one for each in group for one in _weights(each))
    return list(Adapted.apply(x, group[0].scaling["default"], *weights))  # type: ignore[no-untyped-call]


def joined(group: Sequence[Any], x: Tensor) -> list[Tensor]:
    """Compute adapted weights on the same input with one product for their first matrices."""
    narrow = _narrow(x, [one.lora_A["default"].weight for one in group])
    return [one.base_layer(x) + one.scaling["default"] * linear(each, one.lora_B["default"].weight)
            for one, each in zip(group, narrow, strict=True)]  # fmt: skip


def _weights(layer: Any) -> tuple[Tensor | None, ...]:
    base = layer.base_layer
    return base.weight, base.bias, layer.lora_A["default"].weight, layer.lora_B["default"].weight


WAYS: dict[str, tuple[Callable[..., list[Tensor]] | None, bool]] = {
    "PEFT's own": (None, False),
    "joined": (joined, True),
    "one function each": (in_function, False),
    "joined in a function": (in_function, True),
}
"""How a group of adapted weights is computed, and whether those on the same input are a group."""


def adapted_layer(size: Size, device: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """Return a layer with adapters that have an effect, and its rotary embedding."""
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(Qwen2Config(**{**size.config, "num_hidden_layers": 1, "vocab_size": 8}))
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    inner: Any = get_peft_model(model.to(dtype), lora, autocast_adapter_dtype=False).base_model
    for name, weight in inner.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.02)
    return inner.model.model.layers[0].to(device), inner.model.model.rotary_emb.to(device)


@contextmanager
def computed(layer: Any, way: str) -> Iterator[None]:
    """Compute the adapters of a layer in a way inside the block."""
    together, joins = WAYS[way]
    changed = []
    for parent, names in GROUPS if together is not None else ():
        members = [getattr(getattr(layer, parent), name) for name in names]
        for group in [members] if joins else [[one] for one in members]:
            made: list[Tensor] = []
            for number, one in enumerate(group):
                one.forward = partial(_in_turn, together, group, number, made)
                changed.append(one)
    try:
        yield
    finally:
        for one in changed:
            del one.forward


def _in_turn(together: Any, group: Sequence[Any], number: int, made: list[Tensor], x: Tensor) -> Tensor:
    """Compute one weight of a group; the first to be called computes all."""
    if number == 0:
        made += together(group, x)
    return made.pop(0)


def passes_of(layer: nn.Module, rotary: nn.Module, tokens: int, compiles: bool) -> Pass:
    """Return a forward and a backward pass of a layer; they return the output and the gradients."""
    weight = next(layer.parameters())
    width = layer.input_layernorm.weight.shape[0]  # type: ignore[union-attr, index]
    x, gradient = torch.randn(2, 1, tokens, width).to(weight)  # type: ignore[arg-type]
    places = rotary(x, torch.arange(tokens, device=x.device)[None])
    function: Callable[[Tensor], Tensor] = partial(layer, position_embeddings=places, attention_mask=None)
    if compiles:
        function = torch.compile(function, dynamic=True, fullgraph=True)
    trained = [p for p in layer.parameters() if p.requires_grad]

    def both() -> list[Tensor]:
        given = x.clone().requires_grad_()
        output = function(given)
        return [output.detach(), *torch.autograd.grad(output, [given, *trained], gradient)]

    return both


class _Computing(TorchDispatchMode):
    """Counts the operations that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and func.overloadpacket not in UNCOUNTED
        return func(*args, **(kwargs or {}))


def counts(layer: nn.Module, both: Pass, tokens: int, compiles: bool) -> Counts:
    """Count what a forward and a backward pass take."""
    kept, results = _kept(layer, both)
    with profile() as seen:
        both()
    events = seen.key_averages()
    products = sum(event.count for event in events if event.key in PRODUCTS)
    if next(layer.parameters()).device.type == "cuda":
        others = sum(event.count for event in events if event.device_type == DeviceType.CUDA) - products
    elif compiles:
        others = sum(event.count for event in events if "cpp_fused" in event.key)
    else:
        others = _computing(both) - products
    return Counts(products, others, kept / tokens, results)


def _computing(both: Pass) -> int:
    """Return the number of operations that compute something."""
    with _Computing() as computing:
        both()
    return computing.count


def _kept(layer: nn.Module, both: Pass) -> tuple[int, list[Tensor]]:
    """Return the bytes that a forward pass saves besides weights, and what both passes compute."""
    weights = {weight.untyped_storage().data_ptr() for weight in layer.parameters()}
    held: dict[int, Tensor] = {}  # tensors, so that no other one gets their address

    def keep(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        results = both()
    return sum(x.untyped_storage().nbytes() for place, x in held.items() if place not in weights), results


def farthest(seen: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference between tensors, relative to the largest number of each."""
    pairs = zip(seen, expected, strict=True)
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


def timed(layer: nn.Module, ways: dict[str, Pass], rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each way, measured in turn, after a first one that compiles."""
    device, found = next(layer.parameters()).device.type, {way: list[float]() for way in ways}
    for number in range(rounds + 1):
        for way, both in ways.items():
            with computed(layer, way):
                wait(device)
                start = perf_counter()
                both()
                wait(device)
                if number:
                    found[way].append(1000 * (perf_counter() - start))
    return found


def compare(layer: nn.Module, rotary: nn.Module, tokens: int, compiles: bool, rounds: int) -> None:
    """Print the figures of every way, uncompiled or compiled."""
    expected: list[Tensor] = []
    passes: dict[str, Pass] = {}
    for way in WAYS:
        torch._dynamo.reset()
        torch.manual_seed(1)
        passes[way] = passes_of(layer, rotary, tokens, compiles)
        with computed(layer, way):
            found = counts(layer, passes[way], tokens, compiles)
        expected = expected or found.results
        numbers = f"{found.products} products, {found.others} others, {found.kept / 1000:.1f} kB/token kept"
        error = farthest(found.results, expected)
        print(f"{'compiled' if compiles else 'uncompiled'}, {way}: {numbers}, error {error:.1e}", flush=True)
    for way, each in timed(layer, passes, rounds).items() if rounds else ():
        print(f"  {way}: {median(each):.1f} ms ({min(each):.1f} to {max(each):.1f})", flush=True)


def main() -> None:
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="7b", help="whose layer")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5, help="timed passes of each way")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    functorch.donated_buffer = False  # as in Cavesson
    inductor.cpp.enable_kernel_profile = True
    layer, rotary = adapted_layer(SIZES[given.size], device, torch.bfloat16 if device == "cuda" else torch.float32)
    for compiles in (False, True):
        with fresh_cache():
            compare(layer, rotary, given.tokens, compiles, given.rounds)


if __name__ == "__main__":
    main()
