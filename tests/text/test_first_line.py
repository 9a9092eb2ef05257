"""The first line of what an error says."""

import pytest

from cavesson.errors import first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one"), "one"),
        (ValueError("\n one\ntwo"), "one"),
        (ValueError("one\u2028two"), "one"),
        (AssertionError(), "AssertionError"),
        (OSError("  \n"), "OSError"),
    ],
    ids=repr,
)
def test_the_first_line_is_never_empty(error: Exception, line: str) -> None:
    assert first_line(error) == line
