"""Several answers in one are the same as each alone."""

import json

import pytest
from board_helpers import board_of, client_of
from index_helpers import new_run, record

ANSWERED = [
    "runs",
    "runs/0/rows?sort=-reward&offset=0&limit=5",
    "runs/0/histogram?column=reward&bins=7&steps=1-1",
    "runs/0/rollouts/1/2",
]
REFUSED = {
    "runs/0/rollouts/1/999": 404,
    "runs/7/info": 404,
    "runs/0/rows?filter=reward+%3E": 400,
    "runs/0/rows?limit=many": 422,
    "runs/0/nothing": 404,
}
OTHERS = ["events", "runs/0/rollouts/1/2/tokens", "answers?of=[]", "runs/0/export?format=csv", "../index.html"]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = new_run(tmp_path_factory.mktemp("several") / "run")
    record(folder, range(3))
    board = board_of(folder)
    yield client_of(board)
    board.scanner.stop()


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


def test_what_is_no_json_is_not_among_several(client):
    assert [one["status"] for one in several(client, OTHERS)] == [404] * len(OTHERS)


@pytest.mark.parametrize("of", ["", "no json", "{}", "[1]", '["runs"', json.dumps(["runs"] * 33)])
def test_what_asks_for_nothing_that_can_be_read_is_refused(client, of):
    answer = client.get("/api/answers", params={"of": of})
    assert answer.status_code in (400, 422) and "\n" not in answer.json()["error"]
