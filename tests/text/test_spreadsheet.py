"""Texts that a spreadsheet could run are quoted in CSV, and come back from it."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavesson.text.spreadsheet import FORMULA, cell

SIGNS = ["=", "+", "-", "@", "＝", "＋", "－", "＠"]
BEFORE = [
    "",
    " ",
    "  ",
    "'",
    '"',
    "\t",
    "\r",
    "\n",
    "\r\n",
    "\x00",
    "\x0b",
    "\x1f",
    "\xa0",
    "\u200b",
    "\u3000",
    "\ufeff",
]
BEGINNINGS = ["\t", "\r", "\n", "\r\n", *(before + sign for before in BEFORE for sign in SIGNS)]
ORDINARY = ["", " ", "a", "1", "a=1", "'", '"a"', "[-1]", "{=1}", "(=1)", "−1", "#=1", "'a", " a\t=1"]


@pytest.mark.parametrize("begins", BEGINNINGS)
def test_what_a_spreadsheet_could_run_is_quoted(begins):
    for text in (begins, f"{begins}1+1", f"{begins}cmd|' /c calc'!A1"):
        assert cell(text, quote_formulas=True) == f"'{text}"
        assert cell(text, quote_formulas=False) == text


@pytest.mark.parametrize("text", ORDINARY)
def test_what_it_only_shows_is_unchanged(text):
    assert cell(text, quote_formulas=True) == text


@pytest.mark.parametrize("value", [-1, -1.5, None, True, float("-inf")])
def test_numbers_stay_numbers(value):
    assert cell(value, quote_formulas=True) is value


@given(st.lists(st.one_of(st.text("='\" \r\n\t-@a1＝", max_size=6), st.text(max_size=6)), min_size=1))
def test_a_text_comes_back_from_csv(texts):
    out = io.StringIO(newline="")
    csv.writer(out).writerows([[cell(text, quote_formulas=True)] for text in texts])
    read = [row[0] if row else "" for row in csv.reader(io.StringIO(out.getvalue(), newline=""))]
    assert [text[1:] if text[:1] == "'" and FORMULA.match(text[1:]) else text for text in read] == texts
