"""Compiled layers for decoding: one token of each row, with keys and values in a preallocated cache.

One code serves all layers, whatever the number of rows and the size of the cache. Keys and values of grouped heads are
read where they are: transformers copies them for every head in compiled code.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from cavesson.models.compiled import Compile, Compiled, Failure, compiled_forwards
from cavesson.models.layers import forwards
from cavesson.models.parts import causal

_NAME = "cavesson_grouped"


def compile_steps(model: nn.Module, compile: Compile, failure: Failure) -> None:
    """Compile the layers of a model for steps inside `layers_for("decoding")`, with a cache that keeps tokens only."""
    config = causal(model).config.get_text_config()
    for number, (forward, code) in enumerate(compiled_forwards(model, partial(_apart, compile))):
        step = partial(_step, code, forward.plain.__self__, number, config)  # type: ignore[attr-defined]
        forward.decoding = Compiled(forward.plain, step, failure)


def plain_steps(model: nn.Module) -> None:
    """Undo `compile_steps`."""
    for forward in forwards(model):
        forward.decoding = None


class _OneLayer:
    """The cache of one layer in place of that of all: the number of a layer would make its code another one."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def update(self, keys: Tensor, values: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        return self._layer.update(keys, values)  # type: ignore[no-any-return]


def _apart(compile: Compile, function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that learning compiles too: the limit of recompilations is counted by code objects."""

    def step(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return compile(step)


def _step(code: Callable[..., Any], layer: nn.Module, number: int, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the compiled code of a layer with its own part of the cache."""

    def own(value: Any) -> Any:
        return _OneLayer(value.layers[number]) if isinstance(value, StaticCache) else value

    before = config._attn_implementation
    config._attn_implementation = _NAME if before == "sdpa" else before
    try:
        return code(layer, *map(own, args), **{name: own(value) for name, value in kwargs.items()})
    finally:
        config._attn_implementation = before


def _grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    """Compute attention of one token, `[B, heads, 1, D]`: the heads that share keys are queries of one head."""
    is_simple = attention_mask is not None and attention_mask.shape[1] == 1 and others.get("position_bias") is None
    if not is_simple or query.shape[1] == key.shape[1]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **others)
    together = query.view(len(query), key.shape[1], -1, query.shape[-1])
    mixed = scaled_dot_product_attention(together, key, value, attention_mask, scale=others.get("scaling"))
    return mixed.view(len(query), 1, query.shape[1], -1), None


AttentionInterface.register(_NAME, _grouped_attention)
