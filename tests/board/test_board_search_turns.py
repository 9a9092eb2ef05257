"""Search finds what stands only in turns: results, arguments, errors, and what the user of the environment said."""

import re
from typing import Any

import numpy as np
import pytest
from board_helpers import ask, board_of, client_of
from hypothesis import given, settings
from hypothesis import strategies as st
from index_helpers import new_run
from turn_helpers import record_turns, turns_of

import cavesson
from cavesson.board import search as search_module
from cavesson.index.build import Builder
from cavesson.index.turns import TEXTS

STEPS, BATCH = 7, 10


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    folder = new_run(tmp_path_factory.mktemp("turns") / "run")
    record_turns(folder, range(STEPS), batch=BATCH)
    board = board_of(folder)
    yield board
    board.scanner.stop()


@pytest.fixture(scope="module")
def client(board):
    return client_of(board)


def said(step: int, sample: int) -> list[tuple[int, str, str]]:
    """What each turn says, with its number and the part of it."""
    turns = enumerate(turns_of(step, sample))
    return [(number, part, turn[part]) for number, turn in turns for part in TEXTS if turn.get(part) is not None]


def holds(text: str, q: str, regex: bool) -> bool:
    return bool(re.search(q, text)) if regex else q.lower() in text.lower()


def expected(q: str, regex: bool = False) -> dict[tuple[int, int], tuple[int, str, str] | None]:
    """The rollouts with a hit, and the first turn that has one; None if only the response has."""
    found = {}
    for key in [(step, sample) for step in range(STEPS) for sample in range(BATCH)]:
        first = next((one for one in said(*key) if holds(one[2], q, regex)), None)
        if first or holds(f"response {key[1]}", q, regex):
            found[key] = first
    return found


def check(client: Any, q: str, regex: bool = False) -> None:
    rows = ask(client, q=q, regex=int(regex))["rows"]
    wanted = expected(q, regex)
    assert [(row["step"], row["sample"]) for row in rows] == list(wanted)
    for row, first in zip(rows, wanted.values(), strict=True):
        start, stop = row["hit"]
        assert holds(row["response"][start:stop], q, regex)
        if first is None:
            assert row["hit_turn"] is None and row["response"].startswith("response")
        else:
            number, part, text = first
            turn = turns_of(row["step"], row["sample"])[number]
            assert row["hit_turn"] == {
                "turn": number, "role": turn["role"], "name": turn.get("name"), "part": part
            }  # fmt: skip
            assert row["response"] == text


@pytest.mark.parametrize(
    "q",
    [
        "gamma",
        "key: beta",
        '6, "b',
        '"b": 7',
        "not JSON",
        "timed OUT",
        "音",
        "音乐",
        "multiply",
        "đọc",
        "response 3",
        "42",
        "e",
    ],
)
def test_a_text_is_found_in_every_part_of_a_turn(client, q):
    assert expected(q)
    check(client, q)


@pytest.mark.parametrize("q", [r"^beta", r'"[ab]": \d', r"after \d s$", r"^$", r"response [1-3]", "(gam|JS)"])
def test_an_expression_is_matched_in_each_text_alone(client, q):
    assert expected(q, regex=True)
    check(client, q, regex=True)


FRAGMENTS = sorted({text for step in range(STEPS) for sample in range(BATCH) for *_, text in said(step, sample)})


@settings(deadline=None)
@given(st.data())
def test_any_part_of_what_a_turn_says_is_found(client, data):
    text = data.draw(st.sampled_from(FRAGMENTS))
    start = data.draw(st.integers(0, max(len(text) - 1, 0)))
    q = text[start : data.draw(st.integers(start + 1, max(len(text), start + 1)))].strip()
    if q:
        check(client, q)


def test_what_is_not_indexed_yet_counts_as_possible(tmp_path, monkeypatch):
    folder = new_run(tmp_path / "run")
    record_turns(folder, range(STEPS), batch=BATCH)
    builder = Builder(cavesson.open(folder), folder / "index")
    builder.update()
    board = board_of_index(folder)
    client = client_of(board)
    found = client.get("/api/runs/run/rows", params={"q": "gamma"}).json()
    assert found["total"] == 0 and found["most"] == STEPS * BATCH
    filtered = ask(client, filter='"beta" in arguments and seconds >= 0.5')
    while builder.advance():
        pass
    assert ask(client, filter='"beta" in arguments and seconds >= 0.5')["rows"] == filtered["rows"] != []
    check(client, "gamma")
    board.scanner.stop()


def board_of_index(folder):
    """A board of a run, whose index stays as it is."""
    from cavesson.board.runs import Board

    return Board([cavesson.open(folder)])


def test_the_top_of_the_table_is_searched_in_turns_too(board, client, monkeypatch):
    monkeypatch.setattr(search_module, "PORTION", 4)
    monkeypatch.setattr(search_module, "PATIENCE", 0.0)
    assert {(row["step"], row["sample"]) for row in ask(client, q="ke[y]", regex=1, sort="-reward")["rows"]} == set(
        expected("key")
    )


def test_patterns_and_hits_count_what_turns_say(client):
    hits = client.get("/api/runs/run/hits", params={"q": "gamma"}).json()
    wanted = np.bincount([step for step, _ in expected("gamma")], minlength=STEPS)
    assert hits["hits"] == wanted.tolist()


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("seconds > 2", lambda turn: (turn["seconds"] or 0) > 2),
        ('tool == "search" and seconds > 2', lambda turn: turn["name"] == "search" and (turn["seconds"] or 0) > 2),
        ('"alpha" in arguments', lambda turn: "alpha" in (turn["arguments"] or "")),
        ('tool == "multiply" and result == "42"', lambda turn: turn["name"] == "multiply" and turn["text"] == "42"),
        ('"no such" in error and step < 3', lambda turn: "no such" in (turn["error"] or "")),
    ],
)
def test_the_table_and_exports_are_filtered_by_what_calls_say(client, condition, holds):
    wanted = [
        (step, sample)
        for step in range(3 if "step" in condition else STEPS)
        for sample in range(BATCH)
        if any(turn["role"] == "tool" and holds(turn) for turn in turns_of(step, sample))
    ]
    assert wanted and [(row["step"], row["sample"]) for row in ask(client, filter=condition)["rows"]] == wanted
    lines = client.get("/api/runs/run/export", params={"filter": condition, "format": "jsonl"}).text.splitlines()
    assert len(lines) == len(wanted)
    within = ask(client, filter=condition, steps="1-2", split="train")["rows"]
    assert [(row["step"], row["sample"]) for row in within] == [key for key in wanted if 1 <= key[0] <= 2]


def test_the_page_knows_what_a_filter_can_ask_of_a_call(client):
    columns = client.get("/api/runs").json()[0]["columns"]
    assert columns["calls"] == ["tool", "error", "seconds", "arguments", "result"]
    assert columns["spoken"] == ["said", "policy", "user"]
    assert sorted(columns["tools"]) == ["multiply", "search", "Đọc"]
