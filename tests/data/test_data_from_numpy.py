"""Values of NumPy and PyTorch among the columns of the data, and in what rewards return."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from reward_helpers import call_reward

from cavesson.data.extra import as_json
from cavesson.data.fields import Fields, Row
from cavesson.data.from_numpy import from_numpy
from cavesson.data.notes import Notes
from cavesson.errors import UserCodeError, UserError

DATES = [np.datetime64("2026-11-27T10:00", "ns"), np.timedelta64(3, "ns"), np.datetime64("2026-11-27")]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int8(3), 3), (np.float32(0.5), 0.5), (np.bool_(True), True), (np.str_("a"), "a"),
        (np.array([[1, 2]]), [[1, 2]]), (torch.tensor([0.5]), [0.5]), (torch.tensor(2), 2),
        (None, None), ("a", "a"), (7, 7), ([1], [1]),
    ],
)  # fmt: skip
def test_they_become_those_of_python(value: Any, expected: Any) -> None:
    found = from_numpy(value)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize("date", DATES)
def test_dates_never_become_numbers(date: Any) -> None:
    assert from_numpy(date) is date
    assert json.loads(as_json({"at": date, "all": [date]})) == {"at": str(date), "all": [str(date)]}
    with pytest.raises(UserError, match="expected a text"):
        Fields(Row("row 1", {"at": date}), Notes()).text("at")
    with pytest.raises(UserCodeError, match="must return numbers"):
        call_reward(lambda prompts, responses: [date], "mine", ["p"], ["r"], {})


def test_a_number_that_python_lacks_becomes_a_text() -> None:
    assert json.loads(as_json({"x": np.longdouble("1.5")})) == {"x": "1.5"}
