"""A tokenizer of Llama 2's kind: characters that are not in the vocabulary are written as one token per byte."""

from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

PIECES = ("▁", "a", "b", "#", "▁a", "ab", "##", "▁##", "é", "b#")


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0 to 2 are special, 3 to 258 are the bytes, and those from 259 on are `PIECES`."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    merges = [("▁", "a"), ("a", "b"), ("#", "#"), ("▁", "##"), ("b", "#")]
    model = BPE({name: number for number, name in enumerate(names)}, merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names[:3]])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
