"""Compiled layers: one graph for all layers of a model, which a GPU computes in a few large kernels.

Uncompiled, most of the time of a small model goes to elementwise kernels and to their launches. Compiled code may round
differently than the plain one, and than code that was compiled for other shapes or without a graph. So that the same
weights always give the same numbers, in scoring as in learning, there is one code for all lengths, always with a graph.
"""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._functorch import config as functorch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.utils._pytree import tree_map_only

from cavesson.errors import first_line, print_error
from cavesson.models.layers import forwards

_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def compiler(backend: str = "inductor") -> Compile:
    """Return what compiles a function for tensors of any length; another backend than the default is for tests.

    What is compiled is kept in a folder that outlives the run and a restart of the machine, unless the user names one.
    """
    if os.environ.get(_FOLDER) in (None, default_cache_dir()):  # PyTorch sets its own, a temporary one, when imported
        os.environ[_FOLDER] = str(cache_folder())
    torch._dynamo.reset()  # what earlier runs in this process have compiled would count against the limits of this one
    functorch.donated_buffer = False  # a backward pass that reuses what it has read cannot run twice, see `InBackward`
    return lambda function: torch.compile(function, dynamic=True, fullgraph=True, backend=backend)


def cache_folder() -> Path:
    """Return the folder of compiled code, by the version of PyTorch."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "cavesson" / "compiled" / f"torch-{torch.__version__}"


def compile_layers(model: nn.Module, compile: Compile) -> None:
    """Compile the layers of a model, for passes inside `as_in_run`; the code is made when it is first needed."""
    code: dict[Any, Callable[..., Any]] = {}
    shared = Failure()
    for forward in forwards(model):
        function = inspect.unwrap(forward.plain.__func__)  # type: ignore[attr-defined]
        if function not in code:
            code[function] = compile(function)
        forward.compiled = CompiledForward(forward.plain, code[function], shared)


def plain_layers(model: nn.Module) -> None:
    """Undo `compile_layers`."""
    for forward in forwards(model):
        forward.compiled = None


class Failure:
    """Whether the layers of a model could not be compiled."""

    reason: str | None = None


class CompiledForward:
    """The compiled forward method of a layer; where it cannot be compiled, the plain one from then on."""

    def __init__(self, plain: Callable[..., Any], code: Callable[..., Any], failure: Failure) -> None:
        self.plain, self.code, self.failure = plain, code, failure

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.failure.reason is None:
            try:
                return _with_graph(self.code, self.plain.__self__, hidden, *args, **kwargs)  # type: ignore[attr-defined]
            except (FailOnRecompileLimitHit, TorchDynamoException) as error:
                self.failure.reason = f"{type(error).__name__}: {first_line(error)}"
                print_error(f"cavesson: the layers are not compiled: {self.failure.reason}")
        return self.plain(hidden, *args, **kwargs)


def _with_graph(code: Callable[..., Any], layer: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call compiled code that also computes the gradient of its input, whether that is needed or not."""
    is_needed = torch.is_grad_enabled()
    with torch.enable_grad():
        given = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
        output = code(layer, given, *args, **kwargs)
    return output if is_needed else tree_map_only(Tensor, Tensor.detach, output)


def uncompiled(model: nn.Module) -> str | None:
    """Return why the layers of a model could not be compiled, or None."""
    ways = [forward.compiled for forward in forwards(model)]
    return next((way.failure.reason for way in ways if isinstance(way, CompiledForward)), None)
