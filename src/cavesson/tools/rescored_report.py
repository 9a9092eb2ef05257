"""What other rewards change in a run: means by step, and the order of the responses to a prompt."""

from typing import NamedTuple

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cavesson.correlation import rank_correlation
from cavesson.ops.order_changes import Array, OrderChanges, order_changes
from cavesson.record import Run
from cavesson.record.read.both_rewards import both_rewards
from cavesson.record.rescored import FOLDER
from cavesson.record.splits import is_held_out
from cavesson.text.counting import counted
from cavesson.text.visible import shortened, visible, visible_line

LINES = 12
"""Of the table of means."""
CHARACTERS = 100
"""Of a prompt or response."""


class Means(NamedTuple):
    """Mean rewards of some responses; NaN if none of them is judged."""

    name: str
    responses: int
    recorded: float
    again: float


class Side(NamedTuple):
    """One of two responses to a prompt."""

    step: int
    sample: int
    prompt: str
    response: str
    recorded: float
    again: float


class Report(NamedTuple):
    """Recorded rewards beside those that were computed again."""

    run: str
    name: str
    rollouts: int
    means: list[Means]
    """of all steps, of up to ``LINES`` ranges of steps, and of the held-out responses"""
    order: OrderChanges
    """of the responses to a prompt in a step"""
    correlation: float | None
    """Spearman's ρ, over the responses that both judge"""
    worst: list[tuple[Side, Side]]
    """the pairs whose order changes most; the recorded reward prefers the first one"""


def report(run: Run, name: str, show: int) -> Report:
    """Compare the recorded rewards of a run with those of a name, and fetch ``show`` pairs of responses."""
    rows, recorded, again, group, rollouts = both_rewards(run, name)
    both = np.flatnonzero(~np.isnan(recorded) & ~np.isnan(again))
    order = order_changes(recorded[both], again[both], group[both], show)
    worst = [(int(both[first]), int(both[second])) for first, second in order.worst]
    return Report(
        run.folder,
        name,
        rollouts,
        _means(rows, recorded, again),
        order,
        rank_correlation(recorded[both], again[both]) if len(both) else None,
        [(_side(run, rows, first, again), _side(run, rows, second, again)) for first, second in worst],
    )


def show_report(found: Report, console: Console) -> None:
    """Print a report."""
    table = Table("", "responses", "recorded", found.name, title=Text(visible(f"rewards of {found.run}")))
    for one in found.means:
        table.add_row(one.name, str(one.responses), f"{one.recorded:.4g}", f"{one.again:.4g}")
    console.print(table)
    for line in _lines(found):
        console.print(Text(visible_line(line)), soft_wrap=True)
    for first, second in found.worst:
        prompt = shortened(first.prompt[-CHARACTERS:], CHARACTERS)
        console.print(Text(visible_line(f"step {first.step}, prompt: {prompt}"), style="bold"), soft_wrap=True)
        for side in (first, second):
            values = f"recorded {side.recorded:.4g}, {found.name} {side.again:.4g}"
            response = shortened(side.response, CHARACTERS)
            console.print(Text(visible_line(f"  sample {side.sample}, {values}: {response}")), soft_wrap=True)


def _lines(found: Report) -> list[str]:
    order, said = found.order, []
    if order.pairs:
        share = f" ({order.flipped / order.ordered:.1%})" if order.ordered else ""
        said.append(
            f"order within groups: {order.flipped} of {counted(order.ordered, 'pair')} that both tell apart "
            f"{'are' if order.flipped != 1 else 'is'} the other way round{share}, "
            f"in {order.flipped_groups} of {counted(order.groups, 'group')}"
        )
        ties = order.pairs - order.ordered
        said += [f"ties: {counted(ties, 'pair')} of {order.pairs} tied in one of the two or both"] if ties else []
    if found.correlation is not None:
        said.append(f"rank correlation of both: {found.correlation:+.3f}")
    where = f'rescore["{found.name}"] in a filter on the board, the table rescored in SQL'
    return [*said, f"kept in {found.run}/{FOLDER}/{found.name}: {where}"]


def _means(rows: pa.Table, recorded: Array, again: Array) -> list[Means]:
    steps, held_out = rows["step"].to_numpy(), is_held_out(rows["split"]).to_numpy()
    trained = np.flatnonzero(~held_out)
    parts = [("all steps", trained)] if len(trained) else []
    ranges = np.array_split(np.unique(steps[trained]), LINES)
    for some in (one for one in ranges if len(one)):
        name = f"step {some[0]}" if len(some) == 1 else f"steps {some[0]} to {some[-1]}"
        parts.append((name, trained[(steps[trained] >= some[0]) & (steps[trained] <= some[-1])]))
    parts += [("held out", np.flatnonzero(held_out))] if held_out.any() else []
    return [Means(name, len(which), _mean(recorded[which]), _mean(again[which])) for name, which in parts]


def _mean(values: Array) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _side(run: Run, rows: pa.Table, row: int, again: Array) -> Side:
    step, sample = rows["step"][row].as_py(), rows["sample"][row].as_py()
    one = run.fetch([(step, sample)], ["prompt", "response", "reward"]).to_pylist()[0]
    return Side(step, sample, one["prompt"], one["response"], one["reward"], float(again[row]))
