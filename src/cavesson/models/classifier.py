"""A sequence classifier with one output, built from a language model: the reward model before training."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from cavesson.errors import UserError
from cavesson.models.load import check_pad, load_classifier, model_folder, prepare, resolve
from cavesson.models.mapped import forward_dtype
from cavesson.models.quantized import is_quantized
from cavesson.models.settings import ModelSettings, StartSettings
from cavesson.models.trained import load_start

ADDS_START = "adds_start_tokens"
"""Of the config of a reward model: whether the texts it learned from begin with the tokenizer's start tokens."""


def load_reward_model(settings: ModelSettings, pad: int, mapped: bool = False) -> PreTrainedModel:
    """Load a classifier to continue training, or put a new head on the trunk of a language model.

    With the id of the pad token, the classifier finds the end of a text; `mapped` is as in `load_causal`.

    Raises:
        UserError: the model does not exist, its weights are quantized, or transformers cannot classify sequences with
            its architecture.
    """
    if is_classifier(settings.path):
        trained = load_scalar_classifier(settings, mapped)
        _check_whole(trained, settings.path)
        return trained
    base = load_start(settings, mapped=mapped)
    _check_whole(base, settings.path)
    check_pad(settings.path, base, pad)
    config = base.config
    config.num_labels, config.pad_token_id = 1, pad
    try:
        with torch.device("meta"):  # its trunk is discarded
            model: PreTrainedModel = AutoModelForSequenceClassification.from_config(config)
    except ValueError:
        kind = config.model_type
        raise UserError(
            f"{settings.path} is a {kind} model, for which transformers has no sequence classifier"
        ) from None
    prefix = base.base_model_prefix
    setattr(model, prefix, getattr(base, prefix))
    model.score = nn.Linear(config.get_text_config().hidden_size, 1, bias=False, dtype=forward_dtype(base))
    nn.init.normal_(model.score.weight, std=config.get_text_config().hidden_size ** -0.5)
    return prepare(model)


def _check_whole(model: PreTrainedModel, path: str) -> None:
    if is_quantized(model):
        raise UserError(
            f"{path} has quantized weights; a reward model cannot be trained on them, because its adapters are merged "
            "into its weights at the end"
        )


def load_scalar_classifier(settings: StartSettings, mapped: bool = False) -> PreTrainedModel:
    """Load a trained sequence classifier as `load_classifier` does; raise a UserError if it has several outputs."""
    trained, _ = load_classifier(settings.path, settings.dtype, mapped)
    if trained.config.num_labels != 1:
        raise UserError(f"{settings.path} has {trained.config.num_labels} outputs; a reward model has one")
    return trained  # type: ignore[no-any-return]


def is_classifier(path: str) -> bool:
    """Return whether the model at a path is a sequence classifier rather than a language model."""
    path = model_folder(path)
    if path == "tiny" or (Path(path) / "adapter_config.json").exists():
        return False
    try:
        config: Any = AutoConfig.from_pretrained(resolve(path), trust_remote_code=False)
    except (OSError, ValueError):
        return False  # GGUF, or no model, which loading will report
    return any("SequenceClassification" in name for name in config.architectures or ())
