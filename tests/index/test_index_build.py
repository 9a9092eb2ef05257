import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_helpers import indexed, new_run, record, rows_of, text_of, tokens_of

import cavesson.record
from cavesson.errors import UserError
from cavesson.index import build as build_module
from cavesson.index import postings as postings_module
from cavesson.index import text as text_module
from cavesson.index.build import Builder
from cavesson.index.folder import read_state
from cavesson.index.metrics import add_metrics
from cavesson.index.orders import _packed_order, order, places
from cavesson.index.search import candidates
from cavesson.index.snapshot import Snapshot, snapshot
from cavesson.record import Recorder, begin_attempt, compact


def alive_rows(shot: Snapshot) -> list[tuple[int, int, float]]:
    """Step, sample and reward of every rollout that the index shows, in order."""
    rows = np.arange(shot.rows) if shot.alive is None else np.flatnonzero(shot.alive)
    columns = (shot.raw(name)[rows].tolist() for name in ("step", "sample", "reward"))
    return sorted(zip(*columns, strict=True))


def recorded_rows(folder) -> list[tuple[int, int, float]]:
    rows = cavesson.record.open(folder).rows(["step", "sample", "reward"])
    found = zip(*(rows[name].to_pylist() for name in rows.column_names), strict=True)
    return sorted((step, sample, float(np.float32(reward))) for step, sample, reward in found)


@pytest.fixture
def folder(tmp_path):
    return new_run(tmp_path / "run")


def test_every_number_of_the_record_is_in_the_index(folder):
    record(folder, range(4))
    shot, table = indexed(folder), cavesson.record.open(folder).rows()
    assert alive_rows(shot) == recorded_rows(folder)
    for name in ("length", "kl_k1", "kl_k3", "group", "ref_reward", "log_ratio_max"):
        wanted = table[name].to_numpy(zero_copy_only=False).astype(shot.column(name).dtype)
        assert shot.column(name).tolist() == wanted.tolist(), name
    assert shot.column("part/good").tolist() == [float(i) for i in range(6)] * 4
    assert shot.column("gap").tolist() == (shot.column("reward") - np.float32(0.5)).tolist()
    assert np.unique(shot.raw("prompt")).tolist() == [0, 1, 2] and len(shot.prompts) == 3
    assert "entropy" not in shot.names


def test_an_index_grows_with_the_run_and_an_older_snapshot_stays_as_it_was(folder):
    record(folder, range(3))
    before = indexed(folder)
    seen = [before.raw(name).copy() for name in ("step", "reward")]
    record(folder, range(3, 6), attempt=0)
    after = indexed(folder)
    assert after.rows == 36 and alive_rows(after) == recorded_rows(folder)
    assert [before.raw(name).tolist() for name in ("step", "reward")] == [values.tolist() for values in seen]
    assert indexed(folder).state == after.state


def test_a_column_that_comes_later_is_missing_before(folder):
    record(folder, [0])
    indexed(folder)
    attempt = begin_attempt(folder, start_step=1)
    with Recorder(folder, attempt=attempt) as recorder:
        parts = [{"late": 2.0}] * 6
        recorder.rollouts(
            1,
            rows_of(1, 6) | {"reward_parts": parts, "kl_coef": np.full(6, 0.5), "policy_version": [7] * 6},
            tokens_of(1, 6),
        )
    shot = indexed(folder)
    assert np.isnan(shot.column("part/late")).tolist() == [True] * 6 + [False] * 6
    assert np.isnan(shot.column("policy_version")[:6]).all() and shot.column("policy_version")[6:].tolist() == [7] * 6
    assert np.isnan(shot.column("kl_coef")[:6]).all() and shot.column("kl_coef")[6:].tolist() == [0.5] * 6


def test_a_run_that_starts_again_shows_its_newest_attempt(folder):
    record(folder, range(5))
    indexed(folder)
    with Recorder(folder, attempt=begin_attempt(folder, start_step=3)) as recorder:
        recorder.rollouts(3, rows_of(33, 4), tokens_of(33, 4))
    shot = indexed(folder)
    assert alive_rows(shot) == recorded_rows(folder)
    assert shot.count("train") == 3 * 6 + 4 and shot.rows == 5 * 6 + 4


def test_rollouts_added_to_a_step_and_other_ranks_are_found(folder):
    record(folder, [0, 1])
    indexed(folder)
    with Recorder(folder, attempt=0, rank=1) as recorder:
        for step in (0, 1):
            recorder.rollouts(step, rows_of(step, 3) | {"sample": np.arange(100, 103)}, tokens_of(step, 3))
            indexed(folder)
            more = rows_of(step, 2) | {"sample": [200, 201], "split": ["eval"] * 2}
            recorder.rollouts(step, more, tokens_of(step, 2))
            recorder.flush()
            assert alive_rows(indexed(folder)) == recorded_rows(folder)
    shot = indexed(folder)
    assert shot.rows == 2 * (6 + 3 + 2), "nothing was added twice"


def test_compaction_changes_nothing(folder):
    record(folder, range(6))
    before = indexed(folder)
    cavesson.record.compact(folder)
    cavesson.record.compact(folder)
    after = indexed(folder)
    assert after.rows == before.rows and alive_rows(after) == recorded_rows(folder)
    record(folder, [6], attempt=0)
    assert alive_rows(indexed(folder)) == recorded_rows(folder)


def test_another_run_in_the_same_place_is_indexed_anew(folder):
    record(folder, range(3))
    indexed(folder)
    index = folder / "index"
    kept = index.rename(folder.parent / "kept")
    shutil.rmtree(folder)
    new_run(folder, {"model": "another"})
    record(folder, [0], batch=2)
    kept.rename(index)
    shot = indexed(folder)
    assert shot.rows == 2 and alive_rows(shot) == recorded_rows(folder)


@pytest.mark.parametrize("broken", [b"", b"{}", b"[1]", b'{"version": 0}', b"\xff\x00"])
def test_a_state_that_cannot_be_read_is_built_anew(folder, broken):
    record(folder, range(2))
    indexed(folder)
    (folder / "index" / "state.json").write_bytes(broken)
    assert read_state(folder / "index") is None
    assert alive_rows(indexed(folder)) == recorded_rows(folder)


def test_an_index_that_stopped_in_the_middle_goes_on(folder):
    record(folder, range(4))
    run = cavesson.record.open(folder)
    stopping = Builder(run, folder / "index")
    stopping.update()
    columns = {path.name: path.read_bytes() for path in (folder / "index").glob("column-*")}
    for name, content in columns.items():
        (folder / "index" / name).write_bytes(content + b"half of what came next")
    record(folder, range(4, 6), attempt=0)
    assert alive_rows(indexed(folder)) == recorded_rows(folder)


def by_value(values: list[float]):
    return lambda i: (np.isnan(values[i]), 0.0 if np.isnan(values[i]) else values[i], i)


def test_orders_are_those_of_a_stable_sort(folder, monkeypatch):
    monkeypatch.setattr("cavesson.index.orders.MIN_ROWS", 10)
    record(folder, range(5), ref_reward=np.array([None, 2.0, 1.0, 2.0, None, 0.0]))
    shot = indexed(folder)
    assert shot.state.ordered_rows == shot.rows == 30
    wanted = sorted(range(30), key=by_value(shot.column("ref_reward").tolist()))
    assert shot.stored_order("ref_reward").tolist() == order(shot, "ref_reward").tolist() == wanted
    # What comes later is sorted in, until there is a good deal of it.
    record(folder, [5], attempt=0, ref_reward=np.array([1.5, None, 2.0, -1.0, 9.0, 0.0]))
    shot = indexed(folder)
    assert shot.state.ordered_rows == 30 and shot.rows == 36
    assert order(shot, "ref_reward").tolist() == sorted(range(36), key=by_value(shot.column("ref_reward").tolist()))
    assert order(shot, "step").tolist() == list(range(36))


NUMBERS = st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0])


@settings(deadline=None)
@given(st.lists(NUMBERS, max_size=40))
def test_the_fast_order_is_that_of_a_stable_sort(numbers):
    values = np.array(numbers, "<f4")
    assert _packed_order(values).tolist() == np.argsort(values, kind="stable").tolist()


@settings(deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40))
def test_the_fast_order_of_whole_numbers_too(numbers):
    values = np.array(numbers, "<i4")
    assert _packed_order(values).tolist() == np.argsort(values, kind="stable").tolist()


@settings(deadline=None)
@given(st.lists(NUMBERS.filter(lambda x: x == x), min_size=1), st.lists(NUMBERS.filter(lambda x: x == x), min_size=1))
def test_places_are_those_of_searchsorted(numbers, bounds):
    values, wanted = np.array(numbers, "<f4"), np.array(bounds)
    order = np.argsort(values, kind="stable")
    for side in ("left", "right"):
        found = places(values, order, wanted, side)
        assert found.tolist() == np.searchsorted(values[order].astype(float), wanted, side=side).tolist()


@settings(max_examples=min(15, settings.default.max_examples))
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=6), st.booleans())
def test_whatever_a_run_does_the_index_shows_the_record(tmp_path_factory, attempts, in_between):
    """Attempts that each start somewhere and do some steps, indexed now and then."""
    folder = new_run(tmp_path_factory.mktemp("run") / "run")
    for start, count in attempts:
        record(folder, range(start, start + count), batch=2)
        if in_between:
            indexed(folder)
    shot = indexed(folder)
    # The same key and reward may have been recorded by two attempts; what counts is that each is shown once.
    assert alive_rows(shot) == recorded_rows(folder)


def test_words_are_found_in_pieces_that_were_put_together(folder, monkeypatch):
    monkeypatch.setattr(text_module, "MAX_PIECES", 2)
    monkeypatch.setattr(text_module, "FIRST_CHUNK", 4)
    monkeypatch.setattr(text_module, "CHUNK_ROWS", 5)
    for step in range(9):
        record(folder, [step], attempt=begin_attempt(folder, 0) if step == 0 else 0)
        shot = indexed(folder)
    assert len(shot.state.pieces) <= 3 and shot.state.text_rows == 54
    readers = [postings_module.PieceReader(shot.folder, piece) for piece in shot.state.pieces]
    texts = [text for reader in readers for text in reader.words["text"].to_pylist()]
    rows = {}
    for reader in readers:
        found = reader.postings()
        for number, has in zip(found.feature, np.split(found.rows, np.cumsum(found.counts)[:-1]), strict=True):
            rows.setdefault(texts[number], set()).update(has.tolist())
    assert rows["concert"] == {s * 6 + i for s in range(9) for i in range(6) if "concert" in text_of(s, i).split()}


def test_a_word_of_many_rows_is_a_bitmap_that_holds_the_same(tmp_path):
    generator = np.random.default_rng(0)
    rows = [np.flatnonzero(generator.random(postings_module.BLOCK) < share) for share in (0.5, 0.001, 0.0625, 0.9)]
    counts = np.array([len(has) for has in rows])
    assert (counts >= postings_module.MANY).tolist() == [True, False, counts[2] >= postings_module.MANY, True]
    piece = postings_module.Piece(0, 0, postings_module.BLOCK, 0, 4)
    new = postings_module.New(np.arange(4, dtype=np.uint64), np.zeros(4, np.uint8), list("abcd"))
    written = postings_module.Postings(np.arange(4), counts, np.concatenate(rows).astype(np.uint16))
    postings_module.write_piece(tmp_path, piece, new, written)
    reader = postings_module.PieceReader(tmp_path, piece)
    assert reader.postings().rows.tolist() == np.concatenate(rows).tolist()
    assert reader.some(np.array([1, 3])).rows.tolist() == np.concatenate([rows[1], rows[3]]).tolist()
    mask = np.zeros(postings_module.BLOCK, np.bool_)
    reader.mark(np.array([True, True, False, True]), mask)
    assert np.flatnonzero(mask).tolist() == sorted({*rows[0].tolist(), *rows[1].tolist(), *rows[3].tolist()})


@pytest.mark.parametrize("start", [0, 2])
def test_rollouts_that_are_superseded_before_their_words_are_in_have_none(folder, start):
    record(folder, range(4), response=["old"] * 6)
    builder = Builder(cavesson.record.open(folder), folder / "index")
    builder.update()
    record(folder, range(start, 4), response=["new"] * 6)
    builder.update()
    while builder.advance():
        pass
    shot = snapshot(folder / "index")
    assert shot.rows == 24 + 6 * (4 - start) and shot.state.text_rows == shot.rows and shot.count("train") == 24
    for word, count in (("old", 6 * start), ("new", 6 * (4 - start))):
        assert np.count_nonzero(candidates(shot, {word})) == count, word


def test_responses_without_a_word_need_no_files_with_lines(folder, monkeypatch):
    monkeypatch.setattr(text_module, "MAX_PIECES", 1)
    for step in range(3):
        record(folder, [step], attempt=begin_attempt(folder, 0) if step == 0 else 0, response=["", " \n"] * 3)
        shot = indexed(folder)
    assert shot.state.text_rows == 18 and len(shot.state.pieces) == 1
    assert len(postings_module.PieceReader(shot.folder, shot.state.pieces[0]).postings().rows) == 0


def test_a_second_writer_is_kept_out(folder):
    from cavesson.index.folder import only_writer

    with only_writer(folder / "index") as first, only_writer(folder / "index") as second:
        assert first and not second
    assert snapshot(folder / "index").rows == 0


def test_a_file_that_is_missing_is_said_instead_of_waited_for(folder):
    for step in range(3):
        record(folder, [step], attempt=None if not step else 0)
    compact(folder)
    (path,) = folder.glob("record/rows-c-*")
    path.unlink()
    builder = Builder(cavesson.record.open(folder), folder / "index")
    with pytest.raises(UserError, match=path.name):
        builder.update()


def test_what_is_merged_while_it_is_read_is_read_again(folder, monkeypatch):
    for step in range(3):
        record(folder, [step], attempt=None if not step else 0)

    def merged(*given):
        monkeypatch.setattr(build_module, "add_metrics", add_metrics)
        assert compact(folder)
        return add_metrics(*given)

    monkeypatch.setattr(build_module, "add_metrics", merged)
    Builder(cavesson.record.open(folder), folder / "index").update()
    assert alive_rows(snapshot(folder / "index")) == recorded_rows(folder)
