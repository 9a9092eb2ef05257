"""Prompts: from a file or a Hub data set to token ids, in an order that depends on nothing but the seed."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.csv
import pyarrow.parquet as pq
import torch
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from dressage.config import Settings
from dressage.errors import UserError
from dressage.sampling.randomness import Purpose, generator
from dressage.types import Batch


class DataSettings(Settings):
    """Where the prompts come from."""

    path: str | None = None
    """a .jsonl, .json, .parquet, .csv or .txt file (one prompt a line), or the name of a Hub data set"""
    split: str = "train"
    """split of a Hub data set"""
    column: str = "prompt"
    """the column that holds the prompts; every other column is passed to the reward functions"""
    max_prompt_tokens: int = Field(256, ge=1)
    """longer prompts are dropped, counted and named: the longest one sets the memory a step needs"""
    shuffle: bool = True
    """a new order in every pass over the data"""


@dataclass(frozen=True)
class PromptSet:
    """Tokenized prompts with the columns that came along."""

    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    columns: Mapping[str, tuple[Any, ...]]
    dropped: tuple[int, ...]
    """rows of the source whose prompt was too long"""

    def __len__(self) -> int:
        return len(self.texts)

    def order(self, seed: int, shuffle: bool, start: int, count: int) -> list[int]:
        """Indices of prompts number start … start + count − 1 of the endless stream of passes over the data."""
        numbers = range(start, start + count)
        passes = {number: self._pass(seed, shuffle, number) for number in {n // len(self) for n in numbers}}
        return [passes[n // len(self)][n % len(self)] for n in numbers]

    def _pass(self, seed: int, shuffle: bool, number: int) -> Sequence[int]:
        if not shuffle:
            return range(len(self))
        order: list[int] = generator(seed, Purpose.PROMPT_ORDER, step=number).permutation(len(self)).tolist()
        return order

    def batch(self, indices: Sequence[int], pad: int) -> Batch:
        """Columns `prompt_ids` and `prompt_mask`, `[B, S]`, padded on the left."""
        return padded_prompts([self.ids[i] for i in indices], pad)


def padded_prompts(ids: Sequence[Sequence[int]], pad: int) -> Batch:
    """Columns `prompt_ids` and `prompt_mask`, `[B, S]`, padded on the left."""
    width = max(map(len, ids))
    return Batch(
        {
            "prompt_ids": torch.tensor([[pad] * (width - len(row)) + list(row) for row in ids]),
            "prompt_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids]),
        }
    )


def load_prompts(settings: DataSettings, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """Read and tokenize the prompts of the settings.

    Raises:
        UserError: no such file, not the named column, no usable prompt.
    """
    if settings.path is None:
        raise UserError("data.path is missing: give a file of prompts or a Hub data set")
    table = read_table(settings.path, settings.split)
    if settings.column not in table:
        raise UserError(
            f"{settings.path} has no column {settings.column!r}; it has {', '.join(table) or 'none'} (set data.column)"
        )
    prompts = table.pop(settings.column)
    return tokenize(prompts, tokenizer, settings.max_prompt_tokens, columns=table, source=settings.path)


def tokenize(
    prompts: Sequence[Any],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    *,
    columns: Mapping[str, Sequence[Any]] | None = None,
    source: str = "the prompts",
) -> PromptSet:
    """Tokenize prompts, dropping those over the limit; raises UserError where nothing usable is left."""
    if not prompts:
        raise UserError(f"{source}: there is no prompt in it")
    taken = {"prompts", "responses"} & set(columns or {})
    if taken:
        raise UserError(f"{source}: rename the column {min(taken)!r}; rewards get their texts under that name")
    wrong = next((row for row, prompt in enumerate(prompts) if not _is_text(prompt)), None)
    if wrong is not None:
        raise UserError(f"{source}: row {wrong} holds {prompts[wrong]!r} where a text was expected")
    ids = [tuple(row) for row in tokenizer(list(prompts))["input_ids"]]
    empty = next((row for row, tokens in enumerate(ids) if not tokens), None)
    if empty is not None:
        raise UserError(f"{source}: the prompt of row {empty} is empty; there must be a token to continue from")
    kept = [row for row, tokens in enumerate(ids) if len(tokens) <= max_tokens]
    if not kept:
        raise UserError(f"{source}: every prompt is over {max_tokens} tokens; raise data.max_prompt_tokens")
    return PromptSet(
        texts=tuple(prompts[row] for row in kept),
        ids=tuple(ids[row] for row in kept),
        columns={name: tuple(values[row] for row in kept) for name, values in (columns or {}).items()},
        dropped=tuple(sorted(set(range(len(prompts))) - set(kept))),
    )


def _is_text(prompt: Any) -> bool:
    # JSON can write half of a surrogate pair, which no tokenizer and no file takes.
    return isinstance(prompt, str) and not _HALF_PAIR.search(prompt)


def read_table(path: str, split: str = "train") -> dict[str, list[Any]]:
    """The columns of a data file or a Hub data set as lists.

    Raises:
        UserError: it is not there, or its content is not what its name says.
    """
    file = Path(path).expanduser()
    suffix = file.suffix.lower()
    if suffix not in _READERS:
        return _from_hub(path, split)
    try:
        columns: dict[str, list[Any]] = _READERS[suffix](file)
    except (FileNotFoundError, IsADirectoryError):
        raise UserError(f"{path}: there is no such file") from None
    except ValueError as error:  # of which Arrow's, JSON's and Unicode's errors are kinds
        raise UserError(f"{path} cannot be read as {suffix}: {str(error).splitlines()[0]}") from None
    return columns


def _read_text(file: Path) -> dict[str, list[Any]]:
    # Not splitlines(): it also breaks at characters, such as U+2028, that may stand inside a text.
    return {"prompt": [line for line in file.read_text(encoding="utf-8-sig").split("\n") if line.strip()]}


def _read_json(file: Path) -> dict[str, list[Any]]:
    """Objects one after the other, as in JSON lines, or in one list. Arrow's reader would make dates of texts."""
    text = file.read_text(encoding="utf-8-sig").strip()
    rows: list[Any] = []
    at = 0
    while at < len(text):
        value, at = _JSON.raw_decode(text, at)
        rows += value if isinstance(value, list) else [value]
        while at < len(text) and text[at].isspace():
            at += 1
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError('every row must be an object, such as {"prompt": "…"}')
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _read_csv(file: Path) -> dict[str, list[Any]]:
    options = pyarrow.csv.ParseOptions(newlines_in_values=True)
    columns: dict[str, list[Any]] = pyarrow.csv.read_csv(file, parse_options=options).to_pydict()
    return columns


_JSON = json.JSONDecoder()
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_READERS: dict[str, Any] = {
    ".txt": _read_text,
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": lambda file: pq.read_table(file).to_pydict(),
}


def _from_hub(path: str, split: str) -> dict[str, list[Any]]:
    import datasets  # takes a second to import and is needed for the Hub only

    try:
        loaded = datasets.load_dataset(path, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        kinds = ", ".join(_READERS)
        raise UserError(
            f"{path} is neither a file ({kinds}) nor a data set that can be loaded: {str(error).splitlines()[0]}"
        ) from error
    return {name: list(loaded[name]) for name in loaded.column_names}
