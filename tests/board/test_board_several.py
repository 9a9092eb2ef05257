"""Several answers in one are the same as each alone."""

import json

import pytest
from board_helpers import board_of

from cavesson.board import api
from cavesson.board.api import Endpoint
from cavesson.board.selection import RunQuery
from cavesson.board.several import answer_all

ANSWERED = [
    "runs",
    "runs/0/rows?sort=-reward&offset=0&limit=5",
    "runs/0/histogram?column=reward&bins=7&steps=1-1",
    "runs/0/rollouts/1/2",
    "runs/0/info?",
]
REFUSED = {
    "runs/0/rollouts/1/999": 404,
    "runs/7/info": 404,
    "runs/0/rows?filter=reward+%3E": 400,
    "runs/0/rows?limit=many": 422,
    "runs/0/rows?limit=": 422,
    "runs/7/info?run=0": 404,
    "runs/0/nothing": 404,
}
OTHERS = ["events", "runs/0/rollouts/1/2/tokens", "answers?of=[]", "runs/0/export?format=csv", "../index.html"]


def several(client, asked):
    answer = client.get("/api/answers", params={"of": json.dumps(asked)})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_each_answer_is_the_one_it_has_alone(client):
    found = several(client, [*ANSWERED, *REFUSED])
    for asked, got in zip([*ANSWERED, *REFUSED], found, strict=True):
        alone = client.get(f"/api/{asked}")
        said = {"answer": alone.json()} if alone.status_code == 200 else alone.json()
        assert got == {"status": REFUSED.get(asked, 200)} | said, asked


def test_a_mistake_of_ours_is_said_and_printed_and_the_others_are_answered(client, monkeypatch, capsys):
    def broken(*given):
        raise ZeroDivisionError

    (endpoint,) = [one for one in api.ENDPOINTS if one.path == "/api/runs/{run}/info"]
    monkeypatch.setattr(api, "ENDPOINTS", (endpoint._replace(answer=broken), *api.ENDPOINTS))
    bad, good = several(client, ["runs/0/info", "runs"])
    assert (bad["status"], good["status"]) == (500, 200) and "terminal" in bad["error"]
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_board_that_is_told_to_stop_makes_no_further_answers(folder):
    board = board_of(folder)
    asked = []

    def stopping(board, query):
        asked.append(query.run)
        board.closing.set()
        return {}

    endpoints = [Endpoint("GET", "/api/runs/{run}/info", stopping, RunQuery)]
    found = answer_all(endpoints, board, ["runs/0/info"] * 3)
    assert [one["status"] for one in found] == [200, 503, 503] and asked == [0]
    assert found[1]["error"] == "the board is stopping"


def test_what_is_no_json_is_not_among_several(client):
    assert [one["status"] for one in several(client, OTHERS)] == [404] * len(OTHERS)


@pytest.mark.parametrize("of", ["", "no json", "{}", "[1]", '["runs"', json.dumps(["runs"] * 33)])
def test_what_asks_for_nothing_that_can_be_read_is_refused(client, of):
    answer = client.get("/api/answers", params={"of": of})
    assert answer.status_code in (400, 422) and "\n" not in answer.json()["error"]
