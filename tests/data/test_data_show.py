import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from text_helpers import CHATML, LLAMA2, NO_SIGNS, byte_pairs, word_pieces

from cavesson.data.settings import AnyDataSettings, ShowSettings
from cavesson.data.show import encode_row, seen, show_data, token_text
from cavesson.data.types import Demonstration, Pair, Prompt, Turn
from cavesson.data.view import recognised
from cavesson.errors import UserError

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\n"}]


def shown(path: Path, *, color: bool = False, width: int = 100, **settings: object) -> str:
    """What is printed of a file, as a log file would get it."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system="truecolor" if color else None, force_terminal=color)
    data = {"path": str(path)} | settings.pop("data", {})
    show_data(ShowSettings.model_validate({"data": data, **settings}), console)
    return out.getvalue()


def written(folder: Path, *rows: object) -> Path:
    file = folder / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def cells(text: str) -> list[tuple[str, str]]:
    """The two columns of every line of the tables."""
    return re.findall(r"^│ (\w*) +│ (.*?) *│$", text, flags=re.MULTILINE)


def test_every_token_is_shown_with_what_is_learned_of_it(tmp_path):
    text = shown(written(tmp_path, {"prompt": "a", "completion": " b\tc\n\u200bd"}))
    assert re.search(r"^format +prompt_completion *$", text, flags=re.MULTILINE)
    assert re.search(r"^rows +1 \(demonstrations\) *$", text, flags=re.MULTILINE)
    assert "prompt and response: 11 tokens, 10 learned" in text
    # One byte a token; alone, the three of U+200B are not characters; the end token is a separate word.
    assert cells(text) == [("masked", "a│"), ("learned", " │b│␉│c│↵│"), ("", "�│�│�│d│<|endoftext|>│")]


def test_a_conversation_shows_where_the_assistant_speaks(tmp_path):
    text = shown(written(tmp_path, {"messages": [*TALK, *TALK]}), data={"template": CHATML.replace("|im_", "|")})
    labels = [label for label, _ in cells(text) if label]
    assert labels == ["masked", "learned", "masked", "learned"]
    learned = re.findall(r"learned +│ (.*?) *│\n", text)
    assert learned == ["b│↵│", "b│↵│"]
    assert "the end token <|endoftext|> is not learned, so the model will not learn to stop" in " ".join(text.split())


def test_both_responses_of_a_pair_are_shown(tmp_path):
    text = shown(written(tmp_path, {"prompt": "a", "chosen": " b", "rejected": " c"}))
    assert "rows     1 (pairs)" in text
    assert "columns  prompt ← prompt; chosen ← chosen; rejected ← rejected" in text
    assert "chosen: 4 tokens, 3 learned" in text
    assert "rejected: 4 tokens, 3 learned" in text
    assert cells(text)[1::2] == [("learned", " │b│<|endoftext|>│"), ("learned", " │c│<|endoftext|>│")]


def test_what_is_learned_has_a_colour_of_its_own(tmp_path):
    text = shown(written(tmp_path, {"prompt": "a", "completion": "b"}), color=True)
    assert "\x1b[1;32mb\x1b[0m" in text
    assert "\x1b[1;32ma\x1b[0m" not in text


def test_any_row_can_be_shown_as_any_kind(tmp_path):
    file = written(tmp_path, *({"prompt": text, "completion": "x"} for text in "abc"))
    assert cells(shown(file, row=3, kind="prompts")) == [("prompt", "c│")]
    with pytest.raises(UserError, match="there is no row 4 among 3 demonstrations"):
        shown(file, row=4)
    with pytest.raises(UserError, match="fit no format of pairs"):
        shown(file, kind="pairs")
    with pytest.raises(UserError, match="contains no rows"):
        shown(written(tmp_path))


@pytest.mark.parametrize(
    ("row", "options", "warnings"),
    [
        (Demonstration("the", " old"), {}, []),
        (Demonstration("the", "old"), {}, ["there is no white space between prompt and response"]),
        (Demonstration("", "old"), {}, []),
        (
            Demonstration("the ", "river"),
            {},
            ["one token spans prompt and response: it is learned, and sampling sees a different prompt"],
        ),
        (
            Demonstration("the", " old bridge"),
            {"max_length": 3},
            [
                "longer than data.max_length = 3 tokens, and cut there",
                "prompt and response: the end token </s> is not learned, so the model will not learn to stop",
            ],
        ),
        (
            # An end token in the prompt ends nothing.
            Demonstration("the</s>", " old bridge"),
            {"max_length": 3, "special_tokens": "control"},
            [
                "</s> in the data is read as a control token",
                "longer than data.max_length = 3 tokens, and cut there",
                "prompt and response: the end token </s> is not learned, so the model will not learn to stop",
            ],
        ),
        (
            Demonstration("the</s>", " old bridge<|im_end|>"),
            {},
            ['</s> in the data is read as text; set data.special_tokens = "control" to read it as a control token'],
        ),
        (
            Demonstration("the old bridge is", " it"),
            {"max_length": 2},
            ["dropped: no token of a response is within data.max_length = 2"],
        ),
        (Pair("the", " old", " old"), {}, ["dropped: chosen and rejected are the same tokens"]),
        (Prompt("the old bridge"), {"max_prompt_tokens": 2}, ["longer than data.max_prompt_tokens = 2: dropped"]),
        (Prompt("the old bridge"), {}, []),
        (
            Demonstration((Turn("user", "a"),), (Turn("assistant", "b"),)),
            {"template": NO_SIGNS},
            ["prompt and response: the end token </s> is not learned, so the model will not learn to stop"],
        ),
        (Demonstration((Turn("user", "a"),), (Turn("assistant", "b"),)), {"template": LLAMA2}, []),
    ],
)
def test_what_ruins_runs_is_warned_of(row, options, warnings):
    _, found = encode_row(row, "row 1", byte_pairs(), AnyDataSettings(**options))
    assert found == warnings


def test_a_conversation_without_the_bos_of_plain_texts_is_warned_of():
    row = Demonstration((Turn("user", "a"),), (Turn("assistant", "b"),))
    (shown,), warnings = encode_row(row, "row 1", byte_pairs(bos=True), AnyDataSettings(template=CHATML))
    assert len(shown.ids) == len(shown.labels)
    assert any(text.startswith("plain texts begin with <s>; this conversation does not") for text in warnings)
    _, warnings = encode_row(row, "row 1", byte_pairs(bos=True), AnyDataSettings(template=LLAMA2))
    assert warnings == []


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": TALK}, ("messages", Demonstration)),
        ({"prompt": "a"}, ("prompt", Prompt)),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, ("preference", Pair)),
        ({"text": "a"}, ("text", Demonstration)),
    ],
)
def test_the_kind_is_what_the_first_row_says_most_of(tmp_path, row, expected):
    settings = ShowSettings.model_validate({"data": {"path": str(written(tmp_path, row))}})
    assert recognised(settings) == expected


def test_columns_are_named_before_the_format_is_recognised(tmp_path):
    file = written(tmp_path, {"q": "a", "better": "b", "worse": "c"})
    columns = {"prompt": "q", "chosen": "better", "rejected": "worse"}
    settings = ShowSettings.model_validate({"data": {"path": str(file), "columns": columns}})
    assert recognised(settings) == ("preference", Pair)


def test_characters_that_cannot_be_seen_have_signs():
    assert seen("a b\n\t\x1b\x00\u00a0\u202e") == "a b↵␉␛␀⟨U+00A0⟩⟨RLO⟩"


@pytest.mark.parametrize("tokenizer", [byte_pairs(), word_pieces()], ids=["bpe", "▁"])
def test_a_token_s_leading_space_is_part_of_its_text(tokenizer):
    ids = tokenizer("the old river", add_special_tokens=False)["input_ids"]
    assert "".join(token_text(token, tokenizer) for token in ids).lstrip() == "the old river"
    assert token_text(ids[-1], tokenizer) == " river"
