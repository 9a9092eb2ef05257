"""What a request is told that cannot be answered."""

import pytest

REFUSED = {
    "runs/run/rollouts/1/999": 404,
    "runs/7/info": 404,
    "runs/run/rows?filter=reward+%3E": 400,
    "runs/run/rows?limit=many": 422,
    "runs/run/rows?limit=": 422,
    "runs/7/info?run=run": 404,
    "runs/run/nothing": 404,
}


@pytest.mark.parametrize(("asked", "status"), REFUSED.items())
def test_what_cannot_be_answered_is_refused_in_one_line(client, asked, status):
    answer = client.get(f"/api/{asked}")
    assert answer.status_code == status and answer.json()["error"] and "\n" not in answer.json()["error"]
