"""Compares the same prompts in several runs, or in several ranges of steps of one run."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BeforeValidator, Field, WithJsonSchema

from cavesson.board.asked import shown
from cavesson.board.distributions import count_bins, edges_of
from cavesson.board.excerpts import LENGTH as SHOWN
from cavesson.board.prompt_search import prompts_with
from cavesson.board.prompt_table import table_of
from cavesson.board.rows import answers
from cavesson.board.runs import Board, OpenRun
from cavesson.board.selection import Query, both
from cavesson.index.columns import Array
from cavesson.index.prompt_ids import ids_of_hashes
from cavesson.index.snapshot import Snapshot
from cavesson.ops.intervals import proportion_interval
from cavesson.record.splits import Split
from cavesson.sorted_arrays import contains


class Side(NamedTuple):
    """A run, or a range of its steps."""

    run: str
    """Its name on the board."""
    steps: tuple[int, int] | None


def _sides(value: Any) -> Any:
    """Parse ``first,second`` or ``first@0-9,first@90-99``."""
    sides = []
    for text in str(value).split(","):
        found = re.fullmatch(r"([^@]+)(?:@([0-9]{1,9})(?:-([0-9]{1,9}))?)?", text)
        if found is None:
            raise ValueError("write runs as first,second or, with steps, as first@0-9,first@90-99")
        run, first, last = found.groups()
        sides.append(Side(run, None if first is None else (int(first), int(last or first))))
    if not 2 <= len(sides) <= 8:
        raise ValueError("compare two to eight of them")
    return sides


Sides = Annotated[list[Any], BeforeValidator(_sides), WithJsonSchema({"type": "string"})]


REWARDS = ("rewards", "cleaning")
"""Settings on which a response's reward depends."""
BINS = 40
"""Of the histogram of the differences."""


class CompareQuery(Query):
    runs: Sides
    """What to compare, such as first,second or first@0-9,first@90-99."""
    split: Split = "train"
    """Rollouts that were trained on, or eval for held-out ones."""
    sort: Literal["spread", "difference", "-difference"] = "spread"
    """By the largest mean reward minus the smallest, largest first, or by the last side's minus the first's."""
    q: str = Field("", max_length=1_000)
    """Only prompts with this text, ignoring case, or with this id; who wins is counted over all of them."""
    offset: int = Field(0, ge=0, le=2**31)
    """Number of prompts to skip."""
    limit: int = Field(20, ge=1, le=200)
    """Maximum number of prompts."""


class PromptResults(NamedTuple):
    """The results of one side on each of its prompts."""

    name: Array
    """[P] a number per text, the same in every run."""
    mean: Array
    """[P] mean reward."""
    counts: Array
    """[P] how many responses with a reward."""
    newest: Array
    """[P] row of the newest of them."""
    unscored: int
    """Responses without a reward, in none of these numbers."""


def compare(board: Board, query: CompareQuery) -> dict[str, Any]:
    """Return the prompts that all sides have, sorted by how much they differ, and how often each side wins.

    ``common`` is their number, and ``total`` that of those with the text. ``intervals`` has, for each pair, the bounds
    of the 95 % interval of the share of ``common`` that a side wins. Runs with different rewards are not ranked:
    ``rewards_differ`` names the differences.
    """
    sides = [(board.run(side.run), side.steps) for side in query.runs]
    snapshots = [run.snapshot() for run, _ in sides]
    found = [
        _prompts(run, snapshot, query.split, steps) for (run, steps), snapshot in zip(sides, snapshots, strict=True)
    ]
    common = found[0].name
    for side in found[1:]:
        common = common[contains(side.name, common)]
    places = [np.searchsorted(side.name, common) for side in found]
    means = np.stack([side.mean[place] for side, place in zip(found, places, strict=True)])
    difference = means[-1] - means[0]
    differ = rewards_differ([run for run, _ in sides])
    by = {"spread": means.min(axis=0) - means.max(axis=0), "difference": difference, "-difference": -difference}
    order = np.arange(len(common)) if differ else np.argsort(by[query.sort], kind="stable")
    if text := query.q.strip():
        run, snapshot = sides[0][0], snapshots[0]
        table = table_of(run, snapshot, query.split)
        wanted = prompts_with(run, snapshot, query.split, table, text, "prompt")
        order = order[np.isin(common, snapshot.prompts[wanted])[order]]
    page = order[query.offset : query.offset + query.limit]
    wins = [[int(np.sum(a > b)) for b in means] for a in means]
    columns = [
        _side(run, snapshot, side, place[page])
        for (run, _), snapshot, side, place in zip(sides, snapshots, found, places, strict=True)
    ]
    prompts = [
        {"prompt_id": prompt_id, "prompt": lines[0][0], "runs": [line for _, line in lines]}
        for prompt_id, lines in zip(ids_of_hashes(common[page]), zip(*columns, strict=True), strict=True)
    ]
    return {
        "total": len(order),
        "common": len(common),
        "prompts": prompts,
        "sides": [_total(side) for side in found],
        "rewards_differ": differ,
        "wins": None if differ else wins,
        "intervals": None if differ or not len(common) else [[_bounds(n, len(common)) for n in line] for line in wins],
        "ties": None if differ else [[int(np.sum(a == b)) for b in means] for a in means],
        "differences": None if differ else count_bins(difference, edges_of(difference, BINS, None, None)),
    }


def _bounds(wins: int, prompts: int) -> list[float | None]:
    found = proportion_interval(wins, prompts)
    return [found.low, found.high]


def rewards_differ(runs: Sequence[OpenRun]) -> list[str]:
    """Return the names of the reward settings, and of the reward parts, that differ between the runs.

    If there are any, rewards cannot be compared between the runs. A setting that a run does not record is not
    compared.
    """
    found = [name for name in REWARDS if len(_settings(runs, name)) > 1]
    parts = [{name for name in run.snapshot().names if name.startswith("part/")} for run in runs if run.snapshot().rows]
    return found + sorted({name for some in parts for name in some if not all(name in others for others in parts)})


def _settings(runs: Sequence[OpenRun], name: str) -> set[str]:
    """Return the distinct values of a setting, ignoring the order of rewards in a list."""
    configs = [run.record.info.get("config") for run in runs]
    values = [config[name] for config in configs if isinstance(config, dict) and name in config]
    lists = (sorted(map(_written, value)) if isinstance(value, list) else value for value in values)
    return {_written(value) for value in lists}


def _written(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _total(side: PromptResults) -> dict[str, Any]:
    """Return the number of responses of a side with and without a reward, and the mean reward."""
    count = int(side.counts.sum())
    return {"n": count, "unscored": side.unscored, "mean": float(side.mean @ side.counts) / count if count else None}


def _prompts(run: OpenRun, snapshot: Snapshot, split: Split, steps: tuple[int, int] | None) -> PromptResults:
    key = (snapshot.rows, snapshot.state.dead, split, steps)
    return run.cache.get("prompts", key, lambda: prompts_of(snapshot, split, steps), most=4)


def prompts_of(snapshot: Snapshot, split: Split, steps: tuple[int, int] | None) -> PromptResults:
    """Return the prompts of a split in some steps, in ascending order of their hashes."""
    nothing = np.empty(0, np.int64)
    if not snapshot.rows:
        return PromptResults(nothing, nothing.astype(float), nothing, nothing, 0)
    prompt, step, reward = snapshot.raw("prompt"), snapshot.raw("step"), snapshot.column("reward")
    mask = both(snapshot.of(split), prompt >= 0)
    if steps is not None:
        mask = mask & (step >= steps[0]) & (step <= steps[1])
    scored = np.isfinite(reward)
    rows = np.flatnonzero(mask & scored)
    of, size = prompt[rows], snapshot.state.prompts
    counts = np.bincount(of, minlength=size)
    sums = np.bincount(of, reward[rows], minlength=size)
    newest = np.zeros(size, np.int64)
    np.maximum.at(newest, of, step[rows].astype(np.int64) << 32 | rows)
    there = np.flatnonzero(counts)
    there = there[np.argsort(snapshot.prompts[there])]
    return PromptResults(
        snapshot.prompts[there],
        sums[there] / counts[there],
        counts[there],
        newest[there] & 0xFFFFFFFF,
        int(np.count_nonzero(mask & ~scored)),
    )


def _side(run: OpenRun, snapshot: Snapshot, side: PromptResults, places: Array) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield some prompts, with what is shown of the results of one side; of episodes, what the policy said last."""
    rows = side.newest[places]
    if not len(rows):
        return
    keys, texts, last = snapshot.keys(rows), run.texts(snapshot, rows), answers(run, snapshot, rows)
    numbers = (values.tolist() for values in (snapshot.raw("reward")[rows], side.mean[places], side.counts[places]))
    columns = (shown(run, snapshot, texts.prompt), texts.response, last)
    for (step, sample), reward, mean, count, prompt, response, answer in zip(keys, *numbers, *columns, strict=True):
        line = {"run": run.key, "step": step, "sample": sample, "reward": reward, "mean": mean, "n": count}
        yield prompt, line | {"response": (response if answer is None else answer)[:SHOWN]}
