import csv
import json
import tempfile
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dressage.data.prompts import DataSettings, PromptSet, load_prompts, padded_prompts, read_table, tokenize
from dressage.errors import UserError

TEXTS = ["The old bridge", 'said "yes", then', "größer 🙂", "two\nlines"]
ANSWERS = [1, 2, 3, 4]


def write(file: Path) -> Path:
    """The same two columns in the format of the file's name."""
    rows = [{"prompt": text, "answer": answer} for text, answer in zip(TEXTS, ANSWERS, strict=True)]
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif file.suffix == ".csv":
        with file.open("w", encoding="utf-8", newline="") as out:
            writer = csv.DictWriter(out, ["prompt", "answer"])
            writer.writeheader()
            writer.writerows(rows)
    elif file.name == "list.json":
        file.write_text(json.dumps(rows, indent=2), encoding="utf-8")
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def load(path: Path, tokenizer, **settings: object) -> PromptSet:
    return load_prompts(DataSettings(path=str(path), **settings), tokenizer)


@pytest.mark.parametrize("name", ["a.jsonl", "lines.json", "list.json", "a.csv", "a.parquet", "A.JSONL"])
def test_every_kind_of_file(tmp_path, tokenizer, name):
    prompts = load(write(tmp_path / name), tokenizer)
    assert prompts.texts == tuple(TEXTS)
    assert prompts.columns == {"answer": tuple(ANSWERS)}
    assert prompts.ids == tuple(tuple(tokenizer(text)["input_ids"]) for text in TEXTS)
    assert prompts.dropped == ()


def test_a_text_file_has_one_prompt_a_line(tmp_path, tokenizer):
    file = tmp_path / "a.txt"
    file.write_bytes("\ufeffThe old bridge\r\n\n   \n  indented\u2028still the same line\n".encode())
    assert load(file, tokenizer).texts == ("The old bridge", "  indented\u2028still the same line")


def test_a_folder_of_the_hub_s_layout(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder / "train.parquet")
    assert load(folder, tokenizer).columns == {"answer": tuple(ANSWERS)}
    with pytest.raises(UserError, match=r'neither a file .*"test"'):
        load(folder, tokenizer, split="test")


@pytest.mark.parametrize("place", ["lang=en", "prompt=2"])
def test_a_folder_s_name_is_no_column(tmp_path, tokenizer, place):
    (tmp_path / place).mkdir()
    assert set(load(write(tmp_path / place / "a.parquet"), tokenizer).columns) == {"answer"}


def test_another_column_may_hold_the_prompts(tmp_path, tokenizer):
    file = tmp_path / "a.jsonl"
    file.write_text('{"question": "why?", "prompt": "not this"}\n', encoding="utf-8")
    prompts = load(file, tokenizer, column="question")
    assert prompts.texts == ("why?",)
    assert prompts.columns == {"prompt": ("not this",)}


def test_values_stay_what_they_are_in_json(tmp_path):
    # Dates stay texts, kinds may differ from row to row, and what a row does not have is None.
    rows = [{"prompt": "2024-01-01", "x": 1}, {"prompt": "b", "x": "one"}, {"prompt": "c", "y": {"z": [1]}}]
    file = tmp_path / "a.jsonl"
    file.write_text("\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert read_table(str(file)) == {
        "prompt": ["2024-01-01", "b", "c"],
        "x": [1, "one", None],
        "y": [None, None, {"z": [1]}],
    }


def test_large_files_are_read_whole(tmp_path):
    # Over the megabyte at which readers of blocks cut.
    rows = [{"prompt": f"line\n{i}\n" + "x" * 200, "n": i} for i in range(6000)]
    names = ("a.csv", "a.jsonl")
    with (tmp_path / names[0]).open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, ["prompt", "n"])
        writer.writeheader()
        writer.writerows(rows)
    (tmp_path / names[1]).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    expected = {"prompt": [row["prompt"] for row in rows], "n": [row["n"] for row in rows]}
    assert all(read_table(str(tmp_path / name)) == expected for name in names)


keys = st.text(max_size=5)
values = st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.text(max_size=3), max_size=3)


@given(st.lists(st.dictionaries(keys, values, min_size=1, max_size=4), max_size=5), st.booleans())
def test_json_comes_back_as_it_was_written(rows, as_list):
    text = json.dumps(rows, ensure_ascii=False) if as_list else "\n".join(json.dumps(row) for row in rows)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a.json"
        file.write_text(text, encoding="utf-8", newline="")
        columns = read_table(str(file))
    assert set(columns) == {name for row in rows for name in row}
    assert all(columns[name] == [row.get(name) for row in rows] for name in columns)


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("a.jsonl", b"", "has no column 'prompt'; it has none"),
        ("a.json", b"[]", "has no column 'prompt'; it has none"),
        ("a.txt", b"\n \n", "there is no prompt in it"),
        ("a.csv", b"", "cannot be read as .csv"),
        ("a.csv", b"prompt\n", "there is no prompt in it"),
        ("a.parquet", b"", "cannot be read as .parquet"),
        ("a.jsonl", b'{"question": "why?", "n": 1}', "has no column 'prompt'; it has question, n (set data.column)"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": ""}', "the prompt of row 1 is empty"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": null}', "row 1 holds None where a text was expected"),
        ("a.jsonl", b'{"prompt": "a"}\n{"other": "b"}', "row 1 holds None where a text was expected"),
        ("a.jsonl", b'{"prompt": ["a"]}', "row 0 holds ['a'] where a text was expected"),
        ("a.jsonl", b'{"prompt": "\\ud83d"}', "row 0 holds '\\ud83d' where a text was expected"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "b"\n', "cannot be read as .jsonl: Expecting ',' delimiter: line 2"),
        ("a.jsonl", b'{"prompt": "a"}\nhello\n', "cannot be read as .jsonl: Expecting value: line 2 column 1"),
        ("a.json", b'["a", "b"]', "every row must be an object"),
        ("a.jsonl", b'{"prompt": "caf\xe9"}', "cannot be read as .jsonl: 'utf-8' codec"),
        ("a.txt", b"caf\xe9", "cannot be read as .txt: 'utf-8' codec"),
        ("a.csv", b"prompt,n\na\nb,c,d\n", "cannot be read as .csv"),
        ("a.csv", b"prompt\n1\n2\n", "row 0 holds 1 where a text was expected"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path, tokenizer, name, content, part):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(UserError) as error:
        load(file, tokenizer)
    message = str(error.value)
    assert message.startswith(str(file))
    assert part in message
    assert "\n" not in message


def test_what_is_not_there_is_named(tmp_path, tokenizer):
    with pytest.raises(UserError, match="there is no such file"):
        load(tmp_path / "nowhere.jsonl", tokenizer)
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UserError, match="there is no such file"):
        load(tmp_path / "folder.jsonl", tokenizer)
    with pytest.raises(UserError, match=r"data\.path is missing"):
        load_prompts(DataSettings(), tokenizer)


@pytest.mark.parametrize("name", ["prompts", "responses"])
def test_a_column_may_not_take_the_name_of_an_argument(tokenizer, name):
    with pytest.raises(UserError, match=f"rename the column '{name}'"):
        tokenize(["a"], tokenizer, 9, columns={name: [1]})


def test_long_prompts_are_dropped_and_named(tokenizer):
    prompts = tokenize(["a" * 9, "b" * 4, "c" * 5, "é" * 2], tokenizer, 4, columns={"n": [0, 1, 2, 3]})
    assert prompts.texts == ("bbbb", "éé")  # two characters of two bytes
    assert prompts.columns == {"n": (1, 3)}  # the rows stay together
    assert prompts.dropped == (0, 2)
    with pytest.raises(UserError, match="every prompt is over 3 tokens"):
        tokenize(["aaaa", "bbbbb"], tokenizer, 3)


def test_prompts_are_padded_on_the_left():
    batch = padded_prompts([[5], [6, 7, 8], [9, 10]], pad=1)
    assert batch["prompt_ids"].tolist() == [[1, 1, 5], [6, 7, 8], [1, 9, 10]]
    assert batch["prompt_mask"].tolist() == [[0, 0, 1], [1, 1, 1], [0, 1, 1]]


def test_a_batch_holds_the_prompts_asked_for(tokenizer):
    prompts = tokenize(["a", "bb", "ccc"], tokenizer, 9)
    batch = prompts.batch([2, 0, 2], pad=1)
    assert [tokenizer.decode(ids, skip_special_tokens=True) for ids in batch["prompt_ids"]] == ["ccc", "a", "ccc"]


def prompt_set(n: int) -> PromptSet:
    return PromptSet(("x",) * n, ((5,),) * n, {}, ())


@given(st.integers(1, 30), st.integers(0, 5), st.integers(0, 3), st.booleans())
def test_every_pass_covers_every_prompt_once(n, seed, number, shuffle):
    order = prompt_set(n).order(seed, shuffle, number * n, n)
    assert sorted(order) == list(range(n))
    if not shuffle:
        assert order == list(range(n))


@given(st.integers(1, 12), st.integers(0, 50), st.integers(0, 20), st.integers(0, 20), st.booleans())
def test_the_order_is_one_stream_however_it_is_cut(n, start, first, second, shuffle):
    prompts = prompt_set(n)
    whole = prompts.order(3, shuffle, start, first + second)
    parts = prompts.order(3, shuffle, start, first) + prompts.order(3, shuffle, start + first, second)
    assert parts == whole


def test_every_pass_and_every_seed_has_its_own_order():
    prompts = prompt_set(40)
    orders = [prompts.order(seed, True, 40 * number, 40) for seed in (0, 1) for number in range(4)]
    assert len({tuple(order) for order in orders}) == 8
    assert prompts.order(1, True, 40, 40) == orders[5]
