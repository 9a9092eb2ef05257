"""A stand-in vLLM server, and the model that it serves."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_stand_in import StandIn, serving

from cavesson.models.tiny import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def untied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as vLLM can reload it: with its own output head."""
    folder = tmp_path_factory.mktemp("model")
    model: Any = tiny_model()
    head = model.get_output_embeddings()
    head.weight = type(head.weight)(head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def server(untied_folder: Path) -> Iterator[StandIn]:
    with serving(untied_folder) as one:
        yield one
