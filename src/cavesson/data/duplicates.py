"""Rows that are there twice, and held-out rows that are trained on."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape

from cavesson.data.types import Demonstration, Pair, Prompt, Said
from cavesson.text.visible import visible


@dataclass(frozen=True)
class Found:
    """Repetitions of one kind."""

    what: str
    count: int
    """rows that repeat another one"""
    examples: tuple[tuple[int, int, str], ...]
    """the first of them: number of the row, number of the earlier or trained row (both from 1), and its text"""


@dataclass(frozen=True)
class Duplicates:
    """What is repeated; two texts are the same when they differ in nothing but white space."""

    rows: int
    held_out: int
    found: tuple[Found, ...]


def duplicates(
    rows: Iterable[Prompt | Demonstration | Pair],
    held_out: Sequence[Prompt | Demonstration | Pair] = (),
    *,
    show: int = 3,
) -> Duplicates:
    """Count exact duplicates among the rows, and between them and the rows that are held out.

    A prompt is held against other prompts, whatever its columns; a demonstration or pair with everything it says.

    Args:
        rows: the rows that are trained on.
        held_out: those that are not.
        show: how many examples of each kind to keep.
    """
    said, asked = [], []
    for row in rows:
        said.append(_said(row))
        asked.append(_said(row)[:1])
    apart = [_said(row) for row in held_out]
    return Duplicates(
        len(said),
        len(apart),
        (
            _found("rows that repeat an earlier row", _repeats(said), show),
            _found("held-out rows that are trained on", _matches(apart, said), show),
            _found("held-out prompts that are trained on", _matches([one[:1] for one in apart], asked), show),
        ),
    )


def print_duplicates(report: Duplicates, console: Console) -> None:
    """Print the counts and the first examples."""
    console.print(f"{report.rows:,} rows, {report.held_out:,} held out")
    for found in report.found:
        console.print(f"{found.what}: [bold]{found.count:,}[/]")
        for row, of, text in found.examples:
            short = text if len(text) <= 100 else text[:100] + "…"
            console.print(f"  row {row}, as in row {of}: {escape(visible(short))}", highlight=False)


Key = tuple[str, ...]
Matches = list[tuple[int, int, Key]]


def _repeats(keys: Sequence[Key]) -> Matches:
    first: dict[Key, int] = {}
    return [(i, of, key) for i, key in enumerate(keys, start=1) if (of := first.setdefault(key, i)) != i]


def _matches(keys: Sequence[Key], others: Sequence[Key]) -> Matches:
    """Those of the keys that are among the others; where nothing is said, nothing is the same."""
    first: dict[Key, int] = {}
    for i, other in enumerate(others, start=1):
        first.setdefault(other, i)
    return [(i, first[key], key) for i, key in enumerate(keys, start=1) if any(key) and key in first]


def _found(what: str, matches: Matches, show: int) -> Found:
    return Found(what, len(matches), tuple((row, of, " | ".join(filter(None, key))) for row, of, key in matches[:show]))


def _said(row: Prompt | Demonstration | Pair) -> Key:
    """The prompt and what is said to it, with single spaces."""
    if isinstance(row, Pair):
        return _text(row.prompt), _text(row.chosen), _text(row.rejected)
    return (_text(row.prompt), _text(row.response)) if isinstance(row, Demonstration) else (_text(row.prompt),)


def _text(said: Said) -> str:
    text = said if isinstance(said, str) else " ".join(f"{turn.role}: {turn.content}" for turn in said)
    return re.sub(r"\s+", " ", text).strip()
