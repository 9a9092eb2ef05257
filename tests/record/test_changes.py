"""What a reader learns of a record that grows, starts again and is compacted."""

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from compaction_helpers import record
from record_helpers import rollouts

import cavesson
from cavesson.record import Recorder, begin_attempt, compact, write_rollouts


def look(folder: Path, cursor: str | None) -> tuple[int | None, str]:
    found = cavesson.open(folder).changes(cursor)
    return found.first_step, found.cursor


def moved(table: pa.Table) -> pa.Table:
    """The same for samples 10 further on."""
    at = table.column_names.index("sample")
    return table.set_column(at, table.schema.field("sample"), pc.add(table["sample"], pa.scalar(10, pa.int32())))


def test_everything_is_new_at_first_and_nothing_after(folder):
    assert look(folder, None)[0] is None
    record(folder, range(3, 6), attempt=begin_attempt(folder, 3))
    first, cursor = look(folder, None)
    assert first == 3 and look(folder, cursor) == (None, cursor)
    assert [segment.first for segment in cavesson.open(folder).changes(cursor).segments] == [3, 4, 5]


def test_new_steps_ranks_and_attempts_are_found_where_they_begin(folder):
    attempt = begin_attempt(folder, 0)
    record(folder, range(4), attempt)
    _, cursor = look(folder, None)
    record(folder, range(4, 6), attempt)
    first, cursor = look(folder, cursor)
    assert first == 4
    record(folder, range(2, 6), attempt, rank=1)
    first, cursor = look(folder, cursor)
    assert first == 2
    begin_attempt(folder, 3)
    first, cursor = look(folder, cursor)
    assert first == 3 and look(folder, cursor)[0] is None


def test_a_step_that_grows_is_new_again(folder):
    with Recorder(folder, attempt=begin_attempt(folder, 0)) as recorder:
        recorder.rollouts(0, *rollouts())
        recorder.rollouts(1, *rollouts())
        recorder.flush()
        _, cursor = look(folder, None)
        recorder.rollouts(1, *rollouts(sample=[2, 3]))
        recorder.flush()
        assert look(folder, cursor)[0] == 1


def test_compaction_is_no_change(folder):
    attempt = begin_attempt(folder, 0)
    record(folder, range(8), attempt)
    _, cursor = look(folder, None)
    assert compact(folder, 0, before=(attempt, 7)) == 14
    first, cursor = look(folder, cursor)
    assert first is None
    record(folder, range(8, 20), attempt)
    assert compact(folder, 0, before=(attempt, 19)) > 0
    # Step 7 was the newest and could have grown; its file is still there to tell that it has not.
    first, cursor = look(folder, cursor)
    assert first == 8
    compact(folder)
    # Now the newest one's file is gone with those that were merged, so it is read again.
    assert look(folder, cursor)[0] == 19


def test_merging_steps_that_are_superseded_is_no_change(folder):
    record(folder, range(6), attempt=begin_attempt(folder, 0))
    record(folder, range(3, 6), attempt=begin_attempt(folder, 3))
    _, cursor = look(folder, None)
    assert compact(folder, 0, before=(1, 5)) == 2 * (6 + 2)
    assert look(folder, cursor)[0] is None


def test_rollouts_added_to_old_steps_are_found(folder):
    attempt = begin_attempt(folder, 0)
    record(folder, range(5), attempt)
    run = cavesson.open(folder)
    rows, tokens = run.rows(steps=[2]), run.tokens(2)
    _, cursor = look(folder, None)
    write_rollouts(folder, attempt, moved(rows), moved(tokens))
    assert look(folder, cursor)[0] == 2
    assert run.rows(["sample"], [2])["sample"].to_pylist() == [0, 1, 2, 10, 11, 12]


def test_a_page_of_rows_comes_in_the_order_asked_for(folder):
    record(folder, range(6), attempt=begin_attempt(folder, 0))
    compact(folder)
    record(folder, range(6, 8))
    run = cavesson.open(folder)
    keys = [(7, 2), (0, 1), (5, 0), (0, 1)]
    table = run.fetch(keys, ["reward", "prompt"])
    assert table.column_names == ["reward", "prompt"]
    assert table["reward"].to_pylist() == [step + sample / 16 for step, sample in keys]
    whole = run.rows()
    assert run.fetch([(3, 1)]).to_pylist() == [r for r in whole.to_pylist() if (r["step"], r["sample"]) == (3, 1)]


def test_lines_of_a_file_are_read_from_any_place(folder):
    record(folder, range(6), attempt=begin_attempt(folder, 0))
    compact(folder)
    begin_attempt(folder, 4)
    run = cavesson.open(folder)
    (segment,) = run.segments()
    assert (segment.first, segment.last, segment.stop) == (0, 5, 4)
    assert run.rows(["step"], [3, 4])["step"].unique().to_pylist() == [3] and run.tokens(4).num_rows == 0
    keys = run.read(segment, "rows", ["sample", "step"])
    assert keys.column_names == ["sample", "step"] and keys.num_rows == 12  # four steps of six count
    assert run.read(segment, "rows", ["sample", "step"], start=5, count=3).to_pylist() == keys.to_pylist()[5:8]
    places = run.read(segment, "rows", ["step", "sample", "token_start", "token_count"]).to_pylist()
    place = [place for place in places if place["token_count"] > 1][2]
    tokens = run.read(segment, "tokens", ["value", "position"], place["token_start"], place["token_count"])
    expected = run.tokens(place["step"], place["sample"])
    assert tokens.to_pylist() == expected.select(["value", "position"]).to_pylist() and tokens.num_rows


def test_tables_as_data_frames(folder):
    record(folder, range(3), attempt=begin_attempt(folder, 0))
    run = cavesson.open(folder)
    frame = run.pandas("rows", ["step", "reward", "reward_parts"], [1, 2])
    assert frame["step"].tolist() == [1] * 3 + [2] * 3 and frame["reward_parts"][0] == {"a": 0.0}
    assert run.pandas("steps")["step"].tolist() == [0, 1, 2]
    assert run.arrow("tokens", ["position"], [0])["position"].to_pylist() == [0, 0, 1]
    assert set(run.arrow("rollups", steps=[1])["step"].to_pylist()) == {1}
