"""Settings of other trainers and of their tokenizers, for run.json."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any


def plain(config: Any) -> Any:
    """Convert settings to values that JSON can represent."""
    if config is None or isinstance(config, str | int | float | bool):
        return config
    if isinstance(config, SimpleNamespace):
        return plain(vars(config))
    if isinstance(config, Mapping) or hasattr(config, "items"):
        return {str(key): plain(value) for key, value in config.items()}
    if isinstance(config, list | tuple) or type(config).__name__ == "ListConfig":
        return [plain(value) for value in config]
    return str(config)


def ends_of(tokenizer: Any) -> dict[str, list[int]]:
    """Return the end token of a tokenizer as an entry of run.json; none if it has no end token."""
    end = getattr(tokenizer, "eos_token_id", None)
    return {} if end is None else {"eos_token_ids": [int(end)]}
