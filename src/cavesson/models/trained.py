"""Saving and loading trained models: Hugging Face folders with an adapter or a whole model."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft import PeftModel
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from cavesson.errors import UserError, first_line
from cavesson.models.load import explain, load_causal, load_tokenizer, model_folder, only_gguf, prepare, resolve
from cavesson.models.parts import adapts_shared, with_saved_adapters
from cavesson.models.settings import ModelSettings, StartSettings
from cavesson.scratch import Scratch

_BASE = "cavesson.json"


def save_trained(
    folder: Path, model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, settings: ModelSettings
) -> None:
    """Save a model in the Hugging Face layout; for an adapter, also save the name of its base model, if it has one."""
    unfinished = folder.with_name(f".{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    transformers_logging.disable_progress_bar()
    tokenizer.save_pretrained(unfinished)
    if not isinstance(model, PeftModel):
        model.save_pretrained(str(unfinished), max_shard_size="5GB")
    else:
        # The vocabulary is never changed, so PEFT need not check it against the base model's config.
        model.save_pretrained(str(unfinished), save_embedding_layers=False)
        if settings.path:
            base = {"path": settings.path, "gguf_file": settings.gguf_file}
            (unfinished / _BASE).write_text(json.dumps(base), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def load_trained(
    path: str, gguf_file: str | None = None, dtype: str = "float32"
) -> tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase]:
    """Load a model with its tokenizer from a run's folder, its `model` folder, any local folder or a Hub name.

    Raises:
        UserError: there is no model.
    """
    place = model_folder(path)
    if is_adapter(place):
        return _adapted(place, dtype), load_tokenizer(place)
    return load_causal(place, gguf_file, dtype), load_tokenizer(place, gguf_file)


def load_start(
    settings: StartSettings, quantization: str | None = None, mapped: bool = False, device: str | None = None
) -> PreTrainedModel:
    """Load the model that a run starts from; adapters of an earlier run are merged into their base.

    The arguments are as in `load_causal`; what adapters are merged into is read, not mapped.

    Raises:
        UserError: there is no model, or its adapters cannot be merged.
    """
    place = model_folder(settings.path)
    if not is_adapter(place):
        return load_causal(place, settings.gguf_file, settings.dtype, quantization, mapped, device)
    merged = _merged(place, settings.dtype)
    if quantization is None:
        return merged
    # transformers quantizes weights only while it reads them.
    with Scratch("loaded") as folder:
        merged.save_pretrained(folder.name)
        del merged  # before the second one is read
        model = load_causal(folder.name, None, settings.dtype, quantization, device=device)
    model.name_or_path = model.config.name_or_path = place
    return model


def is_adapter(place: str) -> bool:
    """Return whether a model folder has adapters only, which belong to another model."""
    return (Path(place) / "adapter_config.json").exists()


def _adapted(place: str, dtype: str) -> PeftModel:
    """Return a model with the adapters of a folder."""
    base = adapter_base(Path(place))
    model = load_start(StartSettings(path=base["path"], gguf_file=base["gguf_file"], dtype=dtype))
    with _damage_told(Path(place)):
        return prepare(with_saved_adapters(model, place))


def _merged(place: str, dtype: str) -> PreTrainedModel:
    adapted = _adapted(place, dtype)
    if adapts_shared(adapted):
        raise UserError(
            f"the adapter in '{place}' changes the input embedding or the output head, which are one tensor: merged, "
            "it would change both; continue from a model without such an adapter"
        )
    merged: Any = adapted.merge_and_unload()
    return prepare(merged).requires_grad_(True)  # type: ignore[no-any-return]  # PEFT had frozen it


def check_start(settings: StartSettings) -> None:
    """Raise a UserError unless a model exists, without loading it."""
    if settings.path == "tiny":
        return
    folder = Path(resolve(model_folder(settings.path)))
    if is_adapter(str(folder)):
        base = adapter_base(folder)
        check_start(StartSettings(path=base["path"], gguf_file=base["gguf_file"]))
    elif folder.is_dir() and settings.gguf_file is not None:
        if not (folder / settings.gguf_file).exists():
            raise UserError(f"there is no file {settings.gguf_file} in {folder}")
    elif settings.gguf_file is None and only_gguf(str(folder)) is None:
        try:
            AutoConfig.from_pretrained(str(folder) if folder.is_dir() else settings.path, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise UserError(explain(settings.path, error)) from error


def load_start_tokenizer(settings: StartSettings) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the model that a run starts from."""
    place = model_folder(settings.path)
    return load_tokenizer(place, None if place != settings.path else settings.gguf_file)


def adapter_base(folder: Path) -> dict[str, Any]:
    with _damage_told(folder):
        if (folder / _BASE).exists():
            return json.loads((folder / _BASE).read_text(encoding="utf-8"))  # type: ignore[no-any-return]
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    name = config.get("base_model_name_or_path")
    if not name:
        raise UserError(
            f"the adapter in '{folder}' does not say which model it belongs to; set base_model_name_or_path in its "
            "adapter_config.json"
        )
    return {"path": name, "gguf_file": None}


@contextmanager
def _damage_told(folder: Path) -> Iterator[None]:
    """Convert errors about damaged files of an adapter to a one-line UserError."""
    try:
        yield
    except (ValueError, SafetensorError) as error:
        raise UserError(f"cannot load the adapter in '{folder}': {first_line(error)}") from error
