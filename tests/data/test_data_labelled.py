"""Labelled responses, as KTO learns them: unpaired preferences of TRL and others, and both sides of pairs."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from cavesson.data.load import Loaded, load
from cavesson.data.settings import ChatSettings, ViewSettings
from cavesson.data.types import Labelled, Turn
from cavesson.data.view import recognised
from cavesson.errors import UserError


def turns(*said: str) -> tuple[Turn, ...]:
    return tuple(Turn(("user", "assistant")[n % 2], text) for n, text in enumerate(said))


def chat(*said: str) -> list[dict[str, str]]:
    return [turn.message for turn in turns(*said)]


def read(folder: Path, *rows: dict[str, Any], **settings: Any) -> Loaded[Labelled]:
    file = folder / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load(ChatSettings(path=str(file), **settings), Labelled)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "a", "completion": " b", "label": True}, Labelled("a", " b", True)),
        ({"prompt": "a", "response": " b", "label": False}, Labelled("a", " b", False)),
        ({"question": "a", "answer": "b", "label": "False"}, Labelled("a", "b", False)),
        (
            {"prompt": chat("Hi"), "completion": chat("", "Go")[1:], "label": False},
            Labelled(turns("Hi"), turns("", "Go")[1:], False),
        ),
        # The label is about the last answer.
        (
            {"messages": chat("Hi", "Hello", "Why?", "So"), "label": True},
            Labelled(turns("Hi", "Hello", "Why?"), turns("", "So")[1:], True),
        ),
        (
            {"text": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\n\nAssistant: So", "label": False},
            Labelled(turns("Hi", "Hello", "Why?"), turns("", "So")[1:], False),
        ),
    ],
)
def test_a_demonstration_with_a_label(tmp_path: Path, row: dict[str, Any], expected: Labelled) -> None:
    assert read(tmp_path, row).train == [expected]
    assert recognised(ViewSettings.model_validate({"data": {"path": str(tmp_path / "a.jsonl")}})).kind is Labelled


def test_what_follows_the_last_question_is_the_response(tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": "Ulm?"},
        {"role": "assistant", "content": "I look."},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "It is 7."},
    ]
    (row,) = read(tmp_path, {"messages": talk, "label": True}).train
    assert [turn.role for turn in row.prompt] == ["user"]
    assert [turn.role for turn in row.response] == ["assistant", "tool", "assistant"]


PAIRS: list[dict[str, Any]] = [
    {"prompt": "a", "chosen": " b", "rejected": " c"},
    {"prompt": "d", "chosen": " e", "rejected": " f"},
]


def test_pairs_are_unpaired_as_by_trl(tmp_path: Path) -> None:
    """TRL puts all chosen responses before the rejected ones."""
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    theirs = trl.unpair_preference_dataset(Dataset.from_list(PAIRS)).to_list()
    expected = {(row["prompt"], row["completion"], row["label"]) for row in theirs}
    assert [(one.prompt, one.response, one.label) for one in read(tmp_path, *PAIRS).train] == [
        ("a", " b", True),
        ("a", " c", False),
        ("d", " e", True),
        ("d", " f", False),
    ]
    assert {(one.prompt, one.response, one.label) for one in read(tmp_path, *PAIRS).train} == expected


def test_binarised_ultrafeedback_and_hh(tmp_path: Path) -> None:
    ultra = {
        "prompt": "Hi", "prompt_id": "7", "chosen": chat("Hi", "Hello"), "rejected": chat("Hi", "Go"),
        "messages": chat("Hi", "Hello"), "score_chosen": 8.0, "score_rejected": 2.5,
    }  # fmt: skip
    said = {label: turns("", text)[1:] for label, text in ((True, "Hello"), (False, "Go"))}
    expected = [Labelled(turns("Hi"), response, label) for label, response in said.items()]
    assert read(tmp_path, ultra).train == expected
    texts = {name: f"\n\nHuman: Hi\n\nAssistant: {text}" for name, text in (("chosen", "Hello"), ("rejected", "Go"))}
    assert read(tmp_path, texts).train == expected


@pytest.mark.parametrize("fraction", [0.2, 0.3, 0.5])
def test_both_responses_of_a_pair_are_held_out_or_neither(tmp_path: Path, fraction: float) -> None:
    """Of five pairs, 1, 1.5 or 2.5 are the fraction: rounded to 1, 2 and 2, with two responses each."""
    pairs = [{"prompt": str(n), "chosen": " b", "rejected": " c"} for n in range(5)]
    loaded = read(tmp_path, *pairs, validation=fraction)
    held_out = [one.prompt for one in loaded.held_out]
    assert held_out == [str(n) for n in range(5) for _ in range(2)][-2 * round(5 * fraction) :]
    assert not {one.prompt for one in loaded.train} & {*held_out}


def test_limits_count_rows_of_the_file(tmp_path: Path) -> None:
    assert [one.prompt for one in read(tmp_path, *PAIRS, max_rows=1).train] == ["a", "a"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "completion": " b"}, "line 2: 'label' is missing, expected true or false"),
        ({"prompt": "a", "completion": " b", "label": None}, "line 2: 'label' is null, expected true or false"),
        ({"prompt": "a", "completion": " b", "label": 4.5}, "line 2: 'label' is 4.5, expected true or false"),
        ({"prompt": "a", "completion": " b", "kto_tag": True}, "line 2: 'label' is missing"),
    ],
)
def test_a_row_without_a_label_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"a.jsonl {message}"):
        read(tmp_path, {"prompt": "a", "completion": " b", "label": True}, row)


def test_a_label_under_another_name(tmp_path: Path) -> None:
    row = {"prompt": "a", "completion": " b", "kto_tag": False}
    assert read(tmp_path, row, columns={"label": "kto_tag"}).train == [Labelled("a", " b", False)]
