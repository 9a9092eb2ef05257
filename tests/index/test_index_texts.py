"""The stored beginnings of texts against the record, which has them whole."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_helpers import indexed, new_run, record

import cavesson.record
from cavesson.index import texts as texts_module
from cavesson.index.folder import read_state
from cavesson.index.texts import LENGTH, ROWS, _strings, read_responses, read_texts
from cavesson.record import begin_attempt

HOSTILE = ["", "\x00", "<script>", "🙂" * LENGTH, "é" * (LENGTH - 1), "a" * (LENGTH + 1), "\n\x1b[31m", "والنص"]


def recorded(folder, shot, rows) -> list[tuple[str, str]]:
    """Prompt and response of each row, cut; nothing where a later attempt has taken the row's place."""
    run, found = cavesson.record.open(folder), []
    for row in rows:
        if shot.alive is not None and not shot.alive[row]:
            found.append(("", ""))
            continue
        texts = run.rollout(int(shot.raw("step")[row]), int(shot.raw("sample")[row])).row
        found.append((texts["prompt"][:LENGTH], texts["response"][:LENGTH]))
    return found


def stored(folder, shot, rows) -> list[tuple[str, str]]:
    texts = read_texts(cavesson.record.open(folder), shot, np.array(rows))
    return list(zip(texts.prompt, texts.response, strict=True))


def write(folder, steps, responses, **columns):
    """Record responses in turn, 11 to a step."""
    for step in steps:
        given = [responses[(11 * step + i) % len(responses)] for i in range(11)]
        record(folder, [step], batch=11, response=given, **columns)


@pytest.mark.slow
@given(st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=50)), min_size=1, max_size=30), st.data())
@settings(max_examples=min(15, settings.default.max_examples))
def test_any_rows_in_any_order_are_those_of_the_record(tmp_path_factory, responses, data):
    folder = new_run(tmp_path_factory.mktemp("texts") / "run")
    clean = [text.encode("utf-8", "replace").decode() for text in responses]
    write(folder, range(7), clean, attempt=0)
    shot = indexed(folder)
    assert shot.rows == 77 and shot.state.texts == 64
    rows = data.draw(st.lists(st.integers(0, 76), max_size=40))
    assert stored(folder, shot, rows) == recorded(folder, shot, rows)


@pytest.mark.slow
def test_texts_are_added_and_none_is_read_from_the_record_again(tmp_path, monkeypatch):
    folder = new_run(tmp_path / "run")
    monkeypatch.setattr(texts_module, "PORTION", 2 * ROWS)
    monkeypatch.setattr(texts_module, "CHUNK_ROWS", ROWS)
    for last in (3, 9, 20):
        begun = read_state(folder / "index")
        write(folder, range(begun.rows // 11 if begun else 0, last), HOSTILE, attempt=0)
        shot = indexed(folder)
        assert shot.state.texts == 11 * last // ROWS * ROWS
        assert stored(folder, shot, range(shot.rows)) == recorded(folder, shot, range(shot.rows))
    monkeypatch.setattr(cavesson.record.Run, "fetch", None)
    assert stored(folder, shot, range(ROWS - 1, 6 * ROWS))


def test_responses_are_whole_wherever_they_stand(tmp_path):
    folder = new_run(tmp_path / "run")
    write(folder, range(7), [*HOSTILE, "b" * (3 * LENGTH)], attempt=0)
    shot = indexed(folder)
    assert shot.rows == 77 and shot.state.texts == 64
    run = cavesson.record.open(folder)
    keys = list(zip(shot.raw("step").tolist(), shot.raw("sample").tolist(), strict=True))
    for rows in (np.arange(77), np.array([70, 3, 3, 64, 8, 0]), np.arange(65, 77), np.empty(0, np.int64)):
        wanted = run.fetch([keys[row] for row in rows], ["response"])["response"].to_pylist() if len(rows) else []
        assert read_responses(run, shot, rows).to_pylist() == wanted


def test_lengths_that_cannot_be_are_no_texts():
    for lengths in ([5], [-1, 4], [1, 1]):
        with pytest.raises(ValueError, match="damaged"):
            _strings(b"abc", np.array(lengths))


def test_a_superseded_row_has_no_text(tmp_path):
    folder = new_run(tmp_path / "run")
    begin_attempt(folder, start_step=0)
    write(folder, range(6), ["first"], attempt=0)
    assert indexed(folder).state.texts == 64
    begin_attempt(folder, start_step=2)
    write(folder, range(2, 6), ["second"], attempt=1)
    shot = indexed(folder)
    alive = np.flatnonzero(shot.alive)
    assert stored(folder, shot, alive) == recorded(folder, shot, alive)
    assert {text for _, text in stored(folder, shot, alive)} == {"first", "second"}
    # These two were superseded before their block was full.
    assert shot.state.texts == 96 and stored(folder, shot, [64, 65, 66]) == [("", ""), ("", ""), ("prompt 0", "second")]
    wanted = sorted(stored(folder, shot, alive))
    # An index made after the restart never sees what was superseded, and says the same.
    for path in (folder / "index").iterdir():
        path.unlink()
    fresh = indexed(folder)
    assert sorted(stored(folder, fresh, range(fresh.rows))) == wanted


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cut", [1, 17])
def test_a_store_that_is_too_short_is_made_anew(tmp_path, cut):
    folder = new_run(tmp_path / "run")
    write(folder, range(6), HOSTILE, attempt=0)
    indexed(folder)
    with (folder / "index" / "texts-places").open("r+b") as file:
        file.truncate(16 * 3 - cut)
    shot = indexed(folder)
    assert stored(folder, shot, range(66)) == recorded(folder, shot, range(66))
