"""The model of a run without its weights: every shape is right, and only its config is loaded or downloaded."""

import copy
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cavesson.errors import UserError, first_line
from cavesson.models.layers import recompute_layers
from cavesson.models.load import DTYPES, model_folder, prepare, resolve
from cavesson.models.new import new_config, new_model
from cavesson.models.parts import trunk
from cavesson.models.policy import with_adapters
from cavesson.models.settings import ModelSettings, StartSettings
from cavesson.models.tiny import tiny_model
from cavesson.models.trained import adapter_base

QUANTIZED_BITS = {"nf4": 4.127, "int8": 8.0}
"""Bits per weight; of nf4 with its twice quantized scales (arXiv:2305.14314, section 3)."""


def start_of(settings: StartSettings) -> StartSettings:
    """Return the settings of the model that the weights come from, following adapters to their base recursively."""
    folder = Path(model_folder(settings.path))
    if not (folder / "adapter_config.json").exists():
        return settings.model_copy(update={"path": str(folder) if folder.exists() else settings.path})
    base = adapter_base(folder)
    return start_of(StartSettings(path=base["path"], gguf_file=base["gguf_file"], dtype=settings.dtype))


def config_of(settings: StartSettings) -> PretrainedConfig:
    """Return the config of a model without loading the model.

    Raises:
        UserError: there is no such model.
    """
    start = start_of(settings)
    return copy.deepcopy(_read_config(start.path, start.gguf_file))


def trained_config(settings: ModelSettings, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """Return the config of the trained model, which may be a new one with the vocabulary of the tokenizer."""
    return config_of(settings) if settings.new is None else new_config(settings, tokenizer)


@lru_cache  # reading the config of a GGUF file takes seconds
def _read_config(path: str, gguf_file: str | None) -> PretrainedConfig:
    if path == "tiny":
        return tiny_model().config
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            resolve(path), gguf_file=gguf_file, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise UserError(f"there is no model {path!r}: {first_line(error)}") from None
    with suppress(OSError):  # most models have a generation config, whose end tokens are those that sampling ends at
        config.eos_token_id = GenerationConfig.from_pretrained(resolve(path)).eos_token_id
    return config


def skeleton(
    settings: ModelSettings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    classifier: bool = False,
    adapters: bool = True,
    layers: int | None = None,
) -> PreTrainedModel:
    """Build a model on the meta device, with its adapters.

    Args:
        settings: settings of the trained model.
        tokenizer: gives the vocabulary size of a new model.
        classifier: whether to build a reward model instead of a language model.
        adapters: whether to add adapters; False for a frozen copy.
        layers: number of layers to keep; None means all.
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
        recompute_layers(model, settings.recomputed)
        unquantized = settings.model_copy(update={"quantization": None})  # meta tensors cannot be quantized
        if not adapters:
            return model
        adapted = with_adapters(model, unquantized)
    _cast_adapters(adapted, settings)
    return adapted  # type: ignore[return-value]


def _cast_adapters(model: nn.Module, settings: ModelSettings) -> None:
    """Give adapters the dtype that they have in a run: PEFT leaves those on the meta device in float32."""
    if settings.lora is None or settings.lora.dora or settings.quantization is not None:
        return
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(DTYPES[settings.dtype])


def layers_of(config: PretrainedConfig) -> int:
    """Return the number of layers of a model."""
    return int(config.get_text_config().num_hidden_layers)


def _with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return config


def loading_bytes(settings: StartSettings) -> int:
    """Return the bytes of files in memory in addition to the weights while the model is loaded.

    safetensors maps a file, so weights in the dtype of the file stay in the mapped pages and are not duplicated.
    Weights in another dtype are converted, and both copies exist until the last is converted. For GGUF, every tensor
    is unpacked to float32.
    """
    start = start_of(settings)
    if start.path == "tiny" or start.gguf_file is not None:
        return 0
    if getattr(config_of(start), "dtype", None) == DTYPES[settings.dtype]:
        return 0
    return sum(file.stat().st_size for file in Path(resolve(start.path)).glob("*.safetensors"))


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the total bytes of distinct tensors."""
    return sum(x.numel() * x.element_size() for x in {id(x): x for x in tensors}.values())


def weight_bytes(model: nn.Module, settings: ModelSettings) -> int:
    """Return the bytes of the weights, taking quantization into account."""
    weights = bytes_of(model.parameters())
    if settings.quantization is None:
        return weights
    packed = [m.weight for m in trunk(model).modules() if isinstance(m, nn.Linear) and not m.weight.requires_grad]
    numbers = sum(weight.numel() for weight in packed)
    return weights - bytes_of(packed) + round(numbers * QUANTIZED_BITS[settings.quantization] / 8)
