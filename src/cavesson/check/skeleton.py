"""The model of a run without its weights: every shape is right, and nothing is loaded or downloaded but its config."""

import copy
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cavesson.errors import UserError, first_line
from cavesson.models.checkpointing import recompute_layers
from cavesson.models.load import DTYPES, model_folder, prepare, resolve
from cavesson.models.new import new_model
from cavesson.models.policy import with_adapters
from cavesson.models.settings import ModelSettings, StartSettings
from cavesson.models.tiny import tiny_model
from cavesson.models.trained import adapter_base


def start_of(settings: StartSettings) -> StartSettings:
    """What the weights come from in the end: of an adapter's folder its base, of that one's the same."""
    folder = Path(model_folder(settings.path))
    if not (folder / "adapter_config.json").exists():
        return settings.model_copy(update={"path": str(folder) if folder.exists() else settings.path})
    base = adapter_base(folder)
    return start_of(StartSettings(path=base["path"], gguf_file=base["gguf_file"], dtype=settings.dtype))


def config_of(settings: StartSettings) -> PretrainedConfig:
    """The config of a model that is not loaded.

    Raises:
        UserError: there is no such model.
    """
    start = start_of(settings)
    return copy.deepcopy(_read_config(start.path, start.gguf_file))


@lru_cache  # reading that of a GGUF file takes seconds
def _read_config(path: str, gguf_file: str | None) -> PretrainedConfig:
    if path == "tiny":
        return tiny_model().config
    try:
        return AutoConfig.from_pretrained(resolve(path), gguf_file=gguf_file)  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:
        raise UserError(f"there is no model {path!r}: {first_line(error)}") from None


def skeleton(
    settings: ModelSettings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    classifier: bool = False,
    adapters: bool = True,
    layers: int | None = None,
) -> PreTrainedModel:
    """A model on the meta device, with its adapters.

    Args:
        settings: of the model that learns.
        tokenizer: whose size is that of a new model's vocabulary.
        classifier: a reward model instead of a language model.
        adapters: False leaves them out, as in a frozen copy.
        layers: so many of its layers only; None means all.
    """
    with torch.device("meta"):
        if settings.new is not None:
            model = new_model(settings, tokenizer)
        else:
            config = config_of(settings)
            if layers is not None:
                config = _with_layers(config, layers)
            if classifier:
                config.num_labels = 1
            auto: Any = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
            model = prepare(auto.from_config(config, dtype=DTYPES[settings.dtype]))
        if settings.gradient_checkpointing:
            recompute_layers(model)
        unquantized = settings.model_copy(update={"quantization": None})  # nothing here could be packed in 4 bits
        return with_adapters(model, unquantized) if adapters else model  # type: ignore[return-value]


def layers_of(config: PretrainedConfig) -> int:
    """The number of layers of a model."""
    return int(config.get_text_config().num_hidden_layers)


def _with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return config


def loading_bytes(settings: StartSettings) -> int:
    """Bytes of the files that are in memory beside the weights while these are made of them.

    safetensors maps a file; weights in the file's own numbers stay in the mapped pages and cost nothing twice. Weights
    in other numbers are converted, and both are there until the last is. Of GGUF, every tensor is unpacked to float32.
    """
    start = start_of(settings)
    if start.path == "tiny":
        return 0
    folder = Path(resolve(start.path))
    if start.gguf_file is not None:
        return 0
    wanted = DTYPES[settings.dtype]
    stored = getattr(config_of(start), "dtype", None)
    files = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0
    return 0 if stored == wanted else files


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of different tensors together."""
    return sum(x.numel() * x.element_size() for x in {id(x): x for x in tensors}.values())
