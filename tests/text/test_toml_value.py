"""Values of settings are written as TOML reads them."""

import tomllib
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from cavesson.text.toml_value import toml_value

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
)


@given(VALUES)
def test_a_value_is_read_as_it_was(value):
    assert tomllib.loads(f"value = {toml_value(value)}") == {"value": value}


def test_a_path_is_a_text(tmp_path: Path):
    assert tomllib.loads(f"value = {toml_value(tmp_path)}") == {"value": str(tmp_path)}
