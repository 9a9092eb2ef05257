"""Token counts of prompts and responses, and the rows over a length limit."""

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from cavesson.data.chat import Chat
from cavesson.data.encode import Encoder, Line, asked_of
from cavesson.data.examples import together
from cavesson.data.formats import NAMES
from cavesson.data.load import load
from cavesson.data.notes import Notes
from cavesson.data.settings import AnyDataSettings, LengthSettings
from cavesson.data.types import AnyRow, Pair, Prompt
from cavesson.data.view import recognised
from cavesson.errors import UserError
from cavesson.models.load import load_tokenizer

Counts = NDArray[np.int64]
QUANTILES = {"min": 0.0, "5 %": 0.05, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "95 %": 0.95, "99 %": 0.99, "max": 1.0}
_WIDTH = 30


def show_lengths(settings: LengthSettings, console: Console) -> None:
    """Print quantiles, a histogram, and how many rows the limit of the settings drops or cuts.

    Raises:
        UserError: the data or the tokenizer cannot be read.
    """
    tokenizer = load_tokenizer(settings.tokenizer)
    format, kind = recognised(settings)
    loaded = load(settings.data, kind)
    notes = Notes()
    counts = count_tokens(loaded.train, tokenizer, settings.data, notes)
    *_, limited = counts.values()
    for line in loaded.usage():
        console.print(Text(line))
    console.print(f"{len(limited):,} {NAMES[kind]} ({format}), tokens of {settings.tokenizer}", highlight=False)
    for line in notes.lines():
        console.print(line, highlight=False, markup=False)
    console.print(_quantiles(counts))
    console.print(_histogram(limited))
    console.print(predict(limited, kind, settings.data), highlight=False)


def count_tokens(
    rows: Iterable[AnyRow],
    tokenizer: PreTrainedTokenizerBase,
    settings: AnyDataSettings,
    notes: Notes,
) -> dict[str, Counts]:
    """Count the tokens of every row, or of each of its sequences, by part.

    The last part is the one that the limit of the settings applies to. The parts of a demonstration or pair are the
    prompt (the tokens before the first learned one), the learned tokens of each response, and the whole sequence, or
    the longer one of a pair. Rows that cannot be learned from are noted.

    Raises:
        UserError: no row can be learned from.
    """
    rows = list(rows)
    asked = (asked_of(row, f"{settings.path or 'the data'}: row {number}") for number, row in enumerate(rows, start=1))
    encoder = Encoder(Chat.of(settings, tokenizer))
    if isinstance(rows[0], Prompt):
        prompts = [*encoder.prompts(asked)]
        for number, prompt in enumerate(prompts, start=1):
            notes.add_all([f"dropped: {prompt.problem}"] if prompt.problem else [], f"row {number}")
        lengths = [len(prompt.ids) for prompt in prompts if prompt.problem is None]
        if not lengths:
            raise UserError("; ".join(["no prompt can be used", *notes.lines()]))
        return {"prompt": np.array(lengths)}
    names = ("chosen", "rejected") if isinstance(rows[0], Pair) else ("response",)
    groups: list[list[Line]] = []
    for number, (row, learned) in enumerate(zip(rows, encoder.lines(asked), strict=True), start=1):
        groups += together(row, learned)
        notes.add_all(learned.remarks, f"row {number}")
    if not groups:
        raise UserError("; ".join(["there is nothing to learn", *notes.lines()]))
    counted = [
        (
            (lines[0].learn.index(True) if any(lines[0].learn) else len(lines[0].ids)),
            *(sum(line.learn) for line in lines),
            max(len(line.ids) for line in lines),
        )
        for lines in groups
    ]
    return dict(zip(("prompt", *names, "whole"), np.array(counted).T, strict=True))


def predict(counts: Counts, kind: type, settings: AnyDataSettings) -> str:
    """Describe in words what the limit of the settings does to rows of these lengths."""
    if kind is Prompt:
        name, limit, what = "max_prompt_tokens", settings.max_prompt_tokens, "dropped"
    else:
        name, limit = "max_length", settings.max_length
        what = "cut" if settings.overlong == "truncate" else "dropped"
    over = int((counts > limit).sum())
    return f"data.{name} = {limit}: {over:,} of {len(counts):,} rows ({over / len(counts):.1%}) are longer and {what}"


def histogram(counts: Counts) -> list[tuple[int, int, int]]:
    """Count rows by length, in bins that end at powers of two.

    Returns:
        Tuples of the upper end of a bin, the number of rows in it, and the number of longer rows.
    """
    tops = 2 ** np.arange(int(np.ceil(np.log2(max(1, counts.max())))) + 1)
    longer = [int((counts > top).sum()) for top in tops]
    within = -np.diff([len(counts), *longer])
    return [(int(top), int(rows), over) for top, rows, over in zip(tops, within, longer, strict=True)]


def _quantiles(counts: Mapping[str, Counts]) -> Table:
    table = Table("tokens", *QUANTILES, "mean")
    for name, values in counts.items():
        # Quantiles are lengths that occur, without interpolation.
        quantiles = np.quantile(values, list(QUANTILES.values()), method="inverted_cdf")
        table.add_row(name, *(f"{int(value):,}" for value in quantiles), f"{values.mean():,.1f}")
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _histogram(counts: Counts) -> Table:
    table = Table("up to", "rows", "", "longer", "share longer")
    rows = histogram(counts)
    most = max(count for _, count, _ in rows)
    first = next(i for i, (_, count, _) in enumerate(rows) if count)
    for top, count, longer in rows[first:]:
        bar = "█" * round(_WIDTH * count / most)
        table.add_row(f"{top:,}", f"{count:,}", bar, f"{longer:,}", f"{longer / len(counts):.1%}")
    for column in (0, 1, 3, 4):
        table.columns[column].justify = "right"
    return table
