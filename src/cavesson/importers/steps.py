"""The step of a record: from a column, or else from the name of a file or folder."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from cavesson.importers.fields import MAX_STEP, step_of, whole
from cavesson.importers.rollout import Broken, Names, Origin

STEP_COLUMNS = (
    "step", "global_step", "training_step", "train_step", "trainer_step", "current_step", "gen_step", "iteration",
    "iter", "update",
)  # fmt: skip
"""Columns that give the step; the first one that a record has is used."""
NUMBER = "{}"
"""Where a pattern for names of files and folders has the step."""
BY_NAME = "the step is the number in the name of the file or folder"
NO_STEP = "no column, file or folder names a step, so the step is 0: --map step=COLUMN, or --map 'step=name_{}'"
_TELLING = (
    re.compile(r"(?:step|iteration|(?<![a-z])(?:iter|update))s?[ _=.-]*(\d{1,10})(?!\d)", re.IGNORECASE),
    re.compile(r"(?<![a-z])(?:checkpoint|ckpt|epoch|round)s?[ _=.-]*(\d{1,10})(?!\d)", re.IGNORECASE),
)
_BARE = re.compile(r"(?:^|/)(\d{1,10})(?=/|\.[^/]*$|$)")
"""A name that is only a number."""


def found_step(record: Mapping[str, Any], place: Origin) -> tuple[int, tuple[str, ...]]:
    """Return the step of a record of any table, and remarks on where it comes from; 0 if nothing names it.

    Raises:
        Broken: The column ``step`` contains something else.
    """
    others = [name for name in STEP_COLUMNS[1:] if whole(record.get(name)) is not None]
    columns = [*STEP_COLUMNS[:1], *others] if record.get(STEP_COLUMNS[0]) is not None else others
    if not columns:
        named = step_in_names(place.names)
        return (0, (NO_STEP,)) if named is None else (named, (BY_NAME,))
    remark = ", not ".join([f"the step is the column {columns[0]!r}", *map(repr, columns[1:])])
    return step_of(record, columns[0]), () if columns == [STEP_COLUMNS[0]] else (remark,)


def step_at(record: Mapping[str, Any], place: Origin, key: str = "step") -> int:
    """Return the step in a column of a format, or else in a name; raise Broken if there is none."""
    if record.get(key) is None and (named := step_in_names(place.names)) is not None:
        return named
    return step_of(record, key)


@lru_cache
def step_in_names(names: Names) -> int | None:
    """Return the step that the path of a file names: ``step_5``, ``global_step_12``, ``5.jsonl``, ….

    A name with a telling word counts before one that is only a number, a deeper one before those above it, and the
    source folder and those above it last.
    """
    for text, expressions in ((names.inside, (*_TELLING, _BARE)), (names.outside, _TELLING)):
        for expression in expressions:
            if (found := expression.findall(text)) and int(found[-1]) <= MAX_STEP:
                return int(found[-1])
    return None


@lru_cache
def run_of(inside: str) -> str:
    """Return the part of a file's path that is above the folder or file that names the step, or else its folder."""
    for expression in (*_TELLING, _BARE):
        if found := list(expression.finditer(inside)):
            return inside[: found[-1].start(1)].rpartition("/")[0]
    return inside.rpartition("/")[0]


def step_by_pattern(pattern: str, names: Names) -> int:
    """Return the number at ``{}`` of a pattern in the path of a file; raise Broken if the path does not match."""
    before, _, after = pattern.partition(NUMBER)
    found = re.findall(rf"{re.escape(before)}(\d{{1,10}})(?!\d){re.escape(after)}", f"{names.outside}/{names.inside}")
    if not found or int(found[-1]) > MAX_STEP:
        raise Broken(f"the name of the file does not match the pattern {pattern!r} for the step")
    return int(found[-1])
