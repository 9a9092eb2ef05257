"""Merging an adapter into its base model, which gives an ordinary Hugging Face folder."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from peft.utils import load_peft_weights
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from cavesson.errors import UserError, first_line
from cavesson.models.load import DTYPES, load_tokenizer, model_folder, prepare, resolve
from cavesson.models.parts import causal, with_saved_adapters
from cavesson.models.settings import MergeSettings
from cavesson.models.trained import adapter_base, load_trained
from cavesson.record.write.new_folder import new_folder
from cavesson.record.write.writable import check_new

# Merged and unmerged weights round differently. Logits of a 135-million-parameter model differed by up to 5e-6 of the
# largest one in float32 and by 0.04 of it in bfloat16, which has 8 significant bits.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
_TEXTS = (
    "The ferry leaves at seven, and whoever misses it has to walk around the lake.",
    "def mean(values):\n    return sum(values) / len(values)",
    "3 + 4 = 7, 12 / 5 = 2.4",
    "春江潮水连海平",
)
_LONGEST = 64


class Merged(NamedTuple):
    """The result of a merge, and how much its logits differ from those of the unmerged model."""

    folder: Path
    base: str
    dtype: str
    layers: int
    """layers that had an adapter"""
    difference: float
    """largest difference between a merged and an unmerged logit"""
    effect: float
    """largest difference between a logit with the adapter and one without"""
    largest: float
    """largest unmerged logit, in absolute value"""

    def __str__(self) -> str:
        return (
            f"base     {self.base} ({self.dtype})\n"
            f"merged   {self.layers} layers; the adapter changes logits (up to {self.largest:.3g}) by up to "
            f"{self.effect:.3g}\n"
            f"checked  merged and unmerged logits differ by at most {self.difference:.2g}\n"
            f"model    {self.folder}"
        )


def merge(adapter: str, out: Path, settings: MergeSettings | None = None) -> Merged:
    """Merge a LoRA or DoRA adapter into its base model on CPU, and write the result as a new model folder `out`.

    The adapter is a run's folder, its `model` folder, or any folder with a PEFT adapter, of a language model or of a
    sequence classifier such as a reward model. Weights are merged in place, layer by layer, so that memory holds only
    one copy of the model. Before anything is written, the logits of the merged model on a few texts are compared with
    those of the unmerged one.

    Raises:
        UserError: there is no adapter, `out` exists, or the merged model's logits differ from the unmerged model's.
    """
    check_new(out, "name a new folder")
    folder = Path(model_folder(adapter))
    if not (folder / "adapter_config.json").exists():
        raise UserError(f"{adapter} has no adapter to merge; a whole model can be used as it is")
    wanted = (settings or MergeSettings()).dtype
    dtype = _stored_dtype(str(folder)) if wanted == "auto" else wanted
    model, tokenizer = _load(folder, dtype)
    layers = sum(hasattr(module, "merge") for module in model.modules())
    texts = _check_texts(tokenizer)
    with_adapter = _logits(model, texts)
    with model.disable_adapter():
        without = _logits(model, texts)
    merged: Any = model.merge_and_unload()
    report = Merged(
        folder=out,
        base=adapter_base(folder)["path"],
        dtype=dtype,
        layers=layers,
        difference=_farthest(_logits(merged, texts), with_adapter),
        effect=_farthest(without, with_adapter),
        largest=float(with_adapter.abs().max()),
    )
    _check_same(adapter, report)
    with new_folder(out) as place:
        merged.save_pretrained(str(place))
        tokenizer.save_pretrained(str(place))
    return report


def _check_same(adapter: str, merged: Merged) -> None:
    """Raise a UserError if the merge changed the logits by more than the tolerance."""
    if not merged.difference <= TOLERANCE[merged.dtype] * merged.largest:  # also where it is NaN
        raise UserError(
            f"merging {adapter} changes the outputs of the model: logits up to {merged.largest:.3g} differ by up to "
            f"{merged.difference:.3g}; nothing was written" + ("; try --dtype float32" * (merged.dtype != "float32"))
        )


def _load(folder: Path, dtype: str) -> tuple[PeftModel, PreTrainedTokenizerBase]:
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    if config["task_type"] != "SEQ_CLS":
        model, tokenizer = load_trained(str(folder), dtype=dtype)
    else:
        tokenizer = load_tokenizer(str(folder))
        model = _load_classifier(folder, dtype)
        # The merged model finds the end of a text by its pad tokens.
        causal(model).config.pad_token_id = tokenizer.pad_token_id
    assert isinstance(model, PeftModel)
    return prepare(model), tokenizer


def _load_classifier(folder: Path, dtype: str) -> PeftModel:
    """Load a sequence classifier from its base model and adapter; the adapter may include the head."""
    base, head = adapter_base(folder), _head(folder)
    count = {} if head is None else {"num_labels": len(head)}
    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            resolve(model_folder(base["path"])),
            dtype=DTYPES[dtype],
            output_loading_info=True,
            trust_remote_code=False,
            **count,
        )
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load a classifier from {base['path']!r}: {first_line(error)}") from error
    model, info = loaded
    if info["missing_keys"] and head is None:
        raise UserError(f"{folder} is not a trained classifier: {sorted(info['missing_keys'])[0]} is missing")
    return with_saved_adapters(model, folder)


def _head(folder: Path) -> Tensor | None:
    """Return the weight `[labels, H]` of the classification head in an adapter, or None if it has none."""
    weights: dict[str, Tensor] = load_peft_weights(str(folder), device="cpu")
    heads = ("score.weight", "classifier.weight", "classifier.out_proj.weight")
    return next((weight for name, weight in weights.items() if name.endswith(heads)), None)


def _stored_dtype(path: str) -> str:
    """Return the dtype in which a model is stored, or float32 if that dtype is not supported, as in GGUF files."""
    if path == "tiny":  # built in, so not a name on the Hub
        return "float32"
    folder = Path(model_folder(path))
    if (folder / "adapter_config.json").exists():
        return _stored_dtype(adapter_base(folder)["path"])
    try:
        stored = AutoConfig.from_pretrained(resolve(str(folder)), trust_remote_code=False).dtype
    except (OSError, ValueError):  # there is only a GGUF file, or loading will report the error
        return "float32"
    return next((name for name, dtype in DTYPES.items() if dtype == stored), "float32")


def _check_texts(tokenizer: PreTrainedTokenizerBase) -> list[Tensor]:
    """Return token ids `[1, L]` of a few texts, or the first ids of the vocabulary if all encode to nothing."""
    rows = [tokenizer(text)["input_ids"][:_LONGEST] for text in _TEXTS]
    known = [row for row in rows if row] or [list(range(min(len(tokenizer), _LONGEST)))]
    return [torch.tensor([row]) for row in known]


@torch.no_grad()
def _logits(model: PreTrainedModel | PeftModel, texts: list[Tensor]) -> Tensor:
    return torch.cat([model(input_ids=ids).logits.float().flatten() for ids in texts])


def _farthest(first: Tensor, second: Tensor) -> float:
    return float((first - second).abs().max())
