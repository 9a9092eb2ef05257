"""Every column is used, goes to the rewards, is named as not used, or its row is refused."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cavesson.data.load import Loaded, load
from cavesson.data.settings import ChatSettings
from cavesson.data.types import Demonstration, Pair, Prompt, Turn
from cavesson.data.usage import _MEANT
from cavesson.errors import UserError


def read(folder: Path, kind: type, *rows: dict, **settings: object) -> Loaded:
    file = folder / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load(ChatSettings(path=str(file), **settings), kind)


SAID = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize(
    ("kind", "row", "given", "line"),
    [
        (
            Prompt,
            {"question": "a", "answer": "b", "level": 1},
            {"columns": {"prompt": "question"}},
            "prompt ← question; to the rewards: answer, level",
        ),
        (
            Prompt,
            {"prompt": "a", "system": "S", "tools": [{"name": "f"}], "x": 1},
            {"chat": True},
            "prompt ← prompt, system; tools ← tools; to the rewards: x",
        ),
        (Prompt, {"prompt": "a", "system": "S"}, {"ignore": ("system",)}, "prompt ← prompt; to the rewards: system"),
        (
            Prompt,
            {"prompt": "a", "reward_model": {"truth": 4}},
            {"columns": {"ground_truth": "reward_model.truth"}},
            "prompt ← prompt; to the rewards: reward_model.truth",
        ),
        (
            Demonstration,
            {"instruction": "a", "context": "b", "response": "c", "category": "d"},
            {},
            "prompt ← instruction, context; response ← response; not used: category",
        ),
        (
            Demonstration,
            {"messages": SAID, "system": "S", "source": "x"},
            {},
            "prompt ← system; prompt and response ← messages; not used: source",
        ),
        (
            Demonstration,
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            {},
            "prompt ← prompt; chosen ← chosen; rejected ← rejected",
        ),
        (
            Pair,
            {"q": "a", "chosen": "b", "rejected": "c", "margin": 1, "score": 2},
            {"columns": {"prompt": "q"}},
            "prompt ← q; chosen ← chosen; rejected ← rejected; margin ← margin; not used: score",
        ),
    ],
)
def test_what_columns_are_used_for(tmp_path, kind, row, given, line):
    assert read(tmp_path, kind, row, **given).usage() == [f"columns: {line}"]


def test_later_rows_have_other_columns(tmp_path):
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b", "source": "x"}]
    assert read(tmp_path, Demonstration, *rows).usage() == [
        "columns: prompt ← prompt; response ← completion; not used: source"
    ]
    with pytest.raises(UserError, match="line 2: the column 'question' would be dropped"):
        read(tmp_path, Demonstration, rows[0], rows[0] | {"question": "c"})


def test_sources_of_other_columns_have_their_own_lines(tmp_path):
    for name, row in {"a": {"text": "a"}, "b": {"prompt": "a", "completion": "b"}}.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    mix = [{"path": str(tmp_path / "a.jsonl")}, {"path": str(tmp_path / "b.jsonl")}]
    loaded = load(ChatSettings.model_validate({"mix": mix}), Demonstration)
    assert loaded.usage() == [
        f"columns of {tmp_path}/a.jsonl: prompt and response ← text",
        f"columns of {tmp_path}/b.jsonl: prompt ← prompt; response ← completion",
    ]


def test_a_stream_says_it_of_its_first_row(tmp_path):
    loaded = read(tmp_path, Demonstration, {"text": "a"}, {"text": "b", "n": 1}, stream=True)
    assert loaded.usage() == ["columns: prompt and response ← text"]
    assert len(loaded.train) == 2
    assert loaded.usage() == ["columns: prompt and response ← text; not used: n"]


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        (
            Demonstration,
            {"prompt": "a", "completion": "b", "question": "c"},
            "the column 'question' would be dropped; use it with data.columns = {prompt = \"question\"}, or leave it "
            'out on purpose with data.ignore = ["question"]',
        ),
        (
            Pair,
            {"prompt": "a", "question": "q", "chosen": "b", "rejected": "c"},
            "the column 'question' would be dropped; use it with data.columns = {prompt = \"question\"}, or leave",
        ),
        (
            Demonstration,
            {"messages": SAID, "context": "c", "history": [["d", "e"]]},
            "the columns 'context', 'history' would be dropped; leave them out on purpose with data.ignore = "
            '["context", "history"]',
        ),
        (
            Demonstration,
            {"messages": SAID, "system_prompt": "c"},
            'use it with data.columns = {system = "system_prompt"}',
        ),
        (Demonstration, {"messages": SAID, "images": ["a.png"]}, "Cavesson trains on text only; to train on the text"),
        (Demonstration, {"text": "a", "label": 1}, 'leave it out on purpose with data.ignore = ["label"]'),
        (Prompt, {"messages": SAID, "context": "c"}, "the column 'context' would be dropped"),
        (Prompt, {"prompt": "a", "image": "a.png"}, "the column 'image' would be dropped"),
        (Prompt, {"prompt": "a", "input": "b"}, "the column 'input' would be dropped"),
        (Pair, {"chosen": "a", "rejected": "b", "winner": "model_b"}, "the column 'winner' would be dropped"),
    ],
)
def test_a_column_that_other_data_mean_is_not_dropped(tmp_path, kind, row, message):
    with pytest.raises(UserError) as error:
        read(tmp_path, kind, row)
    assert str(error.value).startswith(f"{tmp_path / 'a.jsonl'} line 1: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    ignored = re.findall(r"data\.ignore = (\[.*?\])", str(error.value))[-1]
    left = read(tmp_path, kind, row, ignore=tuple(json.loads(ignored))).train
    assert len(left) == 1


def test_a_column_that_says_nothing_more_is_no_loss(tmp_path):
    # UltraFeedback: the prompt again, and the chosen conversation again.
    other = [SAID[0], {"role": "assistant", "content": "Go"}]
    row = {"prompt": "Hi", "prompt_id": "x", "chosen": SAID, "rejected": other, "messages": SAID, "score_chosen": 8.0}
    assert read(tmp_path, Pair, row).train == [
        Pair((Turn("user", "Hi"),), (Turn("assistant", "Hello"),), (Turn("assistant", "Go"),))
    ]
    row = {"messages": SAID, "system": "", "tools": [], "images": [], "history": None, "question": "Hi"}
    assert len(read(tmp_path, Demonstration, row).train) == 1


def test_ignored_columns_exist_and_are_not_mapped(tmp_path):
    with pytest.raises(
        UserError, match=r"data\.ignore names 'histroy', but there is no such column; there are history, "
    ):
        read(tmp_path, Prompt, {"prompt": "a", "history": [["b", "c"]]}, ignore=("histroy",), chat=True)
    with pytest.raises(ValidationError, match="columns and ignore both name 'q'"):
        ChatSettings.model_validate({"columns": {"prompt": "q"}, "ignore": ["q"]})
    with pytest.raises(UserError, match=r"data\.columns maps 'system', which text does not read"):
        read(tmp_path, Demonstration, {"text": "a", "s": "S"}, columns={"system": "s"})


names = st.sampled_from([*sorted(_MEANT), "source", "level", "id"])
texts = st.text("ab", min_size=1, max_size=3)
values = (
    st.none()
    | texts
    | st.integers(0, 2)
    | st.booleans()
    | st.just([])
    | st.just(SAID)
    | st.just([{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}])
    | st.lists(st.lists(texts, min_size=2, max_size=2), min_size=1, max_size=2)
)
shapes = st.sampled_from(
    [
        {"prompt": "p"},
        {"prompt": "p", "completion": "c"},
        {"question": "q", "answer": "c"},
        {"instruction": "i", "output": "c"},
        {"chosen": "c", "rejected": "r"},
        {"messages": SAID},
        {"text": "t"},
    ]
)


@given(
    shapes, st.dictionaries(names, values, max_size=4), st.sampled_from([Prompt, Demonstration, Pair]), st.booleans()
)
@settings(max_examples=300)
def test_no_column_is_dropped_without_a_word(tmp_path_factory, shape, others, kind, chat):
    row = others | shape
    try:
        loaded = read(tmp_path_factory.getbasetemp(), kind, row, chat=chat)
    except UserError as error:
        assert "\n" not in str(error)
        return
    (line,) = loaded.usage()
    assert set(re.findall(r"\w+", line)) >= {name for name, value in row.items() if value is not None}
    if kind is Prompt:
        assert loaded.train[0].columns == row
