"""Finds prompts by a text: in the prompts themselves, in their right answers, or in what rewards said of responses."""

import re
from typing import Literal

import numpy as np
import pyarrow.compute as pc

from cavesson.board.prompt_table import PromptTable
from cavesson.board.runs import OpenRun, reading
from cavesson.index.columns import Array
from cavesson.index.prompt_ids import PATTERN, numbers_of
from cavesson.index.row_texts import RecordedTexts
from cavesson.index.snapshot import Snapshot
from cavesson.record.splits import Split

Within = Literal["prompt", "ground_truth", "reasons"]


def prompts_with(
    run: OpenRun, snapshot: Snapshot, split: Split, table: PromptTable, text: str, within: Within
) -> Array:
    """Return [P] which prompts of a split have a text, ignoring case, or the id that the text is.

    The right answer of a prompt is that of its newest response; of the reasons, those of all responses count.
    """
    key = (table.rows, snapshot.state.dead, split, text, within)
    return run.cache.get("prompts with", key, lambda: _with(run, snapshot, split, table, text, within), most=8)


def _with(run: OpenRun, snapshot: Snapshot, split: Split, table: PromptTable, text: str, within: Within) -> Array:
    found = np.zeros(len(table.n), np.bool_)
    if re.fullmatch(PATTERN, text):
        found[numbers_of(snapshot, [text])] = True
    rows = _rows(snapshot, split, table, within)
    texts = RecordedTexts(snapshot, run.record, rows)
    with reading():
        there = texts.where(
            within, [], lambda some: pc.match_substring(some, text, ignore_case=True), narrow=False, only=None
        )
    found[snapshot.raw("prompt")[rows[there]]] = True
    return found & (table.n > 0)


def _rows(snapshot: Snapshot, split: Split, table: PromptTable, within: Within) -> Array:
    """Return the rows whose texts are read: the newest of each prompt, or all for what differs between responses."""
    if within != "reasons":
        return np.sort(table.newest[table.n > 0] & 0xFFFFFFFF)
    if not snapshot.rows:
        return np.empty(0, np.int64)
    mask = snapshot.of(split)
    there = snapshot.raw("prompt") >= 0
    return np.flatnonzero(there if mask is None else there & mask)
