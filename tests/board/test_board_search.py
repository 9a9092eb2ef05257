import re
import time

import numpy as np
import pytest
from board_helpers import ask, board_of, client_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from index_helpers import indexed, new_run, record, text_of

from cavesson.board import scanner as scanner_module
from cavesson.board import search as search_module
from cavesson.board.excerpts import excerpt
from cavesson.board.expressions import compiled, escaped, required
from cavesson.board.scanner import Looked, spans
from cavesson.errors import UserError


def keys(got):
    return [(row["step"], row["sample"]) for row in got["rows"]]


def expected(test):
    return [(step, i) for step in range(12) for i in range(8) if test(text_of(step, i))]


@pytest.mark.parametrize("q", ["on friday", "音乐会 很好", ":) ##", "So-So", "great :)", "é́ end"])
def test_a_phrase_is_found_where_it_stands(client, q):
    wanted = expected(lambda text: q.lower() in text.lower())
    got = ask(client, q=q)
    assert keys(got) == wanted
    assert all(row["response"][slice(*row["hit"])].lower() == q.lower() for row in got["rows"])


@pytest.mark.parametrize(
    "q", [r"\bon\b.*night", r"(?i)FRIDAY( \w+)?$", r"^[a-e]", r"\$\d|:\)", r"(a|b)(c)+", "^$", "会.很", "  ", " $"]
)
def test_a_regular_expression_finds_what_python_finds(client, q):
    got = ask(client, q=q, regex=1)
    assert keys(got) == expected(lambda text: re.search(q, text, re.ASCII))
    for row in got["rows"]:
        found = re.search(q, text_of(row["step"], row["sample"]), re.ASCII)
        assert row["response"][slice(*row["hit"])] == found[0]


def test_until_all_are_read_the_number_is_at_most(board, client, monkeypatch):
    monkeypatch.setattr(search_module, "PORTION", 4)
    monkeypatch.setattr(search_module, "PATIENCE", 0.0)
    first = client.get("/api/runs/run/rows", params={"q": "[t]he con", "regex": 1}).json()
    assert (first["at_most"] and first["total"] <= first["most"] == 96 - 0) or first["most"] < 96
    got = ask(client, q="[t]he con", regex=1)
    assert keys(got) == expected(lambda text: "the con" in text) and got["most"] == got["total"]
    steps = client.get("/api/runs/run/hits", params={"q": "[t]he con", "regex": 1}).json()
    assert sum(steps["hits"]) == got["total"] and not steps["at_most"]


def test_a_slow_request_with_an_older_snapshot_takes_over_what_a_newer_one_found(tmp_path):
    folder = new_run(tmp_path / "run")
    record(folder, [0])
    (run,) = board_of(folder).runs
    older = run.snapshot()
    record(folder, [1])
    (run,) = board_of(folder).runs
    newer = run.snapshot()
    assert older.rows < newer.rows
    search = search_module.Search(run, newer, "on", False)
    found, left = search.ask()
    while left.any():
        found, left = search.ask()
    late = search_module.Search(run, older, "on", False)
    late.take_over(search)
    assert late.hits.tolist() == found[: older.rows].tolist() and not late.left.any()


@pytest.mark.parametrize("span", [(0, 1), (1, 1), (0, 2), (2, 3)])
def test_a_hit_may_end_inside_a_character(span):
    shown = excerpt("é好x", span)
    assert shown.text == "é好x" and 0 <= shown.hit[0] <= shown.hit[1] <= 3


def test_an_expression_that_takes_too_long_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(scanner_module, "MAX_SECONDS", 1.0)
    folder = new_run(tmp_path / "run")
    record(folder, [0], response=["x" + "ab" * 300_000, *"bcdef"])
    board = board_of(folder)
    client = client_of(board)
    board.scanner.start()
    started = time.monotonic()
    got = ask(client, q="(.{0,300}a.{0,300}){1,3}$x", regex=1)
    assert got["stopped"] and got["at_most"] and time.monotonic() - started < 30
    assert not board.scanner._process or board.scanner._process.is_alive()
    monkeypatch.undo()
    assert keys(ask(client, q="^[b-d]$", regex=1)) == [(0, 1), (0, 2), (0, 3)], "the next search works"
    board.scanner.stop()


@pytest.mark.parametrize("q", ["(", "a{1001}", "((a{100}){100}){100}", "(?=x)", r"\1", "[", "(?P<x>", "*", "\\"])
def test_what_is_no_expression_is_one_plain_line(client, q):
    answer = client.get("/api/runs/run/rows", params={"q": q, "regex": 1})
    assert answer.status_code == 400
    assert "invalid regular expression" in answer.json()["error"] and "\n" not in answer.json()["error"]


SIMPLE = st.from_regex(
    r"([abc.]|\\w|\\d|\[[abc]\]|\([abc]\)|(\([ab]\|c\)))([*+?]|\{1,2\})?([abc]|\(b\)\+|a\?)?", fullmatch=True
)


@settings(deadline=None)
@given(SIMPLE, st.lists(st.text(alphabet="abcd1 ", max_size=10), max_size=5))
@example(r"\(a[(]b", ["x(a(b"])
@example(r"[]a]b", ["]b"])
@example("[[:digit:]]a", ["1a"])
@example(r"(?P<name>a)b", ["ab"])
@example(r"\Q(a\E(b)", ["(ab"])
def test_hits_are_where_python_finds_them(pattern, texts):
    found = spans(texts, compiled(pattern, regex=True))
    python = pattern.replace("[[:digit:]]", "[0-9]").replace(r"\Q(a\E", r"\(a")
    wanted = [(i, m.start(), m.end() - m.start()) for i, text in enumerate(texts) if (m := re.search(python, text))]
    assert list(zip(found.places.tolist(), found.start.tolist(), found.length.tolist(), strict=True)) == wanted


@settings(deadline=None)
@given(st.text(max_size=20), st.text(max_size=20))
@example("\x00", "a\x00b")
@example("\\Q.*\\E", "x\\Q.*\\Ey")
def test_plain_text_is_taken_as_it_is(text, around):
    try:
        found = spans([around + text, around], compiled(text, regex=False))
    except UserError:
        raise AssertionError(f"{escaped(text)} is not an expression") from None
    assert 0 in found.places
    assert (1 in found.places) == (text.casefold() in around.casefold()) or text.casefold() != text.lower()


@settings(deadline=None)
@given(SIMPLE, st.lists(st.text(alphabet="abcd1 ", max_size=10), max_size=5))
@example("abc+", ["abcc"])
@example("ab?c", ["ac"])
@example("ab{0,1}", ["a"])
@example("x(abc)?y", ["xy"])
@example(r"a\b", ["a"])
@example("ab|cd", ["cd"])
def test_what_an_expression_requires_is_in_every_match(pattern, texts):
    for text in texts:
        if found := re.search(pattern, text):
            assert all(any(piece in found[0] for piece in pieces) for pieces in required(pattern))


@pytest.mark.parametrize(
    ("pattern", "pieces"),
    [
        ("refund(ed)? in [0-9]+ days", ["refund", "in", "0 1 2 3 4 5 6 7 8 9", "days"]),
        ("colou?r", ["colo", "r"]),
        ("#{2,3}$", ["##"]),
        ("(ing){2}", ["inging"]),
        (r"a(b|cd+)\d", ["a", "b cd", "0 1 2 3 4 5 6 7 8 9"]),
        (r"(gold|silver) medal|prize", ["medal prize"]),
        ("[!?]$", ["! ?"]),
    ],
)
def test_required_pieces(pattern, pieces):
    assert required(pattern) == [frozenset(piece.split()) for piece in pieces]


@pytest.mark.parametrize(
    "pattern", ["a|", "(?i)x", "(?i:x)", ".*", "x*", "[^a]", r"\w", "[a-z]?", "[[:alpha:]]", r"\Qa\E", r"\pL", "(?s) "]
)
def test_expressions_that_require_nothing(pattern):
    assert required(pattern) == []


@pytest.mark.parametrize(("sort", "q"), [("reward", "c[o]ncert"), ("-reward", "co[n]cert")])
def test_the_top_of_the_table_is_looked_at_first_and_then_what_the_index_names(board, client, monkeypatch, sort, q):
    asked = []
    run = board.runs[0]
    held = {row for row, key in enumerate(run.snapshot().keys(np.arange(96))) if "concert" in text_of(*key)}

    def scan(what, pattern):
        asked.append(what.rows[:8].tolist())
        return Looked(8, np.flatnonzero(np.isin(what.rows[:8], list(held))))

    monkeypatch.setattr(board.scanner, "scan", scan)
    got = ask(client, q=q, regex=1, sort=sort, limit=3, filter="step >= 2")
    wanted = client.get("/api/runs/run/rows", params={"sort": sort, "limit": 96}).json()["rows"]
    within = [row["row"] for row in wanted if row["step"] >= 2]
    assert asked[0] == within[:8]
    assert [row["row"] for row in got["rows"]] == [row for row in within if row in held][:3]
    others = {row for rows in asked[1:] for row in rows}
    assert others <= held, "a response without this word cannot match"


@pytest.mark.parametrize("parameters", [{"q": "concert"}, {"q": "on friday"}, {"q": "f[r]iday", "regex": 1}])
def test_nothing_is_found_where_there_is_nothing(client, parameters):
    assert ask(client, steps="77-78", **parameters)["most"] == 0


def test_superseded_rollouts_are_not_found(tmp_path):
    from index_helpers import rows_of, tokens_of

    from cavesson.record import Recorder, begin_attempt

    folder = new_run(tmp_path / "run")
    record(folder, range(2), response=["needle one"] * 6)
    board_of(folder)
    with Recorder(folder, attempt=begin_attempt(folder, 1)) as recorder:
        recorder.rollouts(1, rows_of(1, 6) | {"response": ["hay"] * 6}, tokens_of(1, 6))
    client = client_of(board_of(folder))
    for parameters in ({"q": "needle"}, {"q": "needle one"}, {"q": "n..dle", "regex": 1}):
        assert keys(ask(client, **parameters)) == [(0, i) for i in range(6)]
    assert np.array(keys(ask(client, q="hay"))).shape == (6, 2)


def test_a_search_goes_on_where_it_was_when_the_run_grows(tmp_path, monkeypatch):
    folder = new_run(tmp_path / "run")
    record(folder, range(2), response=["needle one", *["hay"] * 5])
    board = board_of(folder)
    client = client_of(board)
    assert keys(ask(client, q="n[e]edle", regex=1)) == [(0, 0), (1, 0)]
    asked = []
    scan = board.scanner.scan
    monkeypatch.setattr(
        board.scanner,
        "scan",
        lambda what, pattern: asked.extend(what.rows.tolist()) or scan(what, pattern),
    )
    record(folder, [2], attempt=0, response=["hay", "needle", *["hay"] * 4])
    indexed(folder)
    assert keys(ask(client, q="n[e]edle", regex=1)) == [(0, 0), (1, 0), (2, 1)]
    assert asked and min(asked) >= 12, "the first two steps were looked at before"
    board.scanner.stop()


def test_an_error_without_words_is_said_by_its_name_and_the_next_is_answered(monkeypatch):
    """The process that searches goes on: that it had died would be told as an expression that takes too long."""

    class Pipe:
        def __init__(self):
            self.asked = [(["a"], "a"), (["b"], "b")]
            self.answers = []

        def recv(self):
            if not self.asked:
                raise EOFError
            return self.asked.pop(0)

        def send(self, answer):
            self.answers.append(answer)

    def wordless(texts, pattern):
        raise OSError

    pipe = Pipe()
    monkeypatch.setattr(scanner_module, "spans", wordless)
    monkeypatch.setattr(scanner_module, "small_process", lambda: None)
    monkeypatch.setattr(scanner_module.signal, "signal", lambda *_: None)
    scanner_module._work(pipe)
    assert [str(answer) for answer in pipe.answers] == ["ready", *["the record cannot be read: OSError"] * 2]
