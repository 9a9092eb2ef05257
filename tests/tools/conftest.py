"""Models on disk."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerBase

from cavesson.models.tiny import tiny_model, tiny_tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`one` and `two`, language models with a chat template that care what they read, and `judge`, a reward model."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    for seed, name in enumerate(("one", "two")):
        model = tiny_model(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter *= 4.0
        _save(model, tokenizer, root / name)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=258, pad_token_id=1, num_labels=1, initializer_range=0.5, **sizes)
    _save(LlamaForSequenceClassification(config), tokenizer, root / "judge")
    return root


def _save(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
