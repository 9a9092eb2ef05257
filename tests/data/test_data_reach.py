import json

from hypothesis import given
from hypothesis import strategies as st

from cavesson.data.extra import as_json
from cavesson.text.reach import names_in, reach

ROW = {"a": {"b": {"c": 1}, "b.c": 2}, "a.b": 3, "list": [{"x": 4}, 5], "text": '{"x": {"y": 6}}', "null": None}


def test_paths_reach_into_objects_lists_and_json():
    assert reach(ROW, "a.b") == [3]  # its own name, before the object's field
    assert reach(ROW, "a.b.c") == [2]
    assert reach({"a": {"b": {"c": 1}}}, "a.b.c") == [1]
    assert reach(ROW, "list.0.x") == [4]
    assert reach(ROW, "list.1") == [5]
    assert reach(ROW, "text.x.y") == [6]
    assert reach(ROW, "null") == [None]
    for missing in ("b", "a.x", "list.2", "list.x", "null.x", "a.b.c.d", "text.y", ""):
        assert reach(ROW, missing) == []


keys = st.text("ab.", min_size=1, max_size=3)


@given(
    st.dictionaries(keys, st.recursive(st.integers(), lambda one: st.dictionaries(keys, one, max_size=3)), max_size=3)
)
def test_every_name_that_is_listed_can_be_reached(row):
    for name in names_in(row):
        assert reach(row, name)


def test_columns_as_json_keep_what_json_cannot_hold():
    from datetime import date, datetime

    import numpy as np

    row = {
        "text": "größer\ud800",
        "nan": float("nan"),
        "inf": [-float("inf")],
        "bytes": b"\x00a",
        "date": date(2026, 11, 27),
        "time": np.datetime64("2026-11-27T10:00"),
        "numbers": np.array([[1, 2]]),
        "number": np.float32(0.5),
        "object": {1: (True, None), "set": {7}},
        "when": datetime(2026, 11, 27, 10),
    }
    assert json.loads(as_json(row)) == {
        "text": "größer\ud800",
        "nan": "nan",
        "inf": ["-inf"],
        "bytes": "b'\\x00a'",
        "date": "2026-11-27",
        "time": "2026-11-27T10:00",
        "numbers": [[1, 2]],
        "number": 0.5,
        "object": {"1": [True, None], "set": [7]},
        "when": "2026-11-27 10:00:00",
    }
    as_json(row).encode()
    assert as_json({}) == "{}"


@given(
    st.dictionaries(
        st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda one: st.lists(one))
    )
)
def test_columns_as_json_come_back(row):
    assert json.loads(as_json(row)) == row
