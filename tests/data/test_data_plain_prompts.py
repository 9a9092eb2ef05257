"""Plain prompts for a model that has a chat template: a remark shows how they are read, and how they could be."""

import json
from pathlib import Path
from typing import Any

import pytest
from text_helpers import CHATML, byte_pairs

from cavesson.data.chat import Chat
from cavesson.data.encode import Asked, Encoder
from cavesson.data.examples import tokenize_demonstrations
from cavesson.data.prompts import load_prompts
from cavesson.data.settings import AnyDataSettings, PromptSettings, TextSettings
from cavesson.data.show import encode_row
from cavesson.data.types import Demonstration, Prompt, Turn

PLAIN = 'the tokenizer has a chat template, but the prompt is read as plain text, "Why?"; with data.chat = true, it '
RENDERED = (
    'would be read as "<|im_start|>user\\nWhy?<|im_end|>\\n<|im_start|>assistant\\n"; set data.chat to one of the two'
)


@pytest.fixture
def tokenizer() -> Any:
    tokenizer = byte_pairs()
    tokenizer.chat_template = CHATML
    return tokenizer


def test_prompts_of_a_run_are_quoted_once_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Why?", "How?", "Who?")))
    (note,) = load_prompts(PromptSettings(path=str(path)), tokenizer).notes
    assert note.startswith(f"3 × {PLAIN}{RENDERED} (first: ") and "Who?" not in note
    for is_chat in (True, False):  # once it is said which of the two is meant, there is nothing to remark
        assert load_prompts(PromptSettings(path=str(path), chat=is_chat), tokenizer).notes == ()


def test_examples_and_rows_that_are_shown_have_the_same_remark(tokenizer: Any) -> None:
    rows = [Demonstration("Why?", " Because."), Demonstration("How?", " So.")]
    examples = tokenize_demonstrations(rows, tokenizer, TextSettings())
    list(examples)
    assert any(f"{PLAIN}{RENDERED}" in note for note in examples.notes())
    for row in (rows[0], Prompt("Why?", {})):
        assert f"{PLAIN}{RENDERED}" in encode_row(row, "row 1", tokenizer, AnyDataSettings())[1]


@pytest.mark.parametrize(
    ("asked", "changes"),
    [
        (Asked("row 1", "Why?"), {"of_texts": True}),
        (Asked("row 1", "<|im_start|>user\nWhy?"), {"special_tokens": "control"}),  # a template written by hand
        (Asked("row 1", (Turn("user", "Why?"),)), {}),
        (Asked("row 1", "", ("Once upon a time",)), {}),  # a text, not an answer
    ],
)
def test_what_is_meant_so_has_none(tokenizer: Any, asked: Asked, changes: dict[str, Any]) -> None:
    assert not any("chat template" in remark for remark in Encoder(Chat(tokenizer, **changes)).remarks(asked))


def test_without_a_template_there_is_none() -> None:
    assert Encoder(Chat(byte_pairs())).remarks(Asked("row 1", "Why?")) == []


def test_long_prompts_are_shortened(tokenizer: Any) -> None:
    (remark,) = Encoder(Chat(tokenizer)).remarks(Asked("row 1", "a" * 1000))
    assert len(remark) < 450 and "…" in remark
