"""What `cavesson generate` writes."""

import json
from datetime import date

import pyarrow.parquet as pq
import pytest

from cavesson.config import load
from cavesson.errors import UserError
from cavesson.tools.generate import generate, write
from cavesson.tools.settings import GenerateSettings

ROWS = [{"prompt": "one", "level": 1, "tags": ["a", "b"]}, {"prompt": "two", "level": None, "tags": []}]


def generated(folder, rows, *flags):
    file = folder / "in.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    flags = ["--data.path", str(file), "--sampling.max_new_tokens", "4", *flags]
    return generate("tiny", load(GenerateSettings, None, flags))


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_other_columns_stay_beside_every_response(tmp_path, suffix):
    out = tmp_path / "folder" / f"out{suffix}"
    assert write(generated(tmp_path, ROWS, "--samples", "2"), out) == 4
    found = {
        ".jsonl": lambda: [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()],
        ".json": lambda: json.loads(out.read_text(encoding="utf-8")),
        ".parquet": lambda: pq.read_table(out).to_pylist(),
    }[suffix]()
    assert found == list(generated(tmp_path, ROWS, "--samples", "2"))
    assert [{name: row[name] for name in ROWS[0]} for row in found] == [ROWS[0], ROWS[0], ROWS[1], ROWS[1]]
    assert set(found[0]) == {*ROWS[0], "response", "finish_reason"}


def test_a_table_has_the_columns_of_all_rows_and_mixed_types_as_json(tmp_path):
    rows = [{"a": 4, "when": date(2026, 11, 27)}, {"a": "four", "b": [1]}, {"a": None, "b": [2]}]
    assert write(iter(rows), tmp_path / "out.parquet") == 3
    found = pq.read_table(tmp_path / "out.parquet")
    assert found["a"].to_pylist() == ["4", '"four"', None]
    assert found["b"].to_pylist() == [None, [1], [2]]
    assert found["when"].to_pylist() == [date(2026, 11, 27), None, None]


def test_a_column_that_is_generated_is_not_lost(tmp_path):
    with pytest.raises(UserError, match="rename the column 'finish_reason'"):
        next(generated(tmp_path, [{"prompt": "one", "finish_reason": "tired"}]))


def test_an_unknown_kind_of_file_is_refused_before_anything_is_sampled(tmp_path):
    with pytest.raises(UserError, match="must end in"):
        write(generated(tmp_path, ROWS), tmp_path / "out.csv")
