"""Duplicate rows, and held-out rows that are also trained on."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape

from cavesson.data.types import AnyRow, Content, Pair, Prompt
from cavesson.text.visible import shortened, visible


@dataclass(frozen=True)
class Repetitions:
    """Repetitions of one kind."""

    what: str
    count: int
    """rows that repeat another one"""
    examples: tuple[tuple[int, int, str], ...]
    """the first of them: number of the row, number of the earlier or trained row (both from 1), and its text"""


@dataclass(frozen=True)
class Duplicates:
    """All duplicates found; two texts are duplicates if they differ only in white space."""

    rows: int
    held_out: int
    found: tuple[Repetitions, ...]


def duplicates(
    rows: Iterable[AnyRow],
    held_out: Sequence[AnyRow] = (),
    *,
    show: int = 3,
) -> Duplicates:
    """Count exact duplicates among the training rows, and between them and the held-out rows.

    Prompts are compared without their other columns; all other rows with all their texts. Of each kind,
    ``show`` examples are kept.
    """
    content, apart = ([_content(row) for row in part] for part in (rows, held_out))
    asked, asked_apart = ([key[:1] for key in part] for part in (content, apart))
    return Duplicates(
        len(content),
        len(apart),
        (
            _found("rows that repeat an earlier row", _repeats(content), show),
            _found("held-out rows that are trained on", _matches(apart, content), show),
            _found("held-out prompts that are trained on", _matches(asked_apart, asked), show),
        ),
    )


def print_duplicates(report: Duplicates, console: Console) -> None:
    """Print the counts and the first examples."""
    console.print(f"{report.rows:,} rows, {report.held_out:,} held out")
    for found in report.found:
        console.print(f"{found.what}: [bold]{found.count:,}[/]")
        for row, of, text in found.examples:
            console.print(f"  row {row}, as in row {of}: {escape(visible(shortened(text, 100)))}", highlight=False)


Key = tuple[str, ...]
Matches = list[tuple[int, int, Key]]


def _repeats(keys: Sequence[Key]) -> Matches:
    first: dict[Key, int] = {}
    return [(i, of, key) for i, key in enumerate(keys, start=1) if (of := first.setdefault(key, i)) != i]


def _matches(keys: Sequence[Key], others: Sequence[Key]) -> Matches:
    """Return the keys that occur among the others; empty texts do not match."""
    first: dict[Key, int] = {}
    for i, other in enumerate(others, start=1):
        first.setdefault(other, i)
    return [(i, first[key], key) for i, key in enumerate(keys, start=1) if any(key) and key in first]


def _found(what: str, matches: Matches, show: int) -> Repetitions:
    return Repetitions(
        what, len(matches), tuple((row, of, " | ".join(filter(None, key))) for row, of, key in matches[:show])
    )


def _content(row: AnyRow) -> Key:
    """Return the prompt and its responses, with white space normalised."""
    if isinstance(row, Pair):
        return _text(row.prompt), _text(row.chosen), _text(row.rejected)
    return (_text(row.prompt),) if isinstance(row, Prompt) else (_text(row.prompt), _text(row.response))


def _text(content: Content) -> str:
    text = (
        content if isinstance(content, str) else " ".join(f"{turn.role}: {' '.join(turn.texts())}" for turn in content)
    )
    return re.sub(r"\s+", " ", text).strip()
