"""The parts of a causal language model: the trunk, which ends in hidden states, and the head, which computes logits.

Scoring and sampling apply the head themselves, a few tokens at a time. How an architecture scales or bounds its logits
is read from its config and verified against the model's own logits before use.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from cavesson.errors import UserError, first_line
from cavesson.ops.head import Head, head_logits
from cavesson.ops.packing import RowShape

SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Fields of configs that bound the logits."""
FACTORS = ("logit_scale", "lm_head_multiplier")
"""Fields that multiply them."""
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
"""Fields that divide them, or the last hidden states."""
UNSUPPORTED = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What architectures raise when they are called in a way that they do not know."""
_MULTIPLIES_BY_DIVISOR = ("hyperclovax",)
"""Architectures that have the name of the one and do the other."""


def causal(model: nn.Module) -> PreTrainedModel:
    """Return the causal language model without any PEFT wrapper."""
    return model.get_base_model() if isinstance(model, PeftModel) else model  # type: ignore[return-value]


@contextmanager
def outdated_names() -> Iterator[None]:
    """Hide what transformers says of PEFT, which uses a deprecated name of an attribute."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def with_saved_adapters(model: PreTrainedModel, folder: str | Path) -> PeftModel:
    """Return a model with the adapters of a folder."""
    with outdated_names():
        return PeftModel.from_pretrained(model, folder)


def trunk(model: nn.Module) -> nn.Module:
    """Return the model without its head; adapters inside it stay active."""
    inner = causal(model)
    names = (inner.base_model_prefix, "model")  # Llama 4's text model lacks the module named by its prefix
    return next((getattr(inner, name) for name in names if hasattr(inner, name)), inner)


def probe_ids(model: nn.Module, count: int) -> Tensor:
    """Return token ids `[count]` on the model's device for comparing computations, modulo the vocabulary size."""
    inner = causal(model)
    vocabulary: int = inner.config.get_text_config().vocab_size
    return (torch.arange(count, device=inner.device) + 2) % vocabulary


def adapts_shared(model: nn.Module) -> bool:
    """Return whether there is an adapter on the input embedding or the output head, and both are the same tensor.

    With the adapter apart, only one of them differs from the base; merged, both do.
    """
    inner = causal(model)
    ends: tuple[Any, Any] = inner.get_input_embeddings(), inner.get_output_embeddings()
    if not any(isinstance(end, BaseTunerLayer | ModulesToSaveWrapper) for end in ends):
        return False
    first, last = (_base_weight(end) for end in ends)
    return first is not None and first is last


def _base_weight(layer: Any) -> Tensor | None:
    """Return the weight of a layer without its adapter."""
    bare = layer.original_module if isinstance(layer, ModulesToSaveWrapper) else layer
    return getattr(bare.get_base_layer() if isinstance(bare, BaseTunerLayer) else bare, "weight", None)


def embedding_rows(model: nn.Module) -> int:
    """Return the number of tokens that have an embedding."""
    embeddings: Any = causal(model).get_input_embeddings()
    return int(embeddings.weight.shape[0])


def position_limit(config: PretrainedConfig) -> int | None:
    """Return the maximum number of tokens in a sequence that the model supports, or None if it has no such limit."""
    text = config.get_text_config()
    most = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None) or 0
    rope = getattr(text, "rope_parameters", None) or {}
    if most <= 0 or "factor" not in rope:
        return most if most > 0 else None
    return max(most, int(rope["factor"] * (rope.get("original_max_position_embeddings") or most)))


def row_shape(config: PretrainedConfig) -> RowShape:
    """Return what rows of several examples may look like, and what their width costs.

    Per token and layer, a transformer of hidden size H multiplies by about 12·H² weights, and attention by 2·H numbers
    for each token in the row. Attention in chunks counts them from the start of the row, so that a row has one chunk.
    """
    text = config.get_text_config()
    limits = [position_limit(config), getattr(text, "attention_chunk_size", None)]
    return RowShape(6 * text.hidden_size, min((limit for limit in limits if limit), default=None))


def output_head(model: nn.Module) -> Head:
    """Return the language-model head, with the scale and the soft-cap of its config."""
    inner = causal(model)
    output: Any = inner.get_output_embeddings()
    config = inner.config.get_text_config()
    softcap = next((value for name in SOFTCAPS if (value := getattr(config, name, None)) is not None), None)
    return Head(output.weight, getattr(output, "bias", None), _scale(config), softcap)


def _scale(config: PretrainedConfig) -> float:
    scale = 1.0
    for name in (*FACTORS, *DIVISORS):
        value = getattr(config, name, None)
        if value is not None:
            divides = name in DIVISORS and config.model_type not in _MULTIPLIES_BY_DIVISOR
            scale *= 1 / value if divides else value
    return scale


@torch.no_grad()
def check_head(model: nn.Module) -> None:
    """Compare the head used for scoring and sampling with the model's own logits.

    The model's own head gets hidden states scaled by 0, 1 and 100: the first reveals a bias, the last a bound on the
    logits.

    Raises:
        UserError: they differ.
    """
    inner = causal(model)
    kind = inner.config.model_type
    try:
        sizes = torch.tensor([0, 1, 100], device=inner.device, dtype=inner.dtype)[:, None, None]
        states, expected = _own_logits(model, sizes)
        seen = head_logits(states.flatten(0, 1), output_head(model), 1.0).view(*states.shape[:2], -1).float()
    except UNSUPPORTED as error:
        raise UserError(
            f"{kind} has no language-model head that is known here ({type(error).__name__}: {first_line(error)})"
        ) from error
    if seen.shape != expected.shape or not bool(close(seen, expected, inner.dtype).all()):
        raise UserError(f"{kind} changes its logits in a way that is not supported, so that it would be scored wrongly")


def close(seen: Tensor, expected: Tensor, dtype: torch.dtype) -> Tensor:
    """Return whether the distributions of logits `[B, L, V]` agree in each row, within the precision of this dtype."""
    # A constant shared by all logits of a token does not affect the distribution, and may dominate their size.
    seen, expected = (x.float() - x.float().mean(-1, keepdim=True) for x in (seen, expected))
    difference, size = (x.abs().flatten(1).amax(1) for x in (seen - expected, expected))
    return difference <= tolerance(dtype) * size


@contextmanager
def untied(model: nn.Module) -> Iterator[None]:
    """Give the output head a copy of the embedding that it shares, if it does, for as long as the block lasts."""
    inner: Any = causal(model)
    config, head = inner.config.get_text_config(), inner.get_output_embeddings()
    if not config.tie_word_embeddings:
        yield
        return
    shared = head.weight
    head.weight, config.tie_word_embeddings = nn.Parameter(shared.detach().clone(), requires_grad=False), False
    try:
        yield
    finally:
        head.weight, config.tie_word_embeddings = shared, True


def tolerance(dtype: torch.dtype) -> float:
    """Return the relative tolerance for a dtype: bfloat16 has 8 significant bits, float32 has 24.

    In bfloat16, padding alone moved logits of a 135-million-parameter model by 0.046 of the largest logit, and a cache
    with the wrong tokens moved those of small models by 0.3.
    """
    return 0.1 if dtype == torch.bfloat16 else 1e-3


def _own_logits(model: nn.Module, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden states `[3, 4, H]`, with a different scale per row, and the model's logits `[3, 4, V]` for them."""
    inner = causal(model)
    tokens = probe_ids(model, 4).expand(3, 4)
    states = trunk(model)(input_ids=tokens, use_cache=False).last_hidden_state

    def resized(_module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        return inputs[0] * sizes

    hook = inner.get_output_embeddings().register_forward_pre_hook(resized)
    try:
        logits = inner(input_ids=tokens, use_cache=False).logits
    finally:
        hook.remove()
    return states * sizes, logits.float()
