"""A new model and tokenizer, built from texts and a few sizes."""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers import PreTrainedTokenizerFast as FastTokenizer

from cavesson.errors import UserError
from cavesson.models.load import DTYPES, prepare
from cavesson.models.settings import ModelSettings, NewModelSettings
from cavesson.models.tiny import cast_weights, tiny_tokenizer

_END, _PAD, _UNKNOWN = "<|end|>", "<|pad|>", "<|unknown|>"


def new_tokenizer(settings: NewModelSettings, texts: Iterable[str]) -> PreTrainedTokenizerBase:
    """Build a tokenizer with one token per byte, or per character of the texts in code-point order."""
    if settings.vocabulary == "bytes":
        return tiny_tokenizer()
    alphabet = sorted({character for text in texts for character in text})
    vocabulary = {token: i for i, token in enumerate([_END, _PAD, _UNKNOWN, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"eos_token": _END, "pad_token": _PAD, "unk_token": _UNKNOWN}
    return FastTokenizer(tokenizer_object=tokenizer, padding_side="left", **special)


def new_model(settings: ModelSettings, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Build a Llama with random weights, drawn from PyTorch's global generator; see `new_config`."""
    model: PreTrainedModel = LlamaForCausalLM(new_config(settings, tokenizer))
    cast_weights(model, DTYPES[settings.dtype])
    return prepare(model)


def new_config(settings: ModelSettings, tokenizer: PreTrainedTokenizerBase) -> LlamaConfig:
    """Return the config of a new model.

    Raises:
        UserError: the hidden size is not a multiple of twice the number of heads.
    """
    sizes = settings.new
    assert sizes is not None
    if sizes.hidden_size % (2 * sizes.heads):
        raise UserError(
            f"model.new: hidden_size {sizes.hidden_size} must be a multiple of twice the heads ({sizes.heads})"
        )
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=sizes.hidden_size,
        intermediate_size=-(-sizes.hidden_size * 8 // 3 // 32) * 32,  # 3 matrices, as large as 2 of 4 · hidden
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        max_position_embeddings=sizes.max_length,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
