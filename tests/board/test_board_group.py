"""The responses of a group side by side: what is told of each against the record."""

from statistics import fmean

import numpy as np
import pyarrow as pa
import pytest
from board_helpers import board_of, client_of
from hypothesis import given
from hypothesis import strategies as st
from index_helpers import new_run

import cavesson.record
from cavesson.board import group, groups
from cavesson.board.group import mean_advantages
from cavesson.record import Recorder
from cavesson.text.final_answer import short_answer

TEXTS = [
    "So it is \\boxed{42}, surely.",
    "2 + 2\n#### 4 apples\nand more",
    "first 3, then 1,234.",
    "I do not know.",
    "\\boxed{never closed",
    "x = \\boxed{\\frac{1}{2}} not \\boxed{0.75}",
]
ANSWERS = ["42", "4 apples", "1,234", None, None, "0.75"]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = new_run(tmp_path_factory.mktemp("group") / "run")
    size, width = 7, 4
    rows = {
        "sample": np.arange(size),
        "group": [5] * 6 + [6],
        "prompt": ["What is it?"] * 6 + ["And this?"],
        "response": [*TEXTS, "other"],
        "reward": [1.0, 0.5, None, 0.0, 0.0, 1.0, 1.0],
        "reward_parts": [{"right": 1.0, "short": -2.0}] * 7,
        "reward_weights": [{"right": 1.0, "short": 0.1}] * 7,
        "reward_reasons": [{"right": "as in the book"}] * 7,
        "ground_truth": ["42"] * 7,
        "finish_reason": ["eos"] * 7,
    }
    attended = np.arange(width) < np.array([4, 3, 2, 1, 4, 4, 4])[:, None]
    tokens = {
        "attended": attended,
        "token_id": np.zeros((size, width), int),
        "advantage": np.arange(size * width).reshape(size, width).astype(np.float32),
        "learned": attended & (np.arange(width) % 2 == 0),
    }
    with Recorder(folder) as recorder:
        recorder.rollouts(3, rows, tokens)
    board = board_of(folder)
    yield client_of(board), cavesson.record.open(folder)
    board.scanner.stop()


def get(client, place: str):
    answer = client.get(f"/api/runs/run/groups/{place}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_group_has_all_its_responses_with_what_tells_them_apart(told):
    client, record = told
    got = get(client, "3/2")
    assert got["total"] == 6 and got["ground_truth"] == "42" and got == get(client, "3/5")
    rows = record.rows().to_pylist()
    tokens = record.tokens(3).to_pylist()
    for sample, line in enumerate(got["responses"]):
        assert (line["step"], line["sample"], line["response"]) == (3, sample, TEXTS[sample])
        assert (line["reward"], line["finish_reason"]) == (rows[sample]["reward"], "eos")
        assert line["length"] == rows[sample]["length"] and line["response_truncated"] is None
        assert line["parts"] == {"right": 1.0, "short": -2.0} and line["weights"] == {"right": 1.0, "short": 0.1}
        assert line["reasons"] == {"right": "as in the book"}
        own = [token["advantage"] for token in tokens if token["sample"] == sample and token["learned"]]
        assert line["advantage"] == fmean(own)
    assert [line["answer"] for line in got["responses"]] == ANSWERS
    assert [line["response"] for line in get(client, "3/6")["responses"]] == ["other"]


def test_long_responses_and_large_groups_are_cut(told, monkeypatch):
    client, _ = told
    monkeypatch.setattr(group, "MAX_TEXT", 5)
    monkeypatch.setattr(group, "MAX_SHOWN", 2)
    got = get(client, "3/0")
    assert got["total"] == 6 and len(got["responses"]) == 2 < groups.MAX_SHOWN
    first = got["responses"][0]
    assert first["response"] == TEXTS[0][:5] and first["response_truncated"] == len(TEXTS[0])
    assert first["answer"] == "42", "the answer is that of the whole response"


def test_a_group_that_is_not_there(told):
    client, _ = told
    assert client.get("/api/runs/run/groups/3/99").status_code == 404
    assert client.get("/api/runs/run/groups/x/1").status_code == 422


def test_the_answer_of_an_episode_is_in_its_last_turn(tmp_path):
    folder = new_run(tmp_path / "run")
    said = ["the result is 7", "Hanoi, of course"]
    texts = [one for text in said for one in ("17 or 18?", text)]
    turns = {"sample": [0, 0, 1, 1], "turn": [0, 1, 0, 1], "role": ["assistant"] * 4, "text": texts}
    rows = {"sample": [0, 1], "prompt": ["p"] * 2, "response": ["17 or 18?"] * 2, "reward": [0.0, 1.0]}
    with Recorder(folder) as recorder:
        recorder.rollouts(0, rows, turns=turns)
    got = get(client_of(board_of(folder)), "0/0")
    assert [line["answer"] for line in got["responses"]] == ["7", "Hanoi, of course"]
    assert [line["advantage"] for line in got["responses"]] == [None, None]


LINES = st.lists(
    st.tuples(st.sampled_from([4, 1, 9]), st.none() | st.floats(-2, 2, width=32), st.none() | st.booleans())
)


@given(LINES)
def test_mean_advantages_are_those_of_a_loop(lines):
    samples = [4, 1, 9]
    columns = list(zip(*lines, strict=True)) or [[], [], []]
    types = {"sample": pa.int32(), "advantage": pa.float32(), "learned": pa.bool_()}
    table = pa.table({name: pa.array(column, types[name]) for name, column in zip(types, columns, strict=True)})
    for sample, mean in zip(samples, mean_advantages(table, samples), strict=True):
        own = [value for of, value, learned in lines if of == sample and value is not None and learned is not False]
        assert mean == (pytest.approx(fmean(own), abs=1e-12) if own else None)


@pytest.mark.parametrize(("text", "answer"), [*zip(TEXTS, ANSWERS, strict=True)])
def test_an_answer_is_what_is_boxed_or_marked_or_the_last_number(text, answer):
    assert short_answer(text) == answer
