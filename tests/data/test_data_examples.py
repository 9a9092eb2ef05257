import json
from pathlib import Path

from dressage.data.examples import load_demonstrations
from dressage.data.tokens import TextSettings
from dressage.models.tiny import tiny_tokenizer


def notes(tmp_path: Path, **changes: object) -> str:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "a", "response": " b"}, {"prompt": "a", "response": " c"}, {"prompt": "a", "response": "x" * 50}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings = TextSettings.model_validate({"path": str(path), "max_length": 10, "overlong": "drop", **changes})
    return "\n".join(load_demonstrations(settings, tiny_tokenizer(), 0).notes)


def test_held_out_examples_that_are_dropped_are_counted(tmp_path: Path) -> None:
    assert "held out: 1 × " in notes(tmp_path, validation=0.34)
    assert "held out" not in notes(tmp_path)


def test_a_stream_says_that_it_does_not_count(tmp_path: Path) -> None:
    assert "uncounted" in notes(tmp_path, stream=True)
