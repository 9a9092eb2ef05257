"""Checks of the rows of a run: too long, duplicated, or both held out and trained on."""

from collections.abc import Sequence
from typing import Any

from cavesson.algorithms.runs import ExampleRun, RolloutRun
from cavesson.check.finding import Finding, Fine, Results, Skipped
from cavesson.check.largest import sequences_of
from cavesson.data.duplicates import duplicates
from cavesson.data.examples import Examples
from cavesson.data.load import load
from cavesson.data.prompts import PromptSet
from cavesson.data.types import Demonstration, Pair, Prompt

_MOST_DROPPED = 0.2
_MOST_CUT = 0.1
_MOST_REPEATED = 0.05


def check_prompts(settings: RolloutRun, prompts: PromptSet) -> Results:
    """Check the prompts that a run samples from."""
    rows = len(prompts) + len(prompts.dropped)
    share = len(prompts.dropped) / rows
    healthy = f"share of prompts over data.max_prompt_tokens, which are dropped; at most {_MOST_DROPPED:g}"
    if share > _MOST_DROPPED:
        first = ", ".join(str(row + 1) for row in prompts.dropped[:5])
        yield Finding(
            "prompts-dropped",
            "warning",
            "Many prompts are dropped",
            f"{len(prompts.dropped)} of {rows} are longer than {settings.data.max_prompt_tokens} tokens, the first "
            f"in rows {first}.",
            "data.max_prompt_tokens: more, if the memory allows",
            share,
            healthy,
        )
    else:
        yield Fine("prompts-dropped", share, healthy)
    yield from _duplicates(settings, Prompt)
    yield from _notes(prompts.notes)


def check_examples(settings: ExampleRun, examples: Examples[Any], kind: type[Demonstration] | type[Pair]) -> Results:
    """Check the examples that a run trains on."""
    if settings.data.stream:
        yield Skipped("data", "it is read while training (data.stream)")
        return
    limit = getattr(settings.data, "max_length", 0)
    lengths = [len(part.ids) for part in sequences_of(examples.train.take(0, examples.train.size or 0))]
    share = sum(length >= limit for length in lengths) / len(lengths)
    healthy = f"share of examples cut at data.max_length; at most {_MOST_CUT:g}"
    if share > _MOST_CUT and settings.data.overlong == "truncate":  # type: ignore[attr-defined]
        yield Finding(
            "examples-cut",
            "warning",
            "Many examples have no end",
            f"{share:.0%} of the examples are as long as the limit of {limit} tokens: how a response ends is not "
            "learned from them.",
            'data.max_length: more, or data.overlong = "drop"',
            share,
            healthy,
            "TRL #2708",
        )
    else:
        yield Fine("examples-cut", share, healthy)
    if not examples.held_out:
        yield Finding(
            "held-out",
            "note",
            "Nothing is held out",
            "Every row is learned from, so nothing will say what was learned and what was memorised.",
            "data.validation = 0.1",
        )
    yield from _duplicates(settings, kind)
    yield from _notes(examples.notes())


def _duplicates(settings: RolloutRun | ExampleRun, kind: Any) -> Results:
    loaded = load(settings.data, kind)
    report = duplicates(loaded.train, loaded.held_out, show=1)
    repeated, held_out, _ = report.found
    healthy = f"share of rows that repeat an earlier one; at most {_MOST_REPEATED:g}"
    share = repeated.count / report.rows
    if share > _MOST_REPEATED:
        row, of, _text = repeated.examples[0]
        yield Finding(
            "duplicates",
            "warning",
            "Many rows are there twice",
            f"{repeated.count} of {report.rows} rows repeat an earlier one; row {row} is row {of} again.",
            "take them out: cavesson data duplicates FILE names them",
            share,
            healthy,
        )
    else:
        yield Fine("duplicates", share, healthy)
    if held_out.count:
        row, of, _text = held_out.examples[0]
        yield Finding(
            "held-out-learned",
            "warning" if held_out.count > _MOST_REPEATED * report.held_out else "note",
            "Rows are held out and learned from",
            f"{held_out.count} of {report.held_out} held-out rows are among those that are trained on; row {row} of "
            f"them is row {of}. What is measured on them is too good.",
            "take the duplicates out: cavesson data duplicates FILE names them",
            held_out.count,
            "held-out rows that are trained on; 0",
        )


def _notes(notes: Sequence[str]) -> Results:
    if notes:
        yield Finding(
            "data-notes",
            "note",
            "Some rows were left out or look odd",
            "\n".join(notes),
            "look at the rows named: cavesson data show RECIPE.toml --row N",
        )
