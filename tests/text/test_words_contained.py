"""Whether a text contains a whole word, such as the right answer."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavesson.text.words import contains


@pytest.mark.parametrize(
    ("text", "part", "expected"),
    [
        ("x = 1.", "1", True),
        ("12, then 21", "1", False),
        ("12 or 1", "1", True),
        ("10-4", "-4", False),
        ("is -4", "-4", True),
        ("the hindsight of New York", "York", True),
        ("Yorkshire", "York", False),
        ("हिन्दी", "हिन्द", False),  # the vowel sign is a part of the word
        ("cafe\u0301", "cafe", False),
        ("答案是四。", "四", True),
        ("答案是四km。", "四", True),
        ("答案是12。", "12", True),
        ("答案是12。", "2", False),
        ("aaa", "aa", False),
        ("aaa aa", "aa", True),
        ("", "1", False),
    ],
)
def test_a_part_is_whole_where_no_word_goes_on(text: str, part: str, expected: bool) -> None:
    assert contains(text, part) == expected


@given(st.text("ab1 -.", max_size=12), st.text("ab1", min_size=1, max_size=2))
def test_in_ascii_it_is_what_word_boundaries_say(text: str, part: str) -> None:
    assert contains(text, part) == (re.search(rf"(?<!\w){re.escape(part)}(?!\w)", text) is not None)
