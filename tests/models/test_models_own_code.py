"""Models and tokenizers that come with Python code, which is never run."""

import json
from pathlib import Path
from typing import Any

import pytest

from cavesson.errors import UserError
from cavesson.models.load import load_causal, load_classifier, load_tokenizer
from cavesson.models.settings import StartSettings
from cavesson.models.tiny import tiny_model, tiny_tokenizer
from cavesson.models.trained import check_start


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder whose code writes a file when it is imported."""
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "own.py").write_text(
        f"open({str(tmp_path / 'marker')!r}, 'w').close()\nConfig = Model = Tokenizer = None\n"
    )
    classes = dict.fromkeys(("AutoModelForCausalLM", "AutoModelForSequenceClassification"), "own.Model")
    change(folder / "config.json", model_type="own", auto_map={"AutoConfig": "own.Config", **classes})
    change(folder / "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Tokenizer", None]})
    return folder


def change(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    "load",
    [
        load_causal,
        load_classifier,
        load_tokenizer,
        lambda path: check_start(StartSettings(path=path)),
    ],
)
def test_code_that_comes_with_a_model_is_not_run(folder: Path, tmp_path: Path, load: Any) -> None:
    with pytest.raises(UserError) as raised:
        load(str(folder))
    assert str(folder) in str(raised.value) and "\n" not in str(raised.value)
    assert not (tmp_path / "marker").exists()
