"""Compiled layers: one graph for all layers of a model, which a GPU computes in a few large kernels.

Uncompiled, most of the time of a small model goes to elementwise kernels and to their launches. Compiled code may round
differently than the plain one, and than code that was compiled for other shapes or without a graph. So that the same
weights always give the same numbers, in scoring as in learning, there is one code for all lengths, always with a graph.
"""

import inspect
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException
from torch._functorch import config as functorch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.utils._pytree import tree_map_only

from cavesson.errors import first_line, print_error
from cavesson.models.layers import Forward, forwards

_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
NOT_COMPILED = (FailOnRecompileLimitHit, TorchDynamoException)
"""What is raised where something cannot be compiled."""
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def cause(error: Exception) -> str:
    """Return the kind of an error and its first line; of a compiler's error, those of what it was caused by."""
    inner = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
    return f"{type(inner).__name__} ({first_line(inner)})"


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


class Failure:
    """Whether something could not be compiled.

    Args:
        what: what could not, with its verb, such as "the layers are".
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.has_worked = False
        """whether the code has been tried; until then, errors are raised to what tries it"""
        self.reason: str | None = None


class Compiled:
    """A compiled function; where it cannot be compiled, the plain one from then on.

    Args:
        plain: computes the same.
        code: the compiled function.
        failure: shared by functions that are plain together.
    """

    def __init__(self, plain: Callable[..., Any], code: Callable[..., Any], failure: Failure) -> None:
        self.plain, self.code, self.failure = plain, code, failure

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.failure.reason is None:
            try:
                return self.code(*args, **kwargs)
            except NOT_COMPILED as error:
                if not self.failure.has_worked:
                    raise
                self.failure.reason = cause(error)
                print_error(f"cavesson: {self.failure.what} not compiled: {self.failure.reason}")
        return self.plain(*args, **kwargs)


def compile_layers(model: nn.Module, compile: Compile) -> Failure:
    """Compile the layers of a model, for passes inside `as_in_run`; the code is made when it is first needed."""
    failure = Failure("the layers are")
    for forward, code in compiled_forwards(model, compile):
        layer = forward.plain.__self__  # type: ignore[attr-defined]
        forward.compiled = Compiled(forward.plain, partial(_with_graph, code, layer), failure)
    return failure


def compiled_forwards(model: nn.Module, compile: Compile) -> Iterator[tuple[Forward, Callable[..., Any]]]:
    """Yield each layer's forward method with the compiled function of its class, one for all layers of a class."""
    code: dict[Any, Callable[..., Any]] = {}
    for forward in forwards(model):
        function = inspect.unwrap(forward.plain.__func__)  # type: ignore[attr-defined]
        if function not in code:
            code[function] = compile(function)
        yield forward, code[function]


def plain_layers(model: nn.Module) -> None:
    """Undo `compile_layers`."""
    for forward in forwards(model):
        forward.compiled = None


def _with_graph(code: Callable[..., Any], layer: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call compiled code that also computes the gradient of its input, whether that is needed or not."""
    is_needed = torch.is_grad_enabled()
    with torch.enable_grad():
        given = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
        output = code(layer, given, *args, **kwargs)
    return output if is_needed else tree_map_only(Tensor, Tensor.detach, output)
