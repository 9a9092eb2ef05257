"""Show a run in the terminal: its steps, its extreme responses, or one rollout token by token."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cavesson.errors import UserError
from cavesson.ops.intervals import change
from cavesson.record.derived import DERIVED
from cavesson.record.read.not_learned import padding_at_end
from cavesson.record.read.reader import Run
from cavesson.record.read.reader import open as open_run
from cavesson.record.schema import ROW_COLUMNS
from cavesson.record.splits import GIVEN, HELD_OUT, OTHER, Split, of_split, rollout_counts
from cavesson.record.storage import Location
from cavesson.record.tables import turn_counts
from cavesson.text.counting import counted
from cavesson.text.visible import shortened, visible_line

MAX_STEPS = 20
MEANS = ("reward", "kl_k1", "entropy", "length")
EXTREMES = {
    "best by reward": ("reward", "DESC"),
    "worst by reward": ("reward", "ASC"),
    "highest KL": ("kl_k1", "DESC"),
    "lowest KL": ("kl_k1", "ASC"),
}
METRICS = (
    "loss/nll", "perplexity", "eval/perplexity", "loss/preference", "reward/accuracy", "eval/reward/accuracy",
    "dpo/accuracy", "eval/dpo/accuracy", "dpo/reward_margin", "kto/accuracy", "eval/kto/accuracy",
    "kto/reward_margin", "optim/learning_rate",
)  # fmt: skip
"""What is shown of a run that learns from given examples and therefore has no rollouts."""
HEADLINES = {
    "eval/perplexity": "held-out perplexity",
    "eval/reward/accuracy": "held-out accuracy",
    "eval/dpo/accuracy": "held-out accuracy",
    "eval/kto/accuracy": "held-out accuracy",
    "evaluation/reward": "held-out reward",
    "evaluation/teacher_kl": "held-out reverse KL to the teacher, nats per response",
    "perplexity": "perplexity of a batch",
    "reward/accuracy": "accuracy on a batch",
    "dpo/accuracy": "accuracy on a batch",
    "kto/accuracy": "accuracy on a batch",
    "reward/mean": "mean reward of a step",
    "teacher/kl": "reverse KL to the teacher, nats per response",
}
"""What a run is trained for: the first of these that it has."""
TEXTS = ("prompt", "response")
WRAPPED = (*TEXTS, "arguments", "text", "error")
"""Columns that share the width of the terminal."""
NAMES = ("token", "", "split", "role", "name")
"""Columns of short texts."""
TURN_FACTS = ("turn", "role", "name", "arguments", "text", "tokens", "seconds", "error", "reward")
LONGEST = 100_000
"""Characters of one text; to lay out ten million in lines takes the terminal minutes."""
NARROW = 8
"""Characters that a column of an answer has at least, if it has so many."""
TOKEN_NUMBERS = ("logprob", "ref_logprob", "kl_k1", "teacher_logprob", "value", "token_reward", "advantage")


def show(
    location: Location,
    console: Console,
    *,
    step: int | None = None,
    sample: int | None = None,
    limit: int = 5,
    split: Split = "train",
    allow_remote: bool = False,
) -> None:
    """Print a run, or one of its rollouts; values that were not measured are omitted.

    Without ``sample``, lists of at most ``limit`` responses, of ``step`` if it is given, are shown: those that were
    trained on, or the held-out ones. With ``sample``, this rollout of ``step`` is shown token by token.

    Raises:
        UserError: ``location`` is not a run, the rollout is not in it, or it has no held-out responses to show.
    """
    run = open_run(location, allow_remote)
    if sample is not None:
        _show_chosen_rollout(run, console, step, sample, split)
        return
    _check_split(run, step, split)
    _show_header(run, console)
    _show_steps(run, console, split)
    for title, (column, order) in EXTREMES.items():
        _show_extremes(run, console, title, f"{column} {order}", step, limit, split)
    _show_left_out(run, console, step, split)


def _show_left_out(run: Run, console: Console, step: int | None, split: Split) -> None:
    """Say how many responses of the other split the lists leave out."""
    left_out = of_split(run.rows(["step", "split"], None if step is None else [step]), OTHER[split]).num_rows
    if left_out:
        kind, way = ("held-out", "--held-out shows them") if split == "train" else ("training", "without --held-out")
        console.print(f"left out of the lists: {counted(left_out, f'{kind} response')}; {way}", highlight=False)


def _show_chosen_rollout(run: Run, console: Console, step: int | None, sample: int, split: Split) -> None:
    if step is None:
        raise UserError("a rollout is identified by step and sample: give the step too")
    if split == HELD_OUT:
        raise UserError("a rollout is identified by step and sample alone: remove --held-out")
    _check_step(run, step)
    _show_rollout(run, console, step, sample)


def _check_split(run: Run, step: int | None, split: Split) -> None:
    """Check that there are responses of the split to show."""
    rows = run.rows(["step", "split"])
    mine = of_split(rows, split)["step"].to_pylist()
    if split == HELD_OUT and not mine:
        raise UserError(f"{run.folder} has no held-out responses; remove --held-out")
    if step is None or step in mine:
        return
    _check_step(run, step)
    kind, way = ("training", "remove") if split == HELD_OUT else ("held-out", "add")
    raise UserError(f"step {step} of {run.folder} has {kind} responses only; {way} --held-out")


def _check_step(run: Run, step: int) -> None:
    steps = run.rows(["step"])["step"].unique().sort().to_pylist()
    if step not in steps:
        known = (
            f"it has rollouts of {counted(len(steps), 'step')}, {steps[0]} to {steps[-1]}"
            if steps
            else "it has no rollouts"
        )
        raise UserError(f"{run.folder} has no rollout of step {step}; {known}")


def headline(location: Location) -> str | None:
    """Return the main result of a run that the user has trained, such as ``mean reward of a step 0.1 → 0.9 (rose)``.

    It rose or fell only if the interval of the change excludes 0. None if it was not measured.
    """
    table = open_run(location, allow_remote=True).steps()
    name = next((name for name in HEADLINES if name in table.column_names), None)
    if name is None:
        return None
    values = table[name].drop_null().to_pylist()
    first, last = values[0], values[-1]
    if len(values) == 1:
        return f"{HEADLINES[name]} {_number(first)}"
    found = change(values)
    way = "" if found.low is None else f" ({('no clear change', 'rose', 'fell')[found.sign]})"
    return f"{HEADLINES[name]} {_number(first)} → {_number(last)}{way}"


def _show_header(run: Run, console: Console) -> None:
    rows = run.rows(["step", "split"])
    steps = rows["step"].unique().to_pylist() or run.steps()["step"].to_pylist()
    facts = {"model": run.facts["model"], **run.facts, "source": run.info.get("source")}
    facts["steps"] = f"{steps[0]} to {steps[-1]}, {len(steps)} recorded" if steps else "none recorded yet"
    facts |= rollout_counts(rows) | turn_counts(run.arrow("turns", ["role", "error"]))
    facts["changed"] = "; ".join(map(_changed, run.info.get("changes", []))) or None
    console.print(_facts(facts))


def _changed(change: Mapping[str, Any]) -> str:
    """Describe which settings changed when a run was resumed, and from which step on."""
    settings = ", ".join(f"{name} {was} → {now}" for name, (was, now) in change["settings"].items())
    return f"from step {change['start_step']} on: {settings}"


def _show_steps(run: Run, console: Console, split: Split) -> None:
    """Print the means of each step, separately for training and held-out rollouts, or for held-out ones only."""
    rows = run.rows(["step", "split"])
    steps = (of_split(rows, split) if split == HELD_OUT else rows)["step"].unique().to_numpy()
    if not len(steps):
        _show_metrics(run, console)
        return
    shown = _some(steps)
    rows = run.rows(["step", "split", *MEANS], shown)
    rows = of_split(rows, split) if split == HELD_OUT else rows
    rows = rows.set_column(1, "split", pc.fill_null(rows["split"], ""))
    splits = sorted(set(rows["split"].to_pylist()), key=lambda split: (split == HELD_OUT, split))
    coefficients = _coefficients(run)
    has_rewards = rows["reward"].null_count < rows.num_rows
    lines = []
    for step, split in ((step, split) for step in shown for split in splits):
        mine = rows.filter((pc.field("step") == step) & (pc.field("split") == split))
        if mine.num_rows:
            means = {name: _mean(mine[name], spread=name == "reward") for name in MEANS}
            only = {"split": split} if len(splits) > 1 else {}
            unscored = mine["reward"].null_count or None if has_rewards else None
            lines.append({"step": step, **only, "unscored": unscored, **means, "kl/coef": coefficients.get(step)})
    console.print(_table("steps: means over the rollouts, reward ± standard deviation", lines))


def _show_metrics(run: Run, console: Console) -> None:
    table = run.steps()
    names = [name for name in METRICS if name in table.column_names]
    if not table.num_rows:
        return
    rows = table.select(["step", *names]).take(_some(np.arange(table.num_rows))).to_pylist()
    console.print(_table("steps", rows))


def _some(steps: np.ndarray[Any, np.dtype[Any]]) -> list[int]:
    """Return at most MAX_STEPS of the steps, evenly spaced, including the first and the last."""
    chosen: list[int] = steps[np.unique(np.linspace(0, len(steps) - 1, MAX_STEPS).round().astype(int))].tolist()
    return chosen


def _coefficients(run: Run) -> dict[int, float]:
    steps = run.steps()
    if "kl/coef" not in steps.column_names:
        return {}
    return dict(zip(steps["step"].to_pylist(), steps["kl/coef"].to_pylist(), strict=True))


def _mean(column: pa.ChunkedArray, *, spread: bool) -> str | None:
    values = column.drop_null().to_numpy()
    if not len(values):
        return None
    with np.errstate(all="ignore"):
        return f"{_number(values.mean())} ± {_number(values.std())}" if spread else _number(values.mean())


def _show_extremes(
    run: Run, console: Console, title: str, order: str, step: int | None, limit: int, split: Split
) -> None:
    where = (
        f"AND split = '{split}'" if split == HELD_OUT else f"AND coalesce(split NOT IN ('{GIVEN}', '{HELD_OUT}'), true)"
    )
    where += "" if step is None else f" AND step = {step:d}"
    column = order.split()[0]
    query = f"SELECT step, sample FROM rows WHERE {column} IS NOT NULL AND NOT isnan({column}) {where}"
    keys = run.sql(f"{query} ORDER BY {order}, step, sample LIMIT {limit:d}").fetchall()
    lines = run.fetch(keys, ["step", "sample", "reward", "kl_k1", *TEXTS]).to_pylist()
    if lines:
        # The view of the rollout shows whole texts.
        console.print(_table(title, [line | {name: shortened(line[name], 300) for name in TEXTS} for line in lines]))


def _show_rollout(run: Run, console: Console, step: int, sample: int) -> None:
    row, tokens = run.rollout(step, sample)
    facts = {column.name: row[column.name] for column in ROW_COLUMNS if column.name != "prompt_ids"}
    console.print(_facts(facts))
    if turns := run.turns(step, sample).select(TURN_FACTS).to_pylist():
        console.print(_table("turns", turns))
    lines = []
    padding = padding_at_end(run, tokens)
    tokens = tokens.slice(0, tokens.num_rows - padding)
    texts = run.token_texts(tokens["token_id"].to_pylist())
    kl_k1 = DERIVED["kl_k1"].of({name: tokens[name].to_numpy() for name in DERIVED["kl_k1"].needs})
    tokens = tokens.append_column("kl_k1", pa.array(kl_k1, from_pandas=True))
    for token, text in zip(tokens.to_pylist(), texts, strict=True):
        shown = text if token["token"] is None else token["token"]
        numbers = {name: token[name] for name in TOKEN_NUMBERS}
        lines.append({"position": token["position"], "token": shown, "": _remark(token), **numbers})
    if lines:
        console.print(_table("tokens", lines))
    if padding:
        console.print(f"{counted(padding, 'padding token')} at the end {'is' if padding == 1 else 'are'} not shown")


def _remark(token: Mapping[str, Any]) -> str | None:
    """Return who wrote a token if that was not the policy, and whether it was not learned."""
    said = [token["source"]] if token["source"] not in (None, "sampled") else []
    said += ["not learned"] if token["learned"] is False else []
    return ", ".join(said) or None


def show_answer(columns: Sequence[str], rows: Sequence[Sequence[Any]], console: Console) -> None:
    """Print a table; if the columns do not fit side by side, print each row as a separate block."""
    cells = [[shown(f"{v:.7g}" if isinstance(v, float) else v) for v in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(map(shown, columns), *cells, strict=True)]
    if sum(min(width, NARROW) + 3 for width in widths) + 1 > console.width:
        for number, row in enumerate(cells, start=1):
            console.print(Text(f"line {number}", "bold"))
            grid = Table.grid(padding=(0, 2))
            for name, value in zip(columns, row, strict=True):
                grid.add_row(shown(name), value)
            console.print(grid)
        return
    table = Table()
    for name in columns:
        table.add_column(shown(name), overflow="fold")
    for row in cells:
        table.add_row(*row)
    console.print(table)


def _facts(facts: Mapping[str, Any]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        if value is not None:
            grid.add_row(Text(name, "bold"), shown(value, "↵\n"))
    return grid


def _table(title: str, lines: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of the columns in which any row has a value; only text columns wrap."""
    table = Table(title=title, title_justify="left")
    names = [name for name in lines[0] if any(line[name] is not None for line in lines)]
    for name in names:
        side: Literal["left", "right"] = "left" if name in (*WRAPPED, *NAMES) else "right"
        # Numbers keep their width: on a narrow terminal, only the columns that may wrap shrink.
        table.add_column(name, justify=side, no_wrap=name not in WRAPPED, overflow="fold")
    for line in lines:
        table.add_row(*(shown(line[name]) for name in names))
    return table


def shown(value: Any, newline: str = "↵") -> Text:
    """Return text that is printed literally, without markup or control characters."""
    if value is None:
        return Text()
    if isinstance(value, dict):
        value = ", ".join(f"{name} {_number(part)}" for name, part in value.items())
    text = _number(value) if isinstance(value, float) else str(value)
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}… and {len(text) - LONGEST:,} characters more"
    return Text(visible_line(text).replace("↵", newline))


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)
