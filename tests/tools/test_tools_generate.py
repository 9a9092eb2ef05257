"""What `cavesson generate` writes."""

import json

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


def test_a_column_that_is_generated_is_not_lost(tmp_path):
    with pytest.raises(UserError, match="rename the column 'finish_reason'"):
        next(generated(tmp_path, [{"prompt": "one", "finish_reason": "tired"}]))


def test_an_unknown_kind_of_file_is_refused_before_anything_is_sampled(tmp_path):
    with pytest.raises(UserError, match="must end in"):
        write(generated(tmp_path, ROWS), tmp_path / "out.csv")
