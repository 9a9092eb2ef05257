"""The large files that merging writes: their order, their groups, their columns."""

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from compaction_helpers import answers, files, record
from record_helpers import plain

import cavesson
from cavesson.record import Recorder, compact, write_rollouts, write_run
from cavesson.record.maintain import compaction, merging
from cavesson.record.storage import storage
from cavesson.record.tables import Tables
from cavesson.record.write.writing import write_segment


def test_lines_are_in_the_order_of_step_group_and_sample_and_say_where_their_tokens_are(folder):
    record(folder, range(5))
    record(folder, range(5), rank=1)
    compact(folder)
    (path,) = folder.glob("record/rows-c-*")
    rows = pq.ParquetFile(path).read().to_pylist()
    keys = [(row["step"], row["group"], row["sample"]) for row in rows]
    assert keys == sorted(keys) and len(keys) == 30
    tokens = pq.ParquetFile(path.with_name(path.name.replace("rows", "tokens"))).read().to_pylist()
    assert rows[0]["token_start"] == 0
    for row, following in zip(rows, [*rows[1:], {"token_start": len(tokens)}], strict=True):
        end = row["token_start"] + row["token_count"]
        mine = tokens[row["token_start"] : end]
        assert end == following["token_start"] and row["token_count"] == row["length"]
        assert [(t["step"], t["sample"]) for t in mine] == [(row["step"], row["sample"])] * row["length"]
        assert [t["position"] for t in mine] == list(range(row["length"]))


def test_large_files_end_after_so_many_rollouts_and_are_not_written_again(folder, monkeypatch):
    monkeypatch.setattr(compaction, "FILE_LINES", 12)
    record(folder, range(10))
    compact(folder)
    segments = cavesson.open(folder).segments()
    # Three rollouts a step: a file is full after four steps. Two files are full, the third holds the rest.
    assert [(segment.first, segment.last, segment.lines) for segment in segments] == [(0, 3, 12), (4, 7, 12), (8, 9, 6)]
    record(folder, range(10, 12))
    compact(folder)
    again = cavesson.open(folder).segments()
    assert again[:2] == segments[:2] and [(s.first, s.last) for s in again[2:]] == [(8, 11)]


def test_tokens_without_a_row_do_not_come_along(folder):
    write_run(folder, {})
    rows = pa.table({"step": [0, 2], "sample": [1, 1], "prompt": ["p"] * 2, "response": ["r"] * 2, "reward": [1.0] * 2})
    tokens = pa.table({"step": [0, 0, 0, 2, 3], "sample": [0, 1, 1, 1, 1], "position": [0, 0, 1, 0, 0]})
    write_rollouts(folder, 0, rows, tokens)
    (path,) = folder.glob("record/tokens-*")
    assert [tuple(line.values()) for line in pq.ParquetFile(path).read().to_pylist()] == [
        (0, 1, 0),
        (0, 1, 1),
        (2, 1, 0),
    ]
    assert cavesson.open(folder).rollout(0, 1).tokens["position"].to_pylist() == [0, 1]


def test_groups_of_large_lines_end_early(folder, monkeypatch):
    monkeypatch.setattr(merging, "GROUP_BYTES", 10_000)
    lengths = [10, 6000, 5000, 20_000, 10, 10, 9000, 2000, 10]
    for step, length in enumerate(lengths):
        with Recorder(folder, attempt=0) as out:
            out.rollouts(step, {"prompt": ["p"], "response": ["r" * length], "reward": [step]}, {"token_id": [[1]]})
    before = answers(folder)
    compact(folder)
    assert answers(folder) == before
    (path,) = folder.glob("record/rows-c-*")
    parquet = pq.ParquetFile(path)
    groups = [parquet.read_row_group(i, ["step"])["step"].to_pylist() for i in range(parquet.num_row_groups)]
    # Each line has a few hundred bytes besides; a group takes as many lines as fit below the limit, at least one.
    assert groups == [[0, 1], [2], [3], [4, 5, 6], [7, 8]]


@pytest.mark.parametrize(("lines", "size", "count"), [(1024, 1000, 50), (1, 2_000_000, 60)])
def test_what_is_merged_is_not_kept_in_memory(folder, monkeypatch, lines, size, count):
    """50 MB in groups of 1,024 lines, and 120 MB in groups that end earlier."""
    monkeypatch.setattr(merging, "GROUP_BYTES", 8_000_000)
    schema, kept, before = pa.schema({"response": pa.string()}), [], pa.total_allocated_bytes()
    with merging._writing(storage(folder), "rows", "c-some", schema) as out:
        for _ in range(count):
            out.add(pa.table({"response": ["r" * size] * lines}, schema))
            kept.append(pa.total_allocated_bytes() - before)
    assert max(kept) < 20_000_000
    assert pq.read_metadata(folder / "record" / "rows-c-some.parquet").num_rows == lines * count


def test_a_column_that_some_steps_lack_is_null_there_and_exact_numbers_stay_exact(folder):
    for step, value in enumerate([0.1, None, 1e300]):
        rows = pa.table({"step": [step], "sample": [0], "prompt": ["p"], "response": ["r"], "reward": [1.0]})
        tokens = pa.table({"step": [step], "sample": [0], "position": [0]})
        if value is not None:
            tokens = tokens.append_column("value", pa.array([value], pa.float64() if step else pa.float32()))
        write_segment(folder, 0, 0, Tables(rows, tokens))
    compact(folder)
    values = [cavesson.open(folder).tokens(step)["value"].to_pylist() for step in range(3)]
    assert values == [[float(np.float32(0.1))], [None], [1e300]]


def test_rollouts_of_many_steps_are_written_at_once_and_added_to(folder):
    record(folder, range(4))
    whole = answers(folder)
    run = cavesson.open(folder)
    rows, tokens = run.rows(), pa.concat_tables([run.tokens(step) for step in range(4)])
    with tempfile.TemporaryDirectory() as name:
        write_run(name, {})
        # Odd samples first, then even ones of the same steps, in no order.
        for odd in (1, 0):
            parts = [table.filter(pa.array(table["sample"].to_numpy() % 2 == odd)) for table in (rows, tokens)]
            shuffled = [part.take(np.random.default_rng(0).permutation(part.num_rows)) for part in parts]
            write_rollouts(name, 0, *shuffled)
        assert len(files(Path(name), "record/rows-*")) == 2
        again = cavesson.open(name)
        assert plain(again.rows().to_pylist()) == plain(rows.to_pylist())
        assert plain(again.tokens(2).to_pylist()) == plain(run.tokens(2).to_pylist())
        compact(name)
        assert len(files(Path(name), "record/rows-*")) == 1
        assert plain(again.rows().to_pylist()) == plain(rows.to_pylist())
        assert plain(again.rollups().to_pylist()) == plain(run.rollups().to_pylist())
    assert answers(folder) == whole
