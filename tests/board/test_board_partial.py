"""While the index is being built, every answer says how far it is, and none says that there is nothing."""

import csv
import io

import pytest
from board_helpers import client_of
from index_helpers import new_run, record, text_of

import cavesson.record
from cavesson.board.runs import Board
from cavesson.index import build
from cavesson.index.build import Builder
from cavesson.record.read.index_folder import index_folder

STEPS, BATCH = 12, 8
NUMBERS = ["series", "histogram", "ridge", "rows", "groups?step=2", "never-beats", "prompts"]
TEXTS = ["patterns", "similar/1/1", "rows?q=x", "hits?q=x", "histogram?q=x"]


@pytest.fixture
def growing(tmp_path, monkeypatch):
    """The board of a run, and the builder of its index, which adds four steps at a time."""
    folder = new_run(tmp_path / "run")
    for step in range(STEPS):
        record(folder, [step], batch=BATCH)
    run = cavesson.record.open(folder)
    monkeypatch.setattr(build, "BATCH", 4 * BATCH)
    board = Board([run])
    yield board, Builder(run, index_folder(run))
    board.scanner.stop()


def stopped_after(builder, rows):
    """Let the builder add rollouts until it has so many."""
    commit = builder._commit

    def counting(state):
        commit(state)
        if state.recorded > state.rows >= rows:
            raise InterruptedError

    builder._commit = counting
    with pytest.raises(InterruptedError):
        builder.update()
    builder._commit = commit


def get(board, path):
    answer = client_of(board).get(f"/api/{path}")
    return answer.status_code, answer.json()


def finished(builder):
    while builder.update() or builder.advance():
        pass


def test_before_anything_is_indexed_it_is_said_how_much_there_is(growing):
    board, builder = growing
    told = {"indexed": 0, "of": STEPS * BATCH}
    for path in ("rows", "rows?filter=reward+>+0", "rows?q=x", "hits?q=x", "patterns", "groups?step=2"):
        assert get(board, f"runs/run/{path}")[1]["partial"] == told, path
    (run,) = get(board, "runs")[1]
    assert run["partial"] == told and run["indexed"] == 0
    status, refused = get(board, "runs/run/histogram")
    assert status == 400 and "0 of 96 rollouts are indexed" in refused["error"]
    finished(builder)
    assert get(board, "runs")[1][0]["partial"] is None


def test_while_rollouts_are_added_each_answer_says_how_many(growing):
    board, builder = growing
    stopped_after(builder, 4 * BATCH)
    for path in NUMBERS:
        assert get(board, f"runs/run/{path}")[1]["partial"] == {"indexed": 4 * BATCH, "of": STEPS * BATCH}, path
    for path in TEXTS:
        assert get(board, f"runs/run/{path}")[1]["partial"] == {"indexed": 0, "of": STEPS * BATCH}, path
    assert get(board, "compare?runs=run@0-1,run@2-3")[1]["partial"] == {"indexed": 4 * BATCH, "of": STEPS * BATCH}
    found = get(board, "runs/run/rows?filter=step+%3E=+3")[1]
    assert (found["total"], found["at_most"], found["most"]) == (BATCH, True, BATCH + 8 * BATCH)
    late = get(board, "runs/run/rollouts/11/1")[1]
    assert late["partial"] and late["siblings"] == []
    assert get(board, "runs/run/rows?filter=nonsense+%3E+1")[1]["error"].endswith(
        "(so far, 32 of 96 rollouts are indexed)"
    )
    finished(builder)
    for path in (*NUMBERS, *TEXTS):
        assert get(board, f"runs/run/{path}")[1]["partial"] is None, path
    found = get(board, "runs/run/rows?filter=step+%3E=+3")[1]
    assert (found["total"], found["at_most"]) == (9 * BATCH, False)
    assert len(get(board, "runs/run/rollouts/11/1")[1]["siblings"]) > 1


def test_a_search_does_not_say_that_nothing_matches_what_it_has_not_seen(growing):
    board, builder = growing
    assert builder.update()
    text = text_of(3, 1).split()[0]
    for path in ("rows", "hits"):
        found = get(board, f"runs/run/{path}?q={text}")[1]
        assert (found["at_most"], found["most"]) == (True, STEPS * BATCH), path
        assert found["partial"] == {"indexed": 0, "of": STEPS * BATCH}
    finished(builder)
    wanted = sum(text.lower() in text_of(step, sample).lower() for step in range(STEPS) for sample in range(BATCH))
    found = get(board, f"runs/run/rows?q={text}")[1]
    for _ in range(100):
        if not found["at_most"]:
            break
        found = get(board, f"runs/run/rows?q={text}")[1]
    assert found["total"] == wanted > 0 and found["partial"] is None


def test_what_was_recorded_later_counts_until_it_is_added(growing):
    board, builder = growing
    finished(builder)
    record(board.runs[0].record.folder, [STEPS, STEPS + 1], batch=BATCH)
    stopped_after(builder, STEPS * BATCH)
    assert get(board, "runs/run/rows")[1]["partial"] == {"indexed": STEPS * BATCH, "of": (STEPS + 2) * BATCH}
    finished(builder)
    assert get(board, "runs/run/rows")[1]["partial"] is None


def test_only_a_complete_selection_is_exported(growing):
    board, builder = growing
    stopped_after(builder, 4 * BATCH)
    status, refused = get(board, "runs/run/export")
    assert status == 400 and refused["error"].startswith("32 of 96 rollouts are indexed so far")
    finished(builder)
    text = client_of(board).get("/api/runs/run/export").text
    assert len(list(csv.DictReader(io.StringIO(text)))) == STEPS * BATCH
