import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from text_helpers import QWEN3, byte_pairs

from cavesson.data.lengths import count_tokens, histogram, predict, show_lengths
from cavesson.data.notes import Notes
from cavesson.data.settings import AnyDataSettings, LengthSettings
from cavesson.data.types import Demonstration, Pair, Prompt, Turn
from cavesson.errors import UserError
from cavesson.models.tiny import tiny_tokenizer


def counted(*rows: Prompt | Demonstration | Pair, **options: object) -> dict[str, list[int]]:
    counts = count_tokens(rows, tiny_tokenizer(), AnyDataSettings(**options), Notes())
    return {name: values.tolist() for name, values in counts.items()}


def test_tokens_are_counted_by_what_they_are_of():
    # One token a byte, and an end token after each response.
    assert counted(Prompt("ab"), Prompt("é")) == {"prompt": [2, 2]}
    demonstrations = counted(Demonstration("ab", "cde"), Demonstration("a", ""))
    assert demonstrations == {"prompt": [2, 1], "response": [4, 1], "whole": [6, 2]}
    pairs = counted(Pair("ab", "c", "defg"), Pair("ab", "cdef", "g"))
    assert pairs == {"prompt": [2, 2], "chosen": [2, 5], "rejected": [5, 2], "whole": [7, 7]}


def test_the_limits_do_not_shorten_what_is_counted():
    row = Demonstration("ab", "cde")
    assert counted(row, max_length=3) == counted(row, max_length=3, overlong="drop") == counted(row)
    assert counted(Prompt("abc"), max_prompt_tokens=1) == {"prompt": [3]}


def test_sequences_are_counted_and_rows_without_any_are_noted():
    asked = (Turn("user", "a"),)
    talk = (Turn("assistant", "b"), Turn("user", "c"), Turn("assistant", "d"))
    rows, notes = [Demonstration(asked, talk), Demonstration(asked, asked)], Notes()
    counts = count_tokens(rows, byte_pairs(), AnyDataSettings(template=QWEN3), notes)
    (first, again) = counts["whole"].tolist()
    assert (
        again > first
    )  # it has the first question, its answer without reasoning, and the second question with its own
    assert notes.lines()[1] == "1 × dropped: there is no turn of the assistant that may be learned (first: row 2)"
    with pytest.raises(UserError, match=r"^there is nothing to learn; 1 × dropped: there is no turn"):
        count_tokens(rows[1:], byte_pairs(), AnyDataSettings(template=QWEN3), Notes())


@given(st.lists(st.integers(1, 5000), min_size=1))
def test_the_histogram_counts_every_row_once(lengths):
    rows = histogram(np.array(lengths))
    for i, (top, within, longer) in enumerate(rows):
        assert top == 2**i
        assert within == sum(top / 2 < length <= top for length in lengths)
        assert longer == sum(length > top for length in lengths)
    assert rows[-1][0] >= max(lengths)
    assert len(rows) == 1 or rows[-2][0] < max(lengths)


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (Prompt, {"max_prompt_tokens": 8}, "data.max_prompt_tokens = 8: 1 of 4 rows (25.0%) are longer and dropped"),
        (Prompt, {"max_length": 2}, "data.max_prompt_tokens = 256: 0 of 4 rows (0.0%) are longer and dropped"),
        (Pair, {"max_length": 3}, "data.max_length = 3: 2 of 4 rows (50.0%) are longer and cut"),
        (
            Pair,
            {"max_length": 3, "overlong": "drop"},
            "data.max_length = 3: 2 of 4 rows (50.0%) are longer and dropped",
        ),
    ],
)
def test_what_a_limit_drops_is_predicted(kind, options, expected):
    assert predict(np.array([2, 3, 8, 9]), kind, AnyDataSettings(**options)) == expected


def test_the_prediction_is_what_happens(tmp_path: Path):
    from cavesson.data.prompts import load_prompts
    from cavesson.data.settings import PromptSettings

    file = tmp_path / "a.jsonl"
    rows = [{"prompt": "a" * n} for n in range(1, 21)]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    dropped = load_prompts(PromptSettings(path=str(file), max_prompt_tokens=15), tiny_tokenizer()).dropped
    out = io.StringIO()
    settings = {"kind": "prompts", "data": {"path": str(file), "max_prompt_tokens": 15}}
    show_lengths(LengthSettings.model_validate(settings), Console(file=out, width=100))
    lines = out.getvalue().splitlines()
    assert lines.pop(0) == "columns: prompt ← prompt"
    assert lines[0] == "20 prompts (prompt), tokens of tiny"
    assert lines[-1] == f"data.max_prompt_tokens = 15: {len(dropped)} of 20 rows (25.0%) are longer and dropped"
    # Quantiles that occur: the smallest length that so many rows do not exceed.
    cells = next(line for line in lines if "prompt " in line and "│" in line).replace("│", " ").split()
    assert cells == ["prompt", "1", "1", "5", "10", "15", "19", "20", "20", "10.5"]
