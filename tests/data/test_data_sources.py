import csv
import gzip
import json
import tempfile
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavesson.data.settings import SourceSettings
from cavesson.data.sources import read
from cavesson.errors import UserError

TEXTS = ["The old bridge", 'said "yes", then', "größer 🙂", "two\nlines", ""]
CUT = gzip.compress(b'{"a": 1}' * 99, mtime=0)[:-9]
ROWS = [{"prompt": text, "answer": str(number)} for number, text in enumerate(TEXTS)]


def write(file: Path, rows: list[dict]) -> Path:
    """The rows in the format that the name of the file says."""
    plain = file.with_suffix("") if file.suffix == ".gz" else file
    if plain.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), plain)
    elif plain.suffix == ".csv":
        with plain.open("w", encoding="utf-8", newline="") as out:
            writer = csv.DictWriter(out, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif plain.suffix == ".json":
        plain.write_text(json.dumps(rows, indent=2), encoding="utf-8")
    else:
        plain.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if file != plain:
        file.write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
    return file


def rows(path: Path | str, **settings: object) -> list[dict]:
    return [dict(row.values) for row in read(SourceSettings(path=str(path), **settings))]


def places(path: Path | str, **settings: object) -> list[str]:
    return [row.place for row in read(SourceSettings(path=str(path), **settings))]


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize(
    ("name", "word"), [("a.jsonl", "line"), ("A.JSON", "row"), ("a.csv", "row"), ("a.parquet", "row")]
)
def test_every_kind_of_file(tmp_path, name, word, packed):
    file = write(tmp_path / (name.lower() + packed), ROWS).rename(tmp_path / (name + packed))
    assert rows(file) == ROWS
    assert places(file) == [f"{file} {word} {number}" for number in range(1, 6)]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_text_file_has_one_row_a_line(tmp_path, name):
    content = "\ufeffThe old bridge\r\n\n   \n  indented\u2028still the same line\n".encode()
    file = tmp_path / name
    file.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert rows(file) == [{"text": "The old bridge"}, {"text": "  indented\u2028still the same line"}]
    assert places(file) == [f"{file} line 1", f"{file} line 4"]


def test_json_may_also_be_objects_one_after_the_other(tmp_path):
    file = tmp_path / "a.json"
    file.write_text('{"a": 1}\n\n{"a": 2} {"a":\n3}', encoding="utf-8")
    assert rows(file) == [{"a": 1}, {"a": 2}, {"a": 3}]


def test_blank_lines_count_as_lines(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('\n{"a": 1}\n\n{"a": 2}\n', encoding="utf-8")
    assert places(file) == [f"{file} line 2", f"{file} line 4"]


def test_json_values_stay_what_they_are(tmp_path):
    written = [{"a": "2024-01-01", "n": 1}, {"a": "007", "n": 1.0}, {"n": None, "big": 2**80}, {"a": [1, "x", {}]}]
    for name in ("a.jsonl", "a.json"):
        read_back = rows(write(tmp_path / name, written))
        assert read_back == written
        assert [type(row["n"]) for row in read_back[:2]] == [int, float]


def test_csv_values_stay_texts(tmp_path):
    file = tmp_path / "a.csv"
    file.write_bytes('\ufeffprompt,answer\r\n2024-01-01,007\r\n"a ""b""\nc",\r\n'.encode())
    assert rows(file) == [{"prompt": "2024-01-01", "answer": "007"}, {"prompt": 'a "b"\nc', "answer": ""}]


def test_long_texts_are_read_whole(tmp_path):
    long = [{"prompt": "x y\n" * 500_000}]  # over the limits of readers by blocks and fields
    for name in ("a.csv", "a.jsonl", "a.parquet", "a.json"):
        assert rows(write(tmp_path / name, long)) == long


keys = st.text(st.characters(codec="utf-8"), max_size=5)
texts = st.text(st.characters(codec="utf-8"))
values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts | st.lists(texts, max_size=3)


@given(st.lists(st.dictionaries(keys, values, min_size=1, max_size=4), min_size=1, max_size=5), st.booleans())
def test_json_comes_back_as_it_was_written(written, ascii_only):
    with tempfile.TemporaryDirectory() as folder:
        lines, one = Path(folder) / "a.jsonl", Path(folder) / "a.json"
        lines.write_bytes("\n".join(json.dumps(row, ensure_ascii=ascii_only) for row in written).encode())
        one.write_bytes(json.dumps(written, ensure_ascii=ascii_only).encode())
        assert rows(lines) == rows(one) == written


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=5))
def test_csv_comes_back_as_it_was_written(pairs):
    written = [{"a": a, "b": b} for a, b in pairs]
    with tempfile.TemporaryDirectory() as folder:
        assert rows(write(Path(folder) / "a.csv", written)) == written


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "b"\n', "a.jsonl line 2: expected one JSON object per line: Expect"),
        ("a.jsonl", b'{"a": 1}\n\nhello\n', "a.jsonl line 3: expected one JSON object per line"),
        ("a.jsonl", b'["a"]\n', 'a.jsonl line 1: expected an object, such as {"prompt": "…"}, and not ["a"]'),
        ("a.json", b'[{"a": 1}, "b"]', "a.json row 2: expected an object"),
        ("a.json", b'[{"a": 1}', "a.json cannot be read as .json: Expecting"),
        ("a.json", b"[" * 100_000, "a.json cannot be read as .json: "),
        ("a.jsonl", b"[" * 100_000, "a.jsonl line 1: expected one JSON object per line"),
        ("a.jsonl", b'{"a": 1}\n{"b": {"c": ["\\ud83d"]}}', "a.jsonl line 2 contains half of a surrogate pair"),
        ("a.json", b'[{"a": 1}, {"\\uDC00": 1}]', "a.json row 2 contains half of a surrogate pair"),
        ("a.jsonl", b'{"prompt": "caf\xe9"}', "a.jsonl is not UTF-8: it contains the byte 0xe9"),
        ("a.txt", b"caf\xe9", "a.txt is not UTF-8: it contains the byte 0xe9"),
        ("a.parquet", b"", "a.parquet cannot be read as .parquet"),
        ("a.csv", b"", "a.csv cannot be read as .csv: the first line must name"),
        ("a.csv", b"a,a\n1,2\n", "a.csv cannot be read as .csv: the first line must name"),
        ("a.csv", b"a,n\nb,c\nd,e,f\n", "a.csv row 2 (ends in line 3) has 3 values for 2 columns"),
        ("a.csv", b'a\n"b', "a.csv cannot be read as .csv: unexpected end of data"),
        ("a.jsonl.gz", b'{"a": 1}', "a.jsonl.gz cannot be read as .jsonl: Not a gzipped file"),
        ("a.jsonl.gz", CUT, "a.jsonl.gz cannot be read as .jsonl: Compressed file"),
        ("a.doc", b"", "a.doc: the name of a data file must end in .txt, .jsonl"),
    ],
)
def test_what_is_broken_is_named(tmp_path, name, content, part):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        rows(tmp_path / name)
    assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_a_pair_of_surrogates_is_a_character(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"a": "\\ud83d\\ude42"}')
    assert rows(file) == [{"a": "🙂"}]


def test_what_is_not_there_is_named(tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    for name in ("nowhere.jsonl", "nowhere.csv.gz", "folder.jsonl"):
        with pytest.raises(UserError, match="there is no such file"):
            rows(tmp_path / name)
    with pytest.raises(UserError, match="no file matches"):
        rows(tmp_path / "*.jsonl.gz")
    with pytest.raises(UserError, match=r"data\.path is missing"):
        list(read(SourceSettings()))


def test_a_folder_is_its_files_in_the_order_of_their_names(tmp_path):
    write(tmp_path / "b.jsonl", [{"n": 2}])
    write(tmp_path / "a.jsonl.gz", [{"n": 0}, {"n": 1}])
    (tmp_path / "LICENSE").write_text("free")
    (tmp_path / "deeper").mkdir()
    assert rows(tmp_path) == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert rows(tmp_path / "*.jsonl*") == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert rows(tmp_path / "b.*") == [{"n": 2}]
    with pytest.raises(UserError, match=r"has no splits, so there is no 'test'"):
        rows(tmp_path, split="test")
    write(tmp_path / "c.csv", [{"n": 3}])
    with pytest.raises(UserError, match=r"contains \.csv and \.jsonl files; choose some of them, such as .*\*\.csv"):
        rows(tmp_path)


def test_files_named_after_splits_are_not_mixed(tmp_path):
    write(tmp_path / "train-0.jsonl", [{"n": 0}])
    write(tmp_path / "train-1.jsonl", [{"n": 1}])
    write(tmp_path / "dev.jsonl", [{"n": 2}])
    assert rows(tmp_path) == [{"n": 0}, {"n": 1}]
    assert rows(tmp_path, split="validation") == [{"n": 2}]
    with pytest.raises(UserError, match="no files of the split 'test'; it has train, validation"):
        rows(tmp_path, split="test")
    write(tmp_path / "other.jsonl", [{"n": 3}])
    with pytest.raises(UserError, match=r"some files are named after a split and other\.jsonl is not"):
        rows(tmp_path)


def test_a_file_has_no_splits(tmp_path):
    file = write(tmp_path / "train.jsonl", [{"n": 0}])
    with pytest.raises(UserError, match="has no splits, so there is no 'test'"):
        rows(file, split="test")


@pytest.mark.parametrize("place", ["lang=en", "prompt=2", "a[1]"])
def test_a_folder_s_name_is_no_column_and_no_pattern(tmp_path, place):
    (tmp_path / place).mkdir()
    assert rows(write(tmp_path / place / "a.parquet", ROWS)) == ROWS


def test_a_saved_data_set(tmp_path):
    both = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    )
    both.save_to_disk(tmp_path / "both")
    both["train"].save_to_disk(tmp_path / "one")
    assert rows(tmp_path / "both") == rows(tmp_path / "one") == ROWS
    assert rows(tmp_path / "both", split="test") == ROWS[:1]
    with pytest.raises(UserError, match="no split 'dev'; it has train, test"):
        rows(tmp_path / "both", split="dev")
    with pytest.raises(UserError, match="one has no splits, so there is no 'test'"):
        rows(tmp_path / "one", split="test")


@pytest.mark.parametrize("stream", [False, True])
def test_a_folder_of_the_hub_s_layout(tmp_path, monkeypatch, stream):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    write(folder / "data" / "train-0.parquet", ROWS)
    write(folder / "data" / "test-0.parquet", ROWS[:2])
    source = SourceSettings(path=str(folder), split="test")
    assert [dict(row.values) for row in read(source, stream=stream)] == ROWS[:2]
    with pytest.raises(UserError, match=r"neither a file .*split 'dev'"):
        rows(folder, split="dev")
