"""Layers as `torch.compile` computes them, on fake tensors: what they keep for the backward pass, and what they write.

What compiled code keeps is decided before code is generated: AOTAutograd's partitioner cuts the joint graph of both
passes where the fewest bytes cross, and computes the rest again. Here the same partitioner cuts the same graph, and the
two parts run on fake tensors. Of elementwise operations, which are fused with what reads them, only results that a
kernel has to write are in memory.
"""

import operator
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.source import ConstantSource
from torch._functorch import config as functorch
from torch._functorch.aot_autograd import aot_function
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import partition_fn
from torch._inductor.decomposition import select_decomp_table
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from cavesson.plan.fakes import tensors_in

_aten, _prims = torch.ops.aten, torch.ops.prims
_REDUCTIONS = {_aten.sum, _aten.mean, _aten.amax, _aten.amin, _aten.argmax, _aten.any, _aten.var_mean, _aten.prod}
"""Operations that are fused with what they read, and whose results are written."""
_FUSED = {_aten.cat, _aten.embedding, _aten.index, _aten.select_scatter, _aten.slice_scatter, _aten.constant_pad_nd,
          _aten.full, _aten.full_like, _aten.scalar_tensor, _aten.arange, _aten.copy, _prims.iota}  # fmt: skip
"""Operations besides elementwise ones that are fused with what reads them."""

_traced: dict[str, Callable[..., Any]] = {}
"""Functions by what they are and what they are called with, as far as that decides the graph, for all simulations."""


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what computes a function of a layer on fake tensors as compiled code does, in place of `torch.compile`."""

    def code(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        held = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
        leaves, spec = tree_flatten((args, kwargs))
        varies = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) or type(leaf) is int]
        given = [*held.values(), *(leaves[place] for place in varies)]
        fixed = [leaf for place, leaf in enumerate(leaves) if place not in varies]
        key = repr((function, layer, spec, fixed, *map(_kind, given)))
        if key not in _traced:
            names, layers = list(held), [layer]

            def flat(*values: Any) -> Any:
                replaced = dict(zip(varies, values[len(names) :], strict=True))
                args, kwargs = tree_unflatten([replaced.get(n, leaf) for n, leaf in enumerate(leaves)], spec)
                with _reparametrize_module(layers[0], dict(zip(names, values, strict=False))):
                    return function(layers[0], *args, **kwargs)

            _traced[key] = _traced_for(flat, given, len(held))
            leaves.clear()  # what is traced outlives the layer and what it was called with
            layers.clear()
        return _traced[key](*given)

    return code


def _kind(x: Tensor | int) -> Any:
    """Return what code depends on: which sizes are 1, and for weights, which do not vary, all sizes."""
    if not isinstance(x, Tensor):
        return int
    sizes = x.shape if isinstance(x, nn.Parameter) else [size if size == 1 else None for size in x.shape]
    return x.dtype, x.requires_grad, list(sizes)


def _traced_for(flat: Callable[..., Any], given: list[Any], weights: int) -> Callable[..., Any]:
    """Return a function of tensors, the first of which are weights, traced for any size of the others."""
    traced: Callable[..., Any] = aot_function(
        flat, _run, partition_fn=partition_fn, decompositions=select_decomp_table(),
        num_params_buffers=weights, dynamic=True,
    )  # fmt: skip

    functorch.donated_buffer = False  # as `compiler` has it

    def trace() -> None:
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        made = tensors_in(traced(*(_stand_in(x, mode, place, weights) for place, x in enumerate(given))))
        torch.autograd.backward(made, [torch.ones_like(x) for x in made])  # its graph is made in the first one

    # In another thread, which has neither the modes of this one nor its hooks for saved tensors.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(trace).result()
    return traced


def _stand_in(x: Any, mode: FakeTensorMode, place: int, weights: int) -> Any:
    """Return a tensor for tracing; the sizes of a weight are fixed, others are symbols."""
    if not isinstance(x, Tensor):
        return x
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, requires_grad=x.requires_grad)
    kinds = [DimDynamic.STATIC if place < weights or size == 1 else DimDynamic.DYNAMIC for size in x.shape]
    return mode.from_tensor(
        made, source=ConstantSource(f"given_{place}"), symbolic_context=StatelessSymbolicContext(kinds)
    )


def _run(gm: fx.GraphModule, example_inputs: Any) -> Callable[[list[Any]], Any]:
    """Return what runs a graph; it takes a list of arguments, so that none is kept longer than it is needed.

    Its parameters are named as AOTAutograd names them.
    """
    interpreter = _Kernels(gm)

    def run(args: list[Any]) -> Any:
        mode = detect_fake_mode(args)
        interpreter.unwritten = lambda: _apart(mode)
        result = interpreter.boxed_run(args)
        interpreter.env = {}  # has the result
        return result

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _apart(mode: FakeTensorMode | None) -> AbstractContextManager[Any]:
    """Compute inside the block without being seen by trackers."""
    stack = ExitStack()
    stack.enter_context(_disable_current_modes())
    if mode is not None:
        stack.enter_context(mode)
    return stack


class _Kernels(fx.Interpreter):
    """Runs a graph, and lets only those of its tensors be seen that kernels write."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.written = _written(graph.graph)
        self.unwritten: Callable[[], AbstractContextManager[Any]]

    def run_node(self, node: fx.Node) -> Any:
        if node.op != "call_function" or node in self.written:
            return super().run_node(node)
        with self.unwritten():
            return super().run_node(node)


def _written(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose results are in memory: outputs, and what is written or read by kernels of libraries."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output":
            found |= set(node.all_input_nodes)
        elif node.op == "call_function" and isinstance(node.meta.get("val"), Tensor | tuple | list):
            if _is_view(node):
                found |= set(node.all_input_nodes[:1]) if node in found else set()
            elif not _is_fused(node.target):
                found |= {node} if _packet(node.target) in _REDUCTIONS else {node, *node.all_input_nodes}
    return found


def _is_view(node: fx.Node) -> bool:
    return node.target is operator.getitem or (isinstance(node.target, OpOverload) and node.target.is_view)


def _is_fused(target: Any) -> bool:
    return isinstance(target, OpOverload) and (torch.Tag.pointwise in target.tags or _packet(target) in _FUSED)


def _packet(target: Any) -> Any:
    return target._overloadpacket if isinstance(target, OpOverload) else None
