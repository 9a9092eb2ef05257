"""The last rows of others share their columns and words, and say the same as rows that were read on their own."""

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from cavesson.doctor.rows import Rows

VALUES = st.lists(
    st.tuples(st.none() | st.floats(width=32), st.none() | st.integers(-5, 5), st.none() | st.text("ab #"))
)


@given(VALUES.filter(bool), st.data())
def test_the_last_rows_are_what_they_are_alone(values, data):
    floats, integers, texts = (list(column) for column in zip(*values, strict=True))
    steps = sorted(data.draw(st.lists(st.integers(0, 9), min_size=len(values), max_size=len(values))))
    columns = {
        "step": pa.array(steps, pa.int32()),
        "sample": pa.array(range(len(values)), pa.int32()),
        "reward": pa.array(floats, pa.float32()),
        "group": pa.array(integers, pa.int64()),
        "response": pa.array(texts, pa.string()),
    }
    kept = pa.chunked_array([pa.array(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))))])
    derived = {"reward": lambda rows: np.arange(float(len(rows)))}.get
    for mask in (None, kept):
        whole = Rows(pa.table(columns), mask, derived)
        for first in data.draw(st.permutations(range(11))):
            part = whole.since(first)
            there = np.array(steps) >= first
            alone = pa.table(columns).filter(pa.array(there if mask is None else there & mask.to_numpy()))
            fresh = Rows(alone, None, derived)
            assert len(part) == len(fresh)
            for name in ("reward", "group", "step", "length"):
                assert part.recorded(name) == fresh.recorded(name), name
                np.testing.assert_array_equal(part[name], fresh[name])
            assert part.words("response") == fresh.words("response")
