"""Episodes: the turns of a rollout, and where each of its tokens comes from."""

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_helpers import plain
from rich.console import Console

import cavesson
from cavesson.exporters.tables import export
from cavesson.record import Recorder, begin_attempt, compact, write_rollouts, write_vocabulary
from cavesson.record.read.query import query
from cavesson.record.read.show import show
from cavesson.record.schema import TOKEN_COLUMNS, arrow_schema

ROWS = {"prompt": ["6*7?", "2+2?"], "response": ["multiply(6, 7)\n42\n42", "4"], "reward": [1.0, 0.0]}
# A call, the end of its turn as the template writes it, the result, and the answer; then a response of one token.
SOURCE = [["sampled", "sampled", "template", "tool", "tool", "template", "sampled"], ["sampled"]]
LEARNED = [[True, True, False, False, False, False, True], [True]]
TURNS: dict[str, list[Any]] = {
    "sample": [0, 0, 0, 1],
    "role": ["assistant", "tool", "assistant", "assistant"],
    "name": [None, "multiply", None, None],
    "arguments": [None, {"a": 6, "b": 7}, None, None],
    "text": ["multiply(6, 7)", "42", "42", "4"],
    "first_token": [0, 3, 6, 0],
    "tokens": [2, 2, 1, 1],
    "seconds": [None, 0.25, None, None],
    "error": [None, None, None, None],
    "reward": [None, None, 1.0, 0.0],
}


def tokens() -> dict[str, Any]:
    return {"token_id": [[5, 6, 1, 7, 8, 1, 7], [9]], "source": SOURCE, "learned": LEARNED}


@pytest.fixture
def run(folder):
    with Recorder(folder) as recorder:
        recorder.rollouts(0, ROWS, tokens(), TURNS)
        recorder.rollouts(1, ROWS, tokens())
    return cavesson.open(folder)


def test_turns_read_back_as_given(run):
    found = run.turns(0).to_pylist()
    assert [row["turn"] for row in found] == [0, 1, 2, 0], "in the order in which a rollout has them"
    assert json.loads(found[1]["arguments"]) == {"a": 6, "b": 7}
    for name in TURNS.keys() - {"arguments"}:
        assert [row[name] for row in found] == TURNS[name]
    assert {(row["step"], row["attempt"], row["rank"]) for row in found} == {(0, 0, 0)}
    assert run.turns(0, 1).to_pylist() == found[3:] and run.turns(0, 0).to_pylist() == found[:3]
    assert run.turns(1).num_rows == run.turns(1, 0).num_rows == 0, "of these rollouts, no turns were recorded"
    assert run.has_turns()


def test_sources_and_learned_tokens_read_back_as_given(run):
    found = run.tokens(0)
    assert found["source"].to_pylist() == [*SOURCE[0], *SOURCE[1]]
    assert found["learned"].to_pylist() == [*LEARNED[0], *LEARNED[1]]
    assert found["position"].to_pylist() == [0, 1, 2, 3, 4, 5, 6, 0]


def test_statistics_and_rollups_are_those_of_the_learned_tokens(folder):
    delta = np.array([[1.0, 2.0, 40.0, 50.0, 60.0, 70.0, 3.0], [0.5, 0, 0, 0, 0, 0, 0]])
    attended = np.array([[True] * 7, [True] + [False] * 6])
    learned = np.array([LEARNED[0], LEARNED[1] + [False] * 6])
    with Recorder(folder) as recorder:
        given = {"attended": attended, "learned": learned, "logprob": delta, "ref_logprob": np.zeros((2, 7))}
        recorder.rollouts(0, ROWS, given)
    run = cavesson.open(folder)
    rows = run.rows(["length", "kl_k1", "log_ratio_max"]).to_pylist()
    assert rows == [
        {"length": 3, "kl_k1": 6.0, "log_ratio_max": 3.0}, {"length": 1, "kl_k1": 0.5, "log_ratio_max": 0.5}
    ]  # fmt: skip
    logprob = run.rollups(["logprob"]).to_pylist()[0]
    assert (logprob["count"], logprob["sum"]) == (4, 6.5)
    assert run.tokens(0).num_rows == 8, "padding is not recorded, and what a tool wrote is"


def test_codes_are_sources(folder):
    codes = np.array([[0, 1, 2, 3, -1, 0]], np.int8)
    attended = np.array([[True] * 5 + [False]])
    with Recorder(folder) as recorder:
        rows = {"prompt": ["p"], "response": ["r"], "reward": [0.0]}
        recorder.rollouts(0, rows, {"attended": attended, "source": codes, "token_id": codes})
        recorder.rollouts(1, rows, {"source": [[0, 1, 2, 3, -1]]})
    for step in range(2):
        found = cavesson.open(folder).tokens(step)
        assert found["source"].to_pylist() == ["sampled", "template", "tool", "user", None]
        assert found["learned"].to_pylist() == [True] * 5


def test_callers_with_the_earlier_name_record_the_same(folder, tmp_path):
    mask = np.array([[True, False, True, False]])
    rows = {"prompt": ["p"], "response": ["r"], "reward": [0.0]}
    for place, name in ((folder, "mask"), (tmp_path / "other", "attended")):
        with Recorder(place) as recorder:
            recorder.rollouts(0, rows, {name: mask, "token_id": np.array([[1, 2, 3, 4]])})
    old, new = (cavesson.open(place).tokens(0).to_pylist() for place in (folder, tmp_path / "other"))
    assert plain(old) == plain(new)
    assert [(one["position"], one["token_id"], one["learned"]) for one in old] == [(0, 1, True), (2, 3, True)]


def older(folder: Path) -> None:
    """Turn the files of a record into those of an earlier version, which called the column ``mask``."""
    for path in folder.glob("record/tokens-*"):
        table = pq.read_table(path)
        names = ["mask" if name == "learned" else name for name in table.column_names]
        pq.write_table(table.rename_columns(names).drop_columns("source"), path)


def test_older_records_read_as_before(folder):
    for attempt in range(2):  # the second one resumes a run of an earlier version
        begin_attempt(folder, 3 * attempt)
        with Recorder(folder, attempt=attempt, interval=0) as recorder:
            for step in range(3 * attempt, 3 * attempt + 3):
                recorder.rollouts(step, ROWS, tokens())
        if not attempt:
            older(folder)
            with Recorder(folder, attempt=0) as recorder:  # adds to a segment of the earlier version
                recorder.rollouts(2 + 1, ROWS, tokens())
    run = cavesson.open(folder)
    everything = [value for learned in LEARNED for value in learned]
    for _ in range(2):
        for step in range(6):
            assert run.tokens(step)["learned"].to_pylist() == everything
            assert run.tokens(step, 0)["learned"].to_pylist() == LEARNED[0]
        assert run.arrow("tokens", ["learned"])["learned"].to_pylist() == 6 * everything
        counts = run.sql("SELECT step, count(*) FILTER (learned), count(source) FROM tokens GROUP BY 1 ORDER BY 1")
        assert counts.fetchall() == [(step, 4, 0 if step < 3 else 8) for step in range(6)]
        assert query(run, "SELECT count(*) FROM tokens WHERE NOT learned").rows == [(24,)]
        compact(folder)


def everything(run: cavesson.Run) -> str:
    rows = run.rows(["step", "sample"]).to_pylist()
    each = [run.turns(row["step"], row["sample"]).to_pylist() for row in rows]
    steps = [run.turns(step).to_pylist() for step in sorted({row["step"] for row in rows})]
    sql = run.sql("SELECT * FROM turns ORDER BY step, sample, turn").fetchall()
    return plain([run.arrow("turns").to_pylist(), each, steps, sql])


episodes = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=6)
"""Step → sample → number of turns."""


@settings(max_examples=min(25, settings.default.max_examples))
@given(episodes, st.sampled_from([0.0, 60.0]))
def test_turns_survive_files_merges_and_resumes(tmp_path_factory, counts, interval):
    folder, wanted = tmp_path_factory.mktemp("run"), []
    with Recorder(folder, interval=interval) as recorder:
        for step, samples in enumerate(counts):
            order = np.arange(len(samples))[::-1]
            rows = {"sample": order, "prompt": ["p"] * len(order), "response": ["r"] * len(order)}
            lines = [(int(sample), turn) for sample in order for turn in range(samples[sample])]
            texts = [f"{step}/{sample}/{turn}" for sample, turn in lines]
            wanted += sorted((step, *line) for line in lines)
            turns = {"sample": [s for s, _ in lines], "role": ["user"] * len(lines), "text": texts}
            recorder.rollouts(step, rows | {"reward": np.zeros(len(order))}, {}, turns if step % 3 else None)
    wanted = [key for key in wanted if key[0] % 3]
    run = cavesson.open(folder)
    found = run.arrow("turns").to_pylist()
    assert [(one["step"], one["sample"], one["turn"]) for one in found] == wanted
    assert [one["text"] for one in found] == ["/".join(map(str, key)) for key in wanted]
    before = everything(run)
    compact(folder)
    assert everything(run) == before
    segments = {segment.stem for segment in run.segments()}
    assert {path.stem.removeprefix("turns-") for path in folder.glob("record/turns-*")} <= segments, "nothing is left"


def test_a_new_attempt_supersedes_turns(folder):
    for attempt in range(2):
        begin_attempt(folder, attempt)
        with Recorder(folder, attempt=attempt) as recorder:
            for step in range(attempt, 3):
                recorder.rollouts(step, ROWS, tokens(), TURNS | {"text": [str(attempt)] * 4})
    run = cavesson.open(folder)
    for _ in range(2):
        assert run.arrow("turns")["text"].to_pylist() == ["0"] * 4 + ["1"] * 8
        texts = "SELECT text, count(*) FROM turns GROUP BY 1 ORDER BY 1"
        assert run.sql(texts).fetchall() == query(run, texts).rows == [("0", 4), ("1", 8)]
        compact(folder)


def test_turns_of_several_calls_and_processes_are_one_table(folder):
    attempt = begin_attempt(folder, 0, processes=2)
    for rank in range(2):
        with Recorder(folder, attempt=attempt, rank=rank) as recorder:
            for part in range(2):
                sample = 4 * rank + 2 * part + np.arange(2)
                turns = TURNS | {"sample": sample[[0, 0, 0, 1]]}
                recorder.rollouts(0, {"sample": sample, **ROWS}, tokens(), turns)
    run = cavesson.open(folder)
    for _ in range(2):
        found = run.turns(0)
        assert found["sample"].to_pylist() == [s for first in range(0, 8, 2) for s in [first] * 3 + [first + 1]]
        assert found["rank"].to_pylist() == [0] * 8 + [1] * 8
        compact(folder)


def test_a_later_call_without_samples_counts_turns_from_its_own_first_rollout(folder):
    with Recorder(folder) as recorder:
        recorder.rollouts(0, ROWS, tokens(), TURNS)
        recorder.rollouts(0, ROWS, tokens(), TURNS)
    assert cavesson.open(folder).turns(0)["sample"].to_pylist() == [0, 0, 0, 1, 2, 2, 2, 3]


def test_the_journal_of_a_killed_process_has_turns(folder):
    recorder = Recorder(folder, interval=60)
    for step in range(3):
        recorder.rollouts(step, ROWS, tokens(), TURNS if step else None)
    recorder._queue.join()
    (path,) = folder.glob("record/.journal-*")
    content = path.read_bytes()
    recorder.close()
    run = cavesson.open(folder)
    whole = plain([run.arrow(name).to_pylist() for name in ("rows", "tokens", "turns")])
    for name in ("rows", "tokens", "turns", "rollups"):
        for file in folder.glob(f"record/{name}-00000001-*"):
            file.unlink()
    path.write_bytes(content)
    again = cavesson.open(folder)
    assert plain([again.arrow(name).to_pylist() for name in ("rows", "tokens", "turns")]) == whole
    assert run.turns(1).num_rows == run.turns(2).num_rows == 4


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"mood": ["good"] * 4}, "turns have no column 'mood'"),
        ({"role": None}, "turns are missing the required column 'role'"),
        ({"text": ["a"]}, "turns column 'text' has 1 entries, 'sample' has 4"),
        ({"sample": [0, 0, 7, 1]}, "turns column 'sample' names 7, which is not one of these rollouts"),
        ({"turn": [0, 1, 1, 0]}, "the same turn of a rollout twice"),
    ],
)
def test_wrong_turns_are_refused_and_nothing_is_recorded(folder, change, what):
    given = {name: values for name, values in (TURNS | change).items() if values is not None}
    with Recorder(folder) as recorder:
        with pytest.raises(ValueError, match=what):
            recorder.rollouts(0, ROWS, tokens(), given)
        recorder.rollouts(0, ROWS, tokens(), TURNS)
    assert cavesson.open(folder).turns(0).num_rows == 4


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            {"source": [["sampled"] * 7, ["robot"]]},
            "'source' has 'robot', expected one of sampled, template, tool, user, data",
        ),
        ({"source": [[5] * 7, [0]]}, "'source' has codes from 0 to 5, expected -1 to 4"),
        ({"mask": np.ones((2, 7), np.bool_), "learned": np.ones((2, 7), np.bool_)}, "the earlier name of 'attended'"),
        ({"attended": np.zeros((2, 7), np.bool_), "learned": np.ones((2, 7), np.bool_)}, "that attended leaves out"),
    ],
)
def test_wrong_sources_and_masks_are_refused(folder, change, what):
    given = change if isinstance(next(iter(change.values())), np.ndarray) else tokens() | change
    with Recorder(folder) as recorder, pytest.raises(ValueError, match=what):
        recorder.rollouts(0, ROWS, given)


def test_show_prints_turns_and_who_wrote_a_token(run):
    out = io.StringIO()
    show(run.folder, Console(file=out, width=200), step=0, sample=0)
    text = out.getvalue()
    (call,) = (line for line in text.splitlines() if '{"a": 6, "b": 7}' in line)
    assert [cell.strip() for cell in call.split("│")[1:-1]] == [
        "1",
        "tool",
        "multiply",
        '{"a": 6, "b": 7}',
        "42",
        "2",
        "0.25",
        "",
    ]
    assert text.count("tool, not learned") == 2 and text.count("template, not learned") == 2


def test_turns_are_exported(run, tmp_path):
    for form in ("csv", "jsonl", "parquet"):
        export(run.folder, tmp_path / form, format=form)
    assert pq.read_table(tmp_path / "parquet" / "turns.parquet").to_pylist() == run.arrow("turns").to_pylist()
    lines = [json.loads(line) for line in (tmp_path / "jsonl" / "turns.jsonl").read_text().splitlines()]
    assert [line["role"] for line in lines] == TURNS["role"] and lines[1]["name"] == "multiply"
    assert (tmp_path / "csv" / "turns.csv").read_text().count('"multiply"') == 1
    source = pq.read_table(tmp_path / "parquet" / "tokens.parquet")["source"].to_pylist()
    assert source == 2 * [*SOURCE[0], *SOURCE[1]]


def test_a_record_without_turns_has_an_empty_table_and_no_file(folder, tmp_path):
    write_vocabulary(folder, ["a"], ["a"])
    with Recorder(folder) as recorder:
        recorder.rollouts(0, ROWS, tokens())
    run = cavesson.open(folder)
    assert run.arrow("turns").num_rows == 0 and run.sql("SELECT count(*) FROM turns").fetchall() == [(0,)]
    assert query(run, "SELECT count(*) FROM turns").rows == [(0,)] and not run.has_turns()
    export(folder, tmp_path / "out", format="csv")
    assert not list(tmp_path.rglob("turns*"))


def test_a_turn_takes_the_bytes_of_a_row(tmp_path):
    """Of equally long texts, as many turns take at most half as many bytes more than rows."""
    count, steps = 64, 20
    texts = [f"{i} " + "word " * 40 for i in range(count)]
    rows = {"prompt": texts, "response": texts, "reward": np.zeros(count)}
    turns = {"sample": np.arange(count), "role": ["tool"] * count, "text": texts, "arguments": texts}
    with Recorder(tmp_path / "run", interval=60) as recorder:
        for step in range(steps):
            recorder.rollouts(step, rows, {}, turns)
    sizes = {kind: sum(p.stat().st_size for p in tmp_path.rglob(f"record/{kind}-*")) for kind in ("rows", "turns")}
    assert 0 < sizes["turns"] < 1.5 * sizes["rows"]


def test_tables_of_turns_can_be_written_at_once(folder):
    begin_attempt(folder, 0)
    rows = pa.table({"step": pa.array([0, 1], pa.int32()), "sample": pa.array([0, 0], pa.int32()), "prompt": ["p", "q"],
                     "response": ["r", "s"], "reward": [0.0, 1.0]})  # fmt: skip
    turns = pa.table({"step": pa.array([1, 1], pa.int32()), "sample": pa.array([0, 0], pa.int32()),
                      "turn": pa.array([1, 0], pa.int32()), "role": ["tool", "assistant"]})  # fmt: skip
    write_rollouts(folder, 0, rows, arrow_schema(TOKEN_COLUMNS).empty_table(), turns)
    run = cavesson.open(folder)
    assert run.turns(1, 0)["role"].to_pylist() == ["assistant", "tool"] and run.turns(0).num_rows == 0


def test_the_summaries_of_a_run_count_turns_and_calls(folder):
    broken = TURNS | {"error": [None, "too late", None, None]}
    with Recorder(folder) as recorder:
        recorder.rollouts(0, ROWS, tokens(), TURNS)
        recorder.rollouts(1, ROWS, tokens(), broken)
    out = io.StringIO()
    show(folder, Console(file=out, width=200))
    assert re.search(r"turns +8 *\n", out.getvalue()) and re.search(r"calls of tools +2, 1 failed", out.getvalue())
    page = cavesson.open(folder)._repr_html_()
    assert re.search(r">turns</th><td[^>]*>8<", page) and "2, 1 failed" in page


def test_merged_rows_say_where_their_turns_are(folder):
    with Recorder(folder, interval=0) as recorder:
        for step in range(3):
            recorder.rollouts(step, ROWS, tokens(), TURNS if step != 1 else None)
    compact(folder)
    run = cavesson.open(folder)
    (segment,) = run.segments()
    places = run.read(segment, "rows", ["turn_start", "turn_count"]).to_pylist()
    assert [tuple(place.values()) for place in places] == [(0, 3), (3, 1), (None, None), (None, None), (4, 3), (7, 1)]
    assert run.read(segment, "turns", ["sample"], 4, 3)["sample"].to_pylist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("text", "given", "error"),
    [
        ('{"error": "no such file"}', None, "no such file"),
        ("{'error': 'no such file'}", None, "no such file"),
        ('{"error": "no such file"}', "it took too long", "it took too long"),
        ('{"error": null}', None, None),
        ('{"error": "none", "value": 3}', None, None),
        ("error", None, None),
    ],
)
def test_a_call_has_failed_if_its_result_says_nothing_else(tmp_path, text, given, error):
    turns = {"sample": [0, 0], "role": ["tool", "assistant"], "text": [text, text]}
    with Recorder(tmp_path / "run", interval=0.0) as recorder:
        rows = {"prompt": ["p"], "response": ["r"], "reward": [0.0]}
        recorder.rollouts(0, rows, {}, turns | ({} if given is None else {"error": [given, None]}))
    run = cavesson.open(tmp_path / "run")
    assert run.turns(0)["error"].to_pylist() == [error, None]
    assert run.rows(["calls", "call_errors"]).to_pylist() == [{"calls": 1, "call_errors": int(error is not None)}]
