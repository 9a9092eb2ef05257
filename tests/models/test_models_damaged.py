"""A model folder that was not copied whole is one line, whichever file is cut off."""

from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model

from cavesson.errors import UserError
from cavesson.models.load import load_classifier
from cavesson.models.settings import ModelSettings
from cavesson.models.tiny import tiny_model, tiny_tokenizer
from cavesson.models.trained import load_trained, save_trained

FILES = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
ADAPTER = ["adapter_config.json", "adapter_model.safetensors", "cavesson.json", "tokenizer.json"]


def check(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    for kept in (len(content) // 2, 0):
        (folder / name).write_bytes(content[:kept])
        for load in (load_trained, load_classifier) if name in FILES and "lora" not in folder.name else (load_trained,):
            with pytest.raises(UserError, match=f"cannot load .*{folder.name}") as raised:
                load(str(folder))
            assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", FILES)
def test_a_model_that_is_cut_off(tmp_path: Path, name: str) -> None:
    save_trained(tmp_path / "whole", tiny_model(), tiny_tokenizer(), ModelSettings())
    check(tmp_path / "whole", name)


@pytest.mark.parametrize("name", ADAPTER)
def test_an_adapter_that_is_cut_off(tmp_path: Path, name: str) -> None:
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules="all-linear"))
    save_trained(tmp_path / "lora", model, tiny_tokenizer(), ModelSettings())
    check(tmp_path / "lora", name)
