"""Which rollout each token belongs to, beside a look at every pair."""

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from cavesson.record.keys import rows_of_tokens

KEYS = st.tuples(st.integers(0, 3), st.integers(0, 3))


def table(keys):
    step, sample = np.array(keys, np.int32).reshape(-1, 2).T
    return pa.table({"step": step, "sample": sample})


@given(rows=st.lists(KEYS, unique=True, max_size=8), tokens=st.lists(KEYS, max_size=20))
def test_tokens_belong_to_the_row_of_their_key_or_to_none(rows, tokens):
    line, known = rows_of_tokens(table(rows), table(tokens))
    assert known.tolist() == [key in rows for key in tokens]
    assert line[known].tolist() == [rows.index(key) for key in tokens if key in rows]
