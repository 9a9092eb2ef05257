"""Which rollout each token belongs to, beside a look at every pair; sorting, beside Python's."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavesson.record.keys import ARRAY_BYTES, rows_of_tokens, sorted_rows, taken_in_runs

KEYS = st.tuples(st.integers(0, 3), st.integers(0, 3))


def table(keys):
    step, sample = np.array(keys, np.int32).reshape(-1, 2).T
    return pa.table({"step": step, "sample": sample})


@given(rows=st.lists(KEYS, unique=True, max_size=8), tokens=st.lists(KEYS, max_size=20))
def test_tokens_belong_to_the_row_of_their_key_or_to_none(rows, tokens):
    line, known = rows_of_tokens(table(rows), table(tokens))
    assert known.tolist() == [key in rows for key in tokens]
    assert line[known].tolist() == [rows.index(key) for key in tokens if key in rows]


@given(keys=st.lists(KEYS, max_size=12), runs=st.booleans())
def test_rows_are_sorted_as_python_does(keys, runs):
    rows = table(keys).append_column("text", pa.array([str(i) for i in range(len(keys))], pa.string()))
    order = np.lexsort([rows["sample"].to_numpy(), rows["step"].to_numpy()])
    found = (taken_in_runs(rows, order) if runs and len(keys) else sorted_rows(rows, ["step", "sample"])).to_pylist()
    assert [(row["step"], row["sample"], row["text"]) for row in found] == sorted(
        ((*key, str(i)) for i, key in enumerate(keys)), key=lambda row: row[:2]
    )


@pytest.mark.slow
def test_texts_that_no_array_can_hold_are_sorted_as_well():
    """Prompts of more than 2 GB, with the steps of two processes one after the other."""
    long = ["x" * (ARRAY_BYTES // 8)] * 5
    rows = pa.table({"step": pa.chunked_array([[4, 5, 6, 7, 8], [0, 1, 2, 3, 9]], pa.int32())})
    rows = rows.append_column("prompt", pa.chunked_array([pa.array(long), pa.array(long)]))
    with pytest.raises(pa.ArrowInvalid, match="overflow"):
        rows.take(np.arange(10)[::-1])
    assert sorted_rows(rows, ["step"])["step"].to_pylist() == list(range(10))
