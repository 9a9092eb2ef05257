"""How much sampling needs at the same time, and checks that it fits into the model's context and into memory."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from cavesson.errors import UserError, first_line
from cavesson.models.device_memory import free_memory
from cavesson.models.parts import UNSUPPORTED, causal, embedding_rows, position_limit, probe_ids, trunk

BYTES_PER_TOKEN = 100
"""Of a response while it is sampled, on CPU: its random number (three copies of 8 bytes), its id as a Python number
(36) and in a tensor (8), the mask (two of 8, then 4), and its log-probability (three of 4)."""
BYTES_ON_GPU = 12
"""Of them on a GPU: its random number and its log-probability."""


def check_room(
    model: nn.Module,
    responses: int,
    rows: int,
    prompt: int,
    longest: int,
    replaces: bool = False,
    has_turns: bool = False,
) -> None:
    """Check that sampling will fit into the model's context and into memory, before anything is allocated.

    Of the `responses` of a step, as many `rows` are sampled at the same time. `prompt` and `longest` are the most
    tokens of a prompt and of a response. With `replaces`, waiting prompts replace rows that have ended;
    with `has_turns`, what as many rows have read is kept beside what is being read.

    Raises:
        UserError: the model has too few positions, or there is too little memory.
    """
    limit = position_limit(causal(model).config)
    if limit is not None and prompt + longest > limit:
        raise UserError(
            f"prompts of up to {prompt:,} and responses of up to {longest:,} tokens do not fit into the model's "
            f"{limit:,} positions; reduce sampling.max_new_tokens to {max(1, limit - prompt):,}, or use shorter prompts"
        )
    needs = {torch.device("cpu"): responses * longest * BYTES_PER_TOKEN}
    device = causal(model).device
    kept = kept_bytes(model, responses, rows, prompt, longest, replaces, has_turns)
    needs[device] = needs.get(device, responses * longest * BYTES_ON_GPU) + kept
    for device, size in needs.items():
        free = free_memory(device)
        if size > free:
            raise UserError(
                f"sampling {rows} responses of up to {longest:,} tokens at the same time needs {size / 2**30:,.1f} GiB "
                f"of memory on {device}, and {free / 2**30:,.1f} GiB are free; reduce sampling.max_new_tokens or the "
                "batch size"
            )


def kept_bytes(
    model: nn.Module, responses: int, rows: int, prompt: int, longest: int, replaces: bool, has_turns: bool
) -> int:
    """Return the bytes of all keys and values that sampling keeps; the arguments are those of `check_room`."""
    waiting, columns = replaces and rows < responses, prompt + longest
    columns += spare_columns(columns) if waiting else 0
    # Both passes are made in any case: with sharded weights, all processes must make the same ones.
    kept = cache_bytes(model, 2 * rows if has_turns else rows, columns)
    return kept + cache_bytes(model, replaced_together(rows) if waiting else 0, prompt)


def check_embedded(model: nn.Module, prompts: Iterable[Sequence[int]]) -> None:
    """Raise a UserError unless every token of some prompts has an embedding."""
    rows = embedding_rows(model)
    largest = max((max(ids) for ids in prompts), default=0)
    if largest >= rows:
        raise UserError(
            f"a prompt has the token {largest}, but the model has embeddings for {rows:,} tokens only: the tokenizer "
            "belongs to another model, or tokens were added to it without model.resize_token_embeddings"
        )


def replaced_together(rows: int) -> int:
    """Return how many rows have to end before waiting prompts replace them.

    Reading several prompts takes about as long as reading one, so single rows wait. More at a time would need more
    memory, because what is read is stored a second time.
    """
    return max(1, rows // 8)


def spare_columns(size: int) -> int:
    """Return how many columns the cache has beyond those of the longest sequence, of `size` tokens.

    Rows that begin later need them; with few of them, what has been read is moved often.
    """
    return size // 8 + 1


@torch.no_grad()
def cache_bytes(model: nn.Module, rows: int, size: int) -> int:
    """Return the bytes of the keys and values of `rows` sequences of `size` tokens, extrapolated from a probe.

    The probe is one sequence of two tokens.

    Raises:
        UserError: the model cannot read a prompt with a cache.
    """
    ids = probe_ids(model, 2)[None]
    try:
        cache = getattr(trunk(model)(input_ids=ids, use_cache=True), "past_key_values", None)
    except UNSUPPORTED as error:
        kind = causal(model).config.model_type
        reason = f"{type(error).__name__} ({first_line(error)})"
        raise UserError(f"{kind} cannot be sampled from: a prompt with a cache raises {reason}") from error
    total = 0
    for layer in getattr(cache, "layers", ()):
        # Layers without attention have no keys and values, or empty ones.
        kept = (getattr(layer, "keys", None), getattr(layer, "values", None))
        tensors = [x for x in kept if isinstance(x, Tensor) and x.ndim == 4]
        tokens = min(size, getattr(layer, "sliding_window", None) or size)
        total += sum(rows * tokens * x.numel() * x.element_size() // x.shape[-2] for x in tensors)
    return total
