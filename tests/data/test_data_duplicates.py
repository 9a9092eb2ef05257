import io

from rich.console import Console

from cavesson.data.duplicates import duplicates, print_duplicates
from cavesson.data.types import Demonstration, Pair, Prompt, Turn


def counts(rows, held_out=()):
    return [found.count for found in duplicates(rows, held_out).found]


def test_white_space_makes_no_difference_and_everything_else_does():
    rows = [
        Demonstration("a  b\n", "c"),
        Demonstration(" a\tb", "c "),
        Demonstration("a b", "C"),
        Demonstration("ab", "c"),
    ]
    report = duplicates(rows)
    assert (report.rows, report.held_out) == (4, 0)
    assert [found.count for found in report.found] == [1, 0, 0]
    assert report.found[0].examples == ((2, 1, "a b | c"),)


def test_where_the_prompt_ends_makes_a_difference():
    assert counts([Demonstration("a", "b c"), Demonstration("a b", "c")]) == [0, 0, 0]


def test_every_repetition_counts():
    rows = [Prompt("a"), Prompt("b"), Prompt("a"), Prompt("a", {"n": 1}), Prompt("b")]
    report = duplicates(rows, show=2)
    assert report.found[0].count == 3
    assert report.found[0].examples == ((3, 1, "a"), (4, 1, "a"))


def test_held_out_rows_and_held_out_prompts():
    rows = [Pair("a", "b", "c"), Pair("d", "e", "f")]
    held_out = [Pair("a", "b", "c"), Pair("a", "c", "b"), Pair("g", "b", "c")]
    report = duplicates(rows, held_out)
    assert [found.count for found in report.found] == [0, 1, 2]
    assert report.found[1].examples == ((1, 1, "a | b | c"),)
    assert report.found[2].examples == ((1, 1, "a"), (2, 1, "a"))


def test_texts_without_a_prompt_share_none():
    assert counts([Demonstration("", "a")], [Demonstration("", "b"), Demonstration("", "a")]) == [0, 1, 0]


def test_turns_are_the_same_when_the_same_one_says_the_same():
    rows = [Prompt((Turn("user", "a"),)), Prompt((Turn("user", " a"),)), Prompt((Turn("assistant", "a"),))]
    assert counts(rows) == [1, 0, 0]


def test_the_report_is_printed_as_it_is():
    console = Console(width=200, record=True, file=io.StringIO())
    print_duplicates(duplicates([Prompt("[red]x"), Prompt("[red]x")], [Prompt("y" * 101)]), console)
    printed = console.export_text()
    assert "2 rows, 1 held out" in printed
    assert "rows that repeat an earlier row: 1" in printed
    assert "row 2, as in row 1: [red]x" in printed
    assert "held-out rows that are trained on: 0" in printed
